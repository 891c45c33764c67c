-- Operators' decisions about payments: which states are final, and the audit of what no worker did. A database file has
-- no roles: any user that may write it may also drop these triggers.

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
    because TEXT,
    old_state TEXT NOT NULL,
    -- NULL: the row was deleted.
    new_state TEXT,
    -- The operator confirmed that the payment was not charged.
    cleared_maybe_charged INTEGER NOT NULL
        CONSTRAINT cleared_maybe_charged_is_0_or_1 CHECK (cleared_maybe_charged IN (0, 1)),
    -- The amount that the operator gave, or that a statement set, in minor units.
    charged_amount INTEGER,
    -- The personal data was erased.
    erased INTEGER NOT NULL DEFAULT 0 CONSTRAINT erased_is_0_or_1 CHECK (erased IN (0, 1))
) STRICT;
CREATE INDEX job_audit_by_job ON job_audit (job_id);
CREATE TRIGGER instants_are_finite_of_job_audit_on_insert
    BEFORE INSERT ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_job_audit
    BEFORE UPDATE OF at ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
-- A command completes the audit of a payment with author and reason, once.
CREATE TRIGGER job_audit_never_changes BEFORE UPDATE ON job_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.job_id <> OLD.job_id OR NEW.who <> OLD.who
        OR NEW.old_state <> OLD.old_state OR NEW.new_state IS NOT OLD.new_state
        OR NEW.cleared_maybe_charged <> OLD.cleared_maybe_charged OR NEW.erased <> OLD.erased
        OR NEW.charged_amount IS NOT OLD.charged_amount
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER job_audit_never_deleted BEFORE DELETE ON job_audit
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;

-- Changes that no worker made. A worker changes a state when it claims the job (a lease, a higher fence), while it has
-- the lease (the same fence), or when it takes the job from a lost worker or ends it (a higher fence). Each step of a worker changes updated_at,
-- unless a coarse clock has not moved, so a second is allowed. It never sets a state that only an operator may decide,
-- never cancels, leaves no final state and never clears maybe_charged.
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (OLD.maybe_charged AND NOT NEW.maybe_charged)
        OR (NEW.state <> OLD.state
            AND (OLD.state NOT IN ('waiting', 'sending', 'unknown')
                 OR (NOT (NEW.fence > OLD.fence AND (NEW.holder IS NOT NULL OR NEW.state IN ('expired', 'review', 'unknown')))
                     AND NOT (OLD.holder IS NOT NULL AND NEW.fence = OLD.fence AND NEW.state <> 'cancelled'
                              AND (NEW.updated_at <> OLD.updated_at
                                   OR OLD.updated_at
                                       > CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) - 1000)))))
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged, charged_amount)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged,
        NEW.charged_amount);
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    INSERT INTO events (job_id, n, provider, state, provider_reference, charged_amount, reason, attempts, at)
    SELECT NEW.id, (SELECT count(*) + 1 FROM events WHERE job_id = NEW.id), NEW.provider, NEW.state, NEW.provider_reference, NEW.charged_amount, NEW.reason, NEW.attempts,
        CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown');
END;
CREATE TRIGGER jobs_record_deletion AFTER DELETE ON jobs
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, 0);
END;
CREATE TRIGGER jobs_record_erasure AFTER UPDATE OF account ON jobs
    WHEN OLD.account IS NOT NULL AND NEW.account IS NULL
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged, erased)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, 0, 1);
END;

CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state ON jobs
    WHEN NEW.state <> OLD.state AND OLD.state IN ('succeeded', 'declined', 'expired', 'cancelled')
BEGIN
    SELECT raise(ABORT, 'final_states_are_for_good: publish a new payment');
END;
