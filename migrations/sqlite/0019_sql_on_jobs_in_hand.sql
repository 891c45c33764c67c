-- If SQL finished an active job and took its lease in the same statement, that looked like a worker's own step: no
-- event was sent, and nothing was audited. Every step of a worker changes updated_at. A step in the same instant of a
-- coarse clock does not, so a second is allowed.
DROP TRIGGER jobs_record_decision;
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled'
                 AND (NEW.updated_at <> OLD.updated_at
                      OR OLD.updated_at > CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) - 1000))
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
