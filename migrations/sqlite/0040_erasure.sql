-- The personal data of payments can be erased once they have ended: account, references, payload, request and texts.
-- Id, idempotency key, hash and amount stay, so that the same message is recognised forever. Each erasure is audited.

-- The account of a frozen request may be emptied with its URL and its body.
DROP TRIGGER frozen_request_never_changes;
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR (NEW.frozen_account IS NOT OLD.frozen_account
                 AND NOT (NEW.frozen_account IS NULL AND NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
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

ALTER TABLE job_audit ADD COLUMN erased INTEGER NOT NULL DEFAULT 0 CONSTRAINT erased_is_0_or_1 CHECK (erased IN (0, 1));
DROP TRIGGER job_audit_never_changes;
CREATE TRIGGER job_audit_never_changes BEFORE UPDATE ON job_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.job_id <> OLD.job_id OR NEW.who <> OLD.who
        OR NEW.old_state <> OLD.old_state OR NEW.new_state IS NOT OLD.new_state
        OR NEW.cleared_maybe_charged <> OLD.cleared_maybe_charged OR NEW.erased <> OLD.erased
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER jobs_record_erasure AFTER UPDATE OF account ON jobs
    WHEN OLD.account IS NOT NULL AND NEW.account IS NULL
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged, erased)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, 0, 1);
END;
