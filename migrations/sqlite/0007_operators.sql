-- Decisions of people: who changed a payment's state, and payments that are sent on their way again.

-- When a person last sent it on its way again: its age counts from then.
ALTER TABLE jobs ADD COLUMN revived_at INTEGER;

-- No foreign key: it tells of deleted jobs, too.
CREATE TABLE job_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    job_id TEXT NOT NULL,
    -- The database file knows no users, so `who` is the file's; a command adds the operating system's (user@host).
    who TEXT NOT NULL,
    os_user TEXT,
    program TEXT,
    old_state TEXT NOT NULL,
    -- NULL: the row was deleted.
    new_state TEXT,
    -- Somebody states that the payment was surely not charged.
    cleared_maybe_charged INTEGER NOT NULL
        CONSTRAINT cleared_maybe_charged_is_0_or_1 CHECK (cleared_maybe_charged IN (0, 1)),
    because TEXT
) STRICT;
CREATE INDEX job_audit_by_job ON job_audit (job_id);

-- Whoever is no worker. A worker changes a state when it takes the job (a lease, a higher fence) or while it holds it (a
-- lease before, the same fence), or sweeps it (a higher fence) into a state that nobody decides; it never cancels and never
-- takes maybe_charged back.
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled')
BEGIN
    INSERT INTO job_audit (job_id, who, old_state, new_state, cleared_maybe_charged)
    VALUES (OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged);
    -- The program moves fence or updated_at and writes its own events; plain SQL does neither.
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
