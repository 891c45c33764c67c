-- If SQL finished an active job and took its lease in the same statement, that looked like a worker's own step: no
-- event was sent, and nothing was audited. Every step of a worker changes updated_at. A step in the same instant of a
-- coarse clock does not, so a second is allowed.
DROP TRIGGER record_decision ON jobs;
CREATE TRIGGER record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled'
                 AND (NEW.updated_at <> OLD.updated_at OR OLD.updated_at > clock_timestamp() - interval '1 second')))
    EXECUTE FUNCTION jobs_record_decision();
