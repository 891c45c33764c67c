-- Final states, a payment's content, and audits do not change, and the version of the settings only increases. A
-- database file has no roles: any user that may write it may also drop these triggers.

-- A command completes the audit of a payment with author and reason, once.
CREATE TRIGGER job_audit_never_changes BEFORE UPDATE ON job_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.job_id <> OLD.job_id OR NEW.who <> OLD.who
        OR NEW.old_state <> OLD.old_state OR NEW.new_state IS NOT OLD.new_state
        OR NEW.cleared_maybe_charged <> OLD.cleared_maybe_charged
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER job_audit_never_deleted BEFORE DELETE ON job_audit
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER settings_audit_never_changes BEFORE UPDATE ON settings_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.who <> OLD.who
        OR NEW.table_name <> OLD.table_name OR NEW.row_key <> OLD.row_key OR NEW.old_row IS NOT OLD.old_row
        OR NEW.new_row IS NOT OLD.new_row
BEGIN
    SELECT raise(ABORT, 'rows of settings_audit are never changed or deleted');
END;
CREATE TRIGGER settings_audit_never_deleted BEFORE DELETE ON settings_audit
BEGIN
    SELECT raise(ABORT, 'rows of settings_audit are never changed or deleted');
END;

-- Increases by one with each change. Only after a restore it must exceed the versions that the process and its limiter
-- know.
CREATE TRIGGER settings_version_rises BEFORE UPDATE ON settings_version
    WHEN NEW.version < OLD.version OR (NEW.version > OLD.version + 1 AND NEW.version > 281474976710656)
BEGIN
    SELECT raise(ABORT, 'the version of the settings rises by one, and after a restore to 2^48 at most');
END;
CREATE TRIGGER settings_version_never_deleted BEFORE DELETE ON settings_version
BEGIN
    SELECT raise(ABORT, 'the version of the settings is never deleted');
END;

CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state ON jobs
    WHEN NEW.state <> OLD.state AND OLD.state IN ('succeeded', 'declined', 'expired', 'cancelled')
BEGIN
    SELECT raise(ABORT, 'final_states_are_for_good: publish a new payment');
END;

-- The personal data of a payment may be emptied once it has ended.
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    WHEN NEW.id <> OLD.id OR NEW.provider <> OLD.provider OR NEW.idempotency_key <> OLD.idempotency_key
        OR NEW.key_given <> OLD.key_given OR NEW.content_hash <> OLD.content_hash OR NEW.amount <> OLD.amount
        OR NEW.currency <> OLD.currency OR NEW.cost <> OLD.cost OR NEW.priority <> OLD.priority
        OR NEW.not_before IS NOT OLD.not_before OR NEW.expires_at IS NOT OLD.expires_at
        OR (NEW.account IS NOT OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS NOT OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS NOT OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;

-- A worker leaves no final state and never clears maybe_charged. So any statement that does is audited, whatever else
-- it sets.
DROP TRIGGER jobs_record_decision;
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (OLD.maybe_charged AND NOT NEW.maybe_charged)
        OR (NEW.state <> OLD.state
            AND (OLD.state NOT IN ('waiting', 'sending', 'unknown')
                 OR (NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
                     AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.state <> 'cancelled'
                              AND (NEW.updated_at <> OLD.updated_at
                                   OR OLD.updated_at
                                       > CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) - 1000)))))
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged);
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
    SELECT NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts,
        CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown');
END;
