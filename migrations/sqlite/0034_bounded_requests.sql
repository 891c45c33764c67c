-- One message could expand into a request of gigabytes and kill each worker that claimed it. The stored request is
-- bounded (src/domain/expansion.rs). Triggers, because SQLite cannot add a CHECK to an existing column.
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib BEFORE UPDATE OF frozen_body, frozen_url ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib BEFORE UPDATE OF payload ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;

-- Consecutive workers that were lost while the job was active, before they began a request for it.
ALTER TABLE jobs ADD COLUMN lost_holders INTEGER NOT NULL DEFAULT 0
    CONSTRAINT lost_holders_is_0_or_more CHECK (lost_holders >= 0);
