-- The limit that `wait_reason` names, if its code means one, and the text that belongs to the wait. 0050 turns the
-- sentences of `wait_reason` into codes.
ALTER TABLE jobs ADD COLUMN wait_limit text, ADD COLUMN wait_detail text;

-- As before. A payment that is sent again waits for nothing.
CREATE OR REPLACE FUNCTION jobs_decide(job text, old_state text, new_state text, because text, reference text DEFAULT NULL,
                                       seen_fence bigint DEFAULT NULL)
    RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF (old_state, new_state) NOT IN (('waiting', 'cancelled'), ('dead', 'cancelled'), ('dead', 'waiting'),
                                      ('review', 'succeeded'), ('review', 'declined'), ('review', 'waiting')) THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'decision_is_known',
            MESSAGE = format('no decision changes a payment from %s to %s', old_state, new_state);
    END IF;
    IF EXISTS (SELECT 1 FROM attempts WHERE job_id = job AND ended_at IS NULL) THEN
        RETURN;
    END IF;
    IF new_state = 'waiting' THEN
        -- The time of the first request stays: the provider may have remembered the key since then. The reference is
        -- cleared: the next response brings its own, and the former one may belong to another payment.
        RETURN QUERY UPDATE jobs SET state = new_state, fence = fence + 1, reason = because, maybe_charged = false,
                attempts = 0, lookups = 0, resend = NULL, lost_holders = 0, provider_reference = NULL,
                wake_at = statement_timestamp(), wait_reason = NULL, wait_limit = NULL, wait_detail = NULL,
                revived_at = statement_timestamp(), copy = copy + 1, delayed_copy = NULL, delayed_until = NULL,
                updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence) AND lease_until IS NULL
                AND (state = 'review' OR NOT maybe_charged)
                AND scrubbed_at IS NULL AND (frozen_body IS NULL OR frozen_body <> '')
                AND (expires_at IS NULL OR expires_at > statement_timestamp())
            RETURNING id::text;
        RETURN;
    END IF;
    RETURN QUERY WITH decided AS (
            UPDATE jobs SET state = new_state, fence = fence + 1, lease_owner = NULL, lease_until = NULL,
                reason = because, provider_reference = coalesce(jobs_decide.reference, provider_reference),
                scrubbed_at = NULL, updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence)
            RETURNING jobs.*),
        events AS (
            INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
            SELECT id, provider, state, provider_reference, reason, attempts, updated_at FROM decided RETURNING job_id)
        SELECT job_id FROM events;
END $$;

-- As before, with the new columns.
CREATE OR REPLACE FUNCTION jobs_erase(of_account text, at_most bigint, because text DEFAULT NULL,
                                      OUT erased_jobs bigint, OUT erased_requests bigint)
    LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    ids text[];
BEGIN
    IF because IS NOT NULL THEN
        PERFORM set_config('sluicegate.because', because, true);
    END IF;
    -- The account as a range, and no scan of a table: whatever statistics say, its payments are found by their own index.
    WITH chosen AS (
            SELECT id FROM jobs
            WHERE account >= of_account AND account <= of_account AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')
                AND NOT EXISTS (SELECT 1 FROM outcome_events AS event
                                WHERE event.job_id = jobs.id AND event.published_at IS NULL)
            ORDER BY account, id LIMIT at_most FOR UPDATE),
        changed AS (
            -- The totals of finished jobs do not include the last minutes yet, and find those jobs by `scrubbed_at`.
            UPDATE jobs SET account = NULL, reference = NULL, provider_reference = NULL, payload = NULL,
                reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END,
                wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, wait_since = NULL, wait_until = NULL, wait_request = NULL,
                frozen_url = CASE WHEN frozen_url IS NOT NULL THEN '' END,
                frozen_body = CASE WHEN frozen_body IS NOT NULL THEN ''::bytea END, frozen_account = NULL,
                scrubbed_at = coalesce(scrubbed_at, CASE
                    WHEN state = 'dead' OR updated_at < (SELECT counted_before FROM finished_mark)
                    THEN statement_timestamp() END)
            FROM chosen WHERE jobs.id = chosen.id RETURNING jobs.id)
        SELECT array_agg(id::text) FROM changed INTO ids;
    erased_jobs := coalesce(cardinality(ids), 0);
    UPDATE outcome_events SET provider_reference = NULL,
        reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END
        WHERE job_id = ANY (ids);
    UPDATE attempts SET detail = '' WHERE job_id = ANY (ids) AND detail <> '';
    WITH RECURSIVE lanes (provider) AS (
            SELECT min(provider::text) FROM jobs
            UNION ALL
            SELECT (SELECT min(provider::text) FROM jobs WHERE jobs.provider > lanes.provider) FROM lanes
            WHERE lanes.provider IS NOT NULL),
        old AS (
            SELECT attempts.job_id, attempts.number
            FROM lanes JOIN attempts ON attempts.provider = lanes.provider AND attempts.account = of_account
            JOIN jobs ON jobs.id = attempts.job_id AND jobs.account IS NULL
            WHERE attempts.began_at <= statement_timestamp() - interval '32 days'
            LIMIT at_most)
        UPDATE attempts SET account = NULL, reference = NULL FROM old
        WHERE attempts.job_id = old.job_id AND attempts.number = old.number;
    GET DIAGNOSTICS erased_requests = ROW_COUNT;
END $$;

ALTER FUNCTION jobs_erase(text, bigint, text) SET enable_seqscan = off;

DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY['jobs_erase(text, bigint, text)', 'jobs_decide(text, text, text, text, text, bigint)']
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', function, current_schema());
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', function);
    END LOOP;
END $$;
