-- Operators' decisions: the audit of changed states, and payments that are sent again.

-- When an operator last sent the job again: its age counts from then.
ALTER TABLE jobs ADD COLUMN revived_at timestamptz;

-- No foreign key: the audit keeps deleted jobs, too.
CREATE TABLE job_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    job_id text NOT NULL,
    -- The database's user, and that of the operating system as a command names it (user@host).
    who text NOT NULL,
    os_user text,
    program text,
    old_state text NOT NULL,
    -- NULL: the row was deleted.
    new_state text,
    -- The operator confirmed that the payment was not charged.
    cleared_maybe_charged boolean NOT NULL,
    because text
);
CREATE INDEX job_audit_by_job ON job_audit (job_id);

CREATE FUNCTION jobs_record_decision() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_audit (job_id, who, os_user, program, old_state, new_state, cleared_maybe_charged, because)
    VALUES (OLD.id, session_user, nullif(current_setting('sluicegate.os_user', true), ''),
            nullif(current_setting('application_name'), ''), OLD.state,
            CASE TG_OP WHEN 'UPDATE' THEN NEW.state END,
            CASE TG_OP WHEN 'UPDATE' THEN OLD.maybe_charged AND NOT NEW.maybe_charged ELSE false END,
            nullif(current_setting('sluicegate.because', true), ''));
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    IF TG_OP = 'UPDATE' AND NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown') THEN
        INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
        VALUES (NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts, clock_timestamp());
    END IF;
    RETURN NULL;
END $$;

-- Changes that no worker made. A worker changes a state when it claims the job (a lease, a higher fence), while it has
-- the lease (the same fence), or when it sweeps the job (a higher fence). It never sets a state that only an operator
-- may decide, never cancels, and never clears maybe_charged.
CREATE TRIGGER record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled'))
    EXECUTE FUNCTION jobs_record_decision();
CREATE TRIGGER record_deletion AFTER DELETE ON jobs
    FOR EACH ROW EXECUTE FUNCTION jobs_record_decision();
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON jobs
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();
