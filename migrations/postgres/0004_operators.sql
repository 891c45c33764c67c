-- Operators' decisions about payments: what they may decide, by which functions, and the audit of it. A role needs no
-- right to change `jobs`; for who may call the functions, see docs, "Least rights".

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- No foreign key: the audit keeps deleted jobs, too.
CREATE TABLE job_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    job_id text COLLATE "C" NOT NULL,
    -- The database's user, and that of the operating system as a command names it (user@host).
    who text COLLATE "C" NOT NULL,
    os_user text COLLATE "C",
    program text COLLATE "C",
    because text COLLATE "C",
    old_state text COLLATE "C" NOT NULL,
    -- NULL: the row was deleted.
    new_state text COLLATE "C",
    -- The operator confirmed that the payment was not charged.
    cleared_maybe_charged boolean NOT NULL,
    -- The amount that the operator gave, or that a statement set, in minor units.
    charged_amount bigint,
    -- The personal data was erased.
    erased boolean NOT NULL DEFAULT false,
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
CREATE INDEX job_audit_by_job ON job_audit (job_id);
CREATE TRIGGER never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON job_audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse_change();

CREATE FUNCTION jobs_record_decision() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO job_audit (job_id, who, os_user, program, old_state, new_state, cleared_maybe_charged, charged_amount,
                           because)
    VALUES (OLD.id, session_user, nullif(current_setting('sluicegate.os_user', true), ''),
            nullif(current_setting('application_name'), ''), OLD.state,
            CASE TG_OP WHEN 'UPDATE' THEN NEW.state END,
            CASE TG_OP WHEN 'UPDATE' THEN OLD.maybe_charged AND NOT NEW.maybe_charged ELSE false END,
            CASE TG_OP WHEN 'UPDATE' THEN NEW.charged_amount END,
            nullif(current_setting('sluicegate.because', true), ''));
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    IF TG_OP = 'UPDATE' AND NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown') THEN
        INSERT INTO events (job_id, n, provider, state, provider_reference, charged_amount, reason, attempts, at)
        VALUES (NEW.id, (SELECT count(*) + 1 FROM events WHERE job_id = NEW.id), NEW.provider, NEW.state,
                NEW.provider_reference, NEW.charged_amount, NEW.reason, NEW.attempts, clock_timestamp());
    END IF;
    RETURN NULL;
END $$;
-- Changes that no worker made. A worker changes a state when it claims the job (a lease, a higher fence), while it has
-- the lease (the same fence), or when it takes the job from a lost worker or ends it (a higher fence). Each step of a worker changes updated_at,
-- unless a coarse clock has not moved, so a second is allowed. It never sets a state that only an operator may decide,
-- never cancels, leaves no final state and never clears maybe_charged.
-- The condition is evaluated at each statement, so it is short.
CREATE TRIGGER record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        OLD.maybe_charged > NEW.maybe_charged
        OR (NEW.state <> OLD.state
            AND (OLD.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}')
                 OR (NOT (NEW.fence > OLD.fence
                          AND (NEW.holder IS NOT NULL OR NEW.state = ANY ('{expired,review,unknown}')))
                     AND NOT (OLD.holder IS NOT NULL AND NEW.fence = OLD.fence AND NEW.state <> 'cancelled'
                              AND (NEW.updated_at <> OLD.updated_at
                                   OR OLD.updated_at > clock_timestamp() - interval '1 second'))))))
    EXECUTE FUNCTION jobs_record_decision();
CREATE TRIGGER record_deletion AFTER DELETE ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_record_decision();
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON jobs
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();

CREATE FUNCTION jobs_record_erasure() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO job_audit (job_id, who, os_user, program, old_state, new_state, cleared_maybe_charged, because, erased)
    VALUES (OLD.id, session_user, nullif(current_setting('sluicegate.os_user', true), ''),
            nullif(current_setting('application_name'), ''), OLD.state, NEW.state, false,
            nullif(current_setting('sluicegate.because', true), ''), true);
    RETURN NULL;
END $$;
CREATE TRIGGER record_erasure AFTER UPDATE OF account ON jobs
    FOR EACH ROW WHEN (OLD.account IS NOT NULL AND NEW.account IS NULL)
    EXECUTE FUNCTION jobs_record_erasure();

-- Only jobs_decide(), which runs as the owner, leaves `review` and `dead`; a user with the owner's rights is audited.
-- No statement leaves the other final states.
CREATE FUNCTION jobs_refuse_reopening() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.state <> OLD.state AND OLD.state IN ('succeeded', 'declined', 'expired', 'cancelled') THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'final_states_are_for_good',
            MESSAGE = format('a payment that is %s stays so: publish a new payment', OLD.state);
    END IF;
    IF NOT pg_catalog.pg_has_role(current_user, (SELECT relowner FROM pg_catalog.pg_class WHERE oid = TG_RELID), 'USAGE')
    THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'people_decide_by_jobs_decide',
            MESSAGE = format('jobs_decide() alone changes a payment that is %s, or maybe_charged back to false', OLD.state);
    END IF;
    RETURN NEW;
END $$;
-- A worker's step costs a comparison of its old and its new state.
CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        (NEW.state <> OLD.state AND OLD.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}'))
        OR OLD.maybe_charged > NEW.maybe_charged)
    EXECUTE FUNCTION jobs_refuse_reopening();

-- Applies an operator's decision to a payment. Returns nothing when the payment is not in `old_state` any more, or
-- cannot be sent again.
CREATE FUNCTION jobs_decide(job text, old_state text, new_state text, because text, reference text DEFAULT NULL,
                            seen_fence bigint DEFAULT NULL, charged bigint DEFAULT NULL)
    RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
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
                charged_amount = NULL,
                wake_at = statement_timestamp(), wait_reason = NULL, wait_limit = NULL, wait_detail = NULL,
                revived_at = statement_timestamp(), updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence) AND holder IS NULL
                AND (state = 'review' OR NOT maybe_charged)
                AND scrubbed_at IS NULL AND (frozen_body IS NULL OR frozen_body <> '')
                AND (expires_at IS NULL OR expires_at > statement_timestamp())
            RETURNING id::text;
        RETURN;
    END IF;
    RETURN QUERY WITH decided AS (
            UPDATE jobs SET state = new_state, fence = fence + 1, holder = NULL, response_by = NULL,
                reason = because, provider_reference = coalesce(jobs_decide.reference, provider_reference),
                charged_amount = charged, scrubbed_at = NULL, updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence)
            RETURNING jobs.*),
        events AS (
            INSERT INTO events (job_id, n, provider, state, provider_reference, charged_amount, reason, attempts, at)
            SELECT id, (SELECT count(*) + 1 FROM events WHERE job_id = decided.id), provider, state, provider_reference,
                charged_amount, reason, attempts, updated_at
            FROM decided RETURNING job_id)
        SELECT job_id FROM events;
END $$;

-- Cancels a payment before its message comes: the row has the content that no message has.
CREATE FUNCTION jobs_cancel_ahead(job text, lane text, because text)
    RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, state,
                      wake_at, fence, created_at, updated_at)
    VALUES (job, lane, job, false, decode(repeat('00', 32), 'hex'), 1, 'XXX', 1, 0, 'waiting',
            statement_timestamp(), 0, statement_timestamp(), statement_timestamp())
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN QUERY SELECT jobs_decide(job, 'waiting', 'cancelled', because, NULL, 0);
    END IF;
END $$;

-- Erases the personal data of at most this many finished payments of an account whose outcome event is published:
-- account, references, payload, request and texts. Id, idempotency key, hash and amount stay, so that the same message
-- is recognised forever. A payment in `review` has not finished. Requests keep account and reference as long as a limit
-- may count them, 32 days, and lose them by a later call.
CREATE FUNCTION jobs_erase(of_account text, at_most bigint, because text DEFAULT NULL,
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

REVOKE ALL ON FUNCTION
    jobs_record_decision(), jobs_record_erasure(), jobs_refuse_reopening(),
    jobs_decide(text, text, text, text, text, bigint, bigint), jobs_cancel_ahead(text, text, text),
    jobs_erase(text, bigint, text)
FROM PUBLIC;
