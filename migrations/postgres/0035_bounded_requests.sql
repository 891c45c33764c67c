-- One message could expand into a request of gigabytes and kill each worker that claimed it. The stored request is
-- bounded (src/domain/expansion.rs). Triggers, because a CHECK runs at each step of a job, and an existing job with a
-- larger request must still be able to end.
CREATE FUNCTION jobs_refuse_what_is_too_large() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME,
        MESSAGE = format('a row of jobs violates constraint "%s"', TG_NAME);
END $$;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib
    BEFORE INSERT OR UPDATE OF frozen_body, frozen_url ON jobs
    FOR EACH ROW WHEN (octet_length(NEW.frozen_body) > 1048576 OR octet_length(NEW.frozen_url) > 8192)
    EXECUTE FUNCTION jobs_refuse_what_is_too_large();
CREATE TRIGGER payload_is_at_most_64_kib
    BEFORE INSERT OR UPDATE OF payload ON jobs
    FOR EACH ROW WHEN (octet_length(NEW.payload) > 65536)
    EXECUTE FUNCTION jobs_refuse_what_is_too_large();

-- Consecutive workers that were lost while the job was active, before they began a request for it.
ALTER TABLE jobs ADD COLUMN lost_holders bigint NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD CONSTRAINT lost_holders_is_0_or_more CHECK (lost_holders >= 0) NOT VALID;
