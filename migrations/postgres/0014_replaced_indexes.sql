-- The indexes that 0011 and 0012 replace. Each of these begins with the same columns, so older programs use the new ones.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- As in 0004, but in the order of the new index: it chooses the oldest payments of the account first.
CREATE OR REPLACE FUNCTION jobs_erase(of_account text, at_most bigint, because text DEFAULT NULL,
                           OUT erased_jobs bigint, OUT erased_requests bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path FROM CURRENT AS $$
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
                AND NOT EXISTS (SELECT 1 FROM events AS event
                                WHERE event.job_id = jobs.id AND NOT event_is_published(event.sequence))
            ORDER BY account, created_at, seq LIMIT at_most FOR UPDATE),
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
    UPDATE events SET provider_reference = NULL,
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

DROP INDEX jobs_by_provider_and_state, jobs_by_account;
