-- The URL of a finished job's request may be emptied with its body: it may hold the reference.
DROP TRIGGER frozen_request_never_changes;
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR NEW.frozen_account IS NOT OLD.frozen_account
             OR (NEW.frozen_fingerprint IS NOT OLD.frozen_fingerprint
                 AND (OLD.maybe_charged OR OLD.state <> 'waiting' OR NEW.state <> 'sending'))
             OR (NEW.frozen_url IS NOT OLD.frozen_url
                 AND NOT (NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
             OR (NEW.frozen_body IS NOT OLD.frozen_body
                 AND NOT (length(NEW.frozen_body) = 0 AND NEW.state NOT IN ('waiting', 'sending', 'unknown'))))
BEGIN
    SELECT raise(ABORT, 'the frozen request of a job never changes');
END;

-- References that no limit counts any more, oldest first. The condition is written exactly as in the statement that
-- empties them, so that no search for one reference uses this index, whatever the statistics say.
CREATE INDEX attempts_with_a_reference ON attempts (began_at) WHERE (reference || '') IS NOT NULL;

-- The reference of an attempt is emptied when no window counts it any more, and never replaced by another.
CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON attempts
    WHEN NEW.reference IS NOT NULL AND NEW.reference IS NOT OLD.reference
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;
