-- Only triggers write audits, only triggers and functions change the version of the settings, and operators decide
-- about payments through functions. So no role needs a right to the tables themselves. For who may call them, see docs,
-- "Least rights". The functions find all names in this schema and nowhere else.

-- Rows can only be added.
CREATE FUNCTION audit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'audits_never_change',
        MESSAGE = format('rows of %s are never changed or deleted', TG_TABLE_NAME);
END $$;
CREATE TRIGGER never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON settings_audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse_change();
CREATE TRIGGER never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON job_audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse_change();

-- Increases by one with each change. Only after a restore it must exceed the versions that workers and the limiter
-- store know, which hold 48 bits.
CREATE FUNCTION settings_refuse_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'settings_version_rises_by_one',
        MESSAGE = 'the version of the settings rises by one; only settings_raise_version() raises it further, to 2^48 at most';
END $$;
CREATE TRIGGER version_rises_by_one BEFORE UPDATE ON settings_version
    FOR EACH ROW WHEN (NEW.version < OLD.version
                       OR (NEW.version > OLD.version + 1 AND NEW.version > 281474976710656))
    EXECUTE FUNCTION settings_refuse_version();
CREATE TRIGGER never_deleted BEFORE DELETE OR TRUNCATE ON settings_version
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_version();

-- Returns the version if it is still this one, and locks it until the transaction ends.
CREATE FUNCTION settings_hold_version(expected bigint) RETURNS SETOF bigint LANGUAGE sql SECURITY DEFINER AS $$
    SELECT version FROM settings_version WHERE version = expected FOR UPDATE;
$$;

-- For a database that was restored from a backup. A trigger writes the audit.
CREATE FUNCTION settings_raise_version(expected bigint, raised bigint) RETURNS SETOF bigint
    LANGUAGE sql SECURITY DEFINER AS $$
    UPDATE settings_version SET version = raised WHERE version = expected AND raised > expected RETURNING version;
$$;

-- Applies an operator's decision to a payment. Returns nothing when the payment is not in `old_state` any more, or
-- cannot be sent again.
CREATE FUNCTION jobs_decide(job text, old_state text, new_state text, because text, reference text DEFAULT NULL,
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
                wake_at = statement_timestamp(),
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
                updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence)
            RETURNING jobs.*),
        told AS (
            INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
            SELECT id, provider, state, provider_reference, reason, attempts, updated_at FROM decided RETURNING job_id)
        SELECT job_id FROM told;
END $$;

-- Cancels a payment before its message comes: the row has the content that no message has.
CREATE FUNCTION jobs_cancel_ahead(job text, lane text, because text)
    RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER AS $$
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

-- Triggers that write an audit, or the version, do so with the owner's rights, whatever user's statement fires them.
-- `session_user` is that user.
DO $$
DECLARE
    function text;
BEGIN
    FOREACH function IN ARRAY ARRAY[
        'settings_bump_version()', 'settings_stamp_provider()', 'settings_touch_provider()', 'settings_record_change()',
        'settings_audit_person()', 'jobs_record_decision()', 'settings_hold_version(bigint)',
        'settings_raise_version(bigint, bigint)', 'jobs_decide(text, text, text, text, text, bigint)',
        'jobs_cancel_ahead(text, text, text)']
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', function, current_schema());
    END LOOP;
    FOREACH function IN ARRAY ARRAY[
        'settings_bump_version()', 'settings_stamp_provider()', 'settings_touch_provider()', 'settings_record_change()',
        'settings_audit_person()', 'settings_refuse_truncate()', 'settings_hint()', 'settings_version_audit()',
        'settings_refuse_version()', 'settings_hold_version(bigint)', 'settings_raise_version(bigint, bigint)',
        'jobs_record_decision()', 'jobs_refuse_change_of_frozen_request()', 'jobs_forget_sweep()',
        'jobs_decide(text, text, text, text, text, bigint)', 'jobs_cancel_ahead(text, text, text)',
        'audit_refuse_change()']
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', function);
    END LOOP;
END $$;
