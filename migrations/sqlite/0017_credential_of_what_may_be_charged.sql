-- As long as no request of a job can have charged, the next one may have another credential, and later requests are
-- compared with that one. Before, the first request's credential stayed.

DROP TRIGGER frozen_request_never_changes;
-- The body of a finished job may be emptied.
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method OR NEW.frozen_url IS NOT OLD.frozen_url
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR NEW.frozen_account IS NOT OLD.frozen_account
             OR (NEW.frozen_fingerprint IS NOT OLD.frozen_fingerprint
                 AND (OLD.maybe_charged OR OLD.state <> 'waiting' OR NEW.state <> 'sending'))
             OR (NEW.frozen_body IS NOT OLD.frozen_body
                 AND NOT (length(NEW.frozen_body) = 0 AND NEW.state NOT IN ('waiting', 'sending', 'unknown'))))
BEGIN
    SELECT raise(ABORT, 'the frozen request of a job never changes');
END;
