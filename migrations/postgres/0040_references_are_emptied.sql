-- The URL of a finished job's request may be emptied with its body: it may hold the reference. The trigger stays, and
-- only its function is replaced.
CREATE OR REPLACE FUNCTION jobs_refuse_change_of_frozen_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT OLD.maybe_charged AND OLD.state = 'waiting' AND NEW.state = 'sending'
       AND (NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_body,
            NEW.frozen_account)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_body,
            OLD.frozen_account)
    THEN
        RETURN NEW;
    END IF;
    IF NEW.state NOT IN ('waiting', 'sending', 'unknown') AND NEW.frozen_url = '' AND NEW.frozen_body = ''
       AND (NEW.frozen_method, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_account, NEW.frozen_fingerprint)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_account, OLD.frozen_fingerprint)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'frozen_request_never_changes',
        MESSAGE = 'the frozen request of a job never changes';
END $$;

-- The reference of an attempt is emptied when no window counts it any more, and never replaced by another.
CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON attempts
    FOR EACH ROW WHEN (NEW.reference IS NOT NULL AND NEW.reference IS DISTINCT FROM OLD.reference)
    EXECUTE FUNCTION jobs_refuse_change_of_content();
