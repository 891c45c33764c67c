-- As long as no request of a job can have been charged, the next one may carry another credential, and is the one that a
-- re-send after an unknown outcome is compared with. Before, the first request's stayed.

DROP TRIGGER frozen_request_never_changes ON jobs;
-- The body of a settled job may be emptied.
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    FOR EACH ROW WHEN (
        OLD.frozen_method IS NOT NULL
        AND ((NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_account)
             IS DISTINCT FROM
             (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_account)
             OR (NEW.frozen_fingerprint IS DISTINCT FROM OLD.frozen_fingerprint
                 AND (OLD.maybe_charged OR OLD.state <> 'waiting' OR NEW.state <> 'sending'))
             OR (NEW.frozen_body IS DISTINCT FROM OLD.frozen_body
                 AND NOT (NEW.frozen_body = '' AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))))
    EXECUTE FUNCTION jobs_refuse_change_of_frozen_request();
