-- As long as no request of a job can have charged, the next one may have another credential, and later requests are
-- compared with that one. Before, the first request's credential stayed.

-- The trigger stays, and only its function is replaced: a new trigger would wait for all readers of jobs, and all
-- writers would wait behind it.
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
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'frozen_request_never_changes',
        MESSAGE = 'the frozen request of a job never changes';
END $$;
