-- Operators' decisions: the audit of changed states, and payments that are sent again.

-- When an operator last sent the job again: its age counts from then.
ALTER TABLE jobs ADD COLUMN revived_at INTEGER;

-- No foreign key: the audit keeps deleted jobs, too.
CREATE TABLE job_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    job_id TEXT NOT NULL,
    -- A database file has no users, so `who` is 'database file'; a command adds the operating system's user
    -- (user@host).
    who TEXT NOT NULL,
    os_user TEXT,
    program TEXT,
    old_state TEXT NOT NULL,
    -- NULL: the row was deleted.
    new_state TEXT,
    -- The operator confirmed that the payment was not charged.
    cleared_maybe_charged INTEGER NOT NULL
        CONSTRAINT cleared_maybe_charged_is_0_or_1 CHECK (cleared_maybe_charged IN (0, 1)),
    because TEXT
) STRICT;
CREATE INDEX job_audit_by_job ON job_audit (job_id);

-- Changes that no worker made. A worker changes a state when it claims the job (a lease, a higher fence), while it has
-- the lease (the same fence), or when it sweeps the job (a higher fence). It never sets a state that only an operator
-- may decide, never cancels, and never clears maybe_charged.
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled')
BEGIN
    INSERT INTO job_audit (job_id, who, old_state, new_state, cleared_maybe_charged)
    VALUES (OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged);
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
    SELECT NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts,
        CAST(round(unixepoch('subsec') * 1000) AS INTEGER)
    WHERE NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown');
END;
CREATE TRIGGER jobs_record_deletion AFTER DELETE ON jobs
BEGIN
    INSERT INTO job_audit (job_id, who, old_state, cleared_maybe_charged)
    VALUES (OLD.id, 'database file', OLD.state, 0);
END;
