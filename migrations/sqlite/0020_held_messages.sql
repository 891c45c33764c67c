-- Messages of a newer format: each waits here for a worker that can read it, and the row is the only copy.

CREATE TABLE held_messages (
    lane TEXT NOT NULL CONSTRAINT held_lane_is_a_provider_name
        CHECK (lane GLOB '[a-z0-9]*' AND lane NOT GLOB '*[^a-z0-9_-]*' AND length(lane) <= 63),
    body_sha256 BLOB NOT NULL CONSTRAINT held_body_sha256_is_32_bytes CHECK (length(body_sha256) = 32),
    -- The format's version, as the message says it.
    version INTEGER NOT NULL CONSTRAINT held_version_is_above_0 CHECK (version > 0),
    body BLOB NOT NULL CONSTRAINT held_body_is_at_most_64_kib CHECK (length(body) <= 65536),
    properties TEXT NOT NULL,
    -- When the lane received it first: a repeated message changes nothing.
    received_at INTEGER NOT NULL,
    PRIMARY KEY (lane, body_sha256)
) STRICT;

-- A sweep reads a lane's messages in the order of their arrival.
CREATE INDEX held_messages_by_time ON held_messages (lane, received_at);

CREATE TRIGGER instants_are_finite_of_held_messages_on_insert
    BEFORE INSERT ON held_messages
    WHEN NEW.received_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_held_messages
    BEFORE UPDATE OF received_at ON held_messages
    WHEN NEW.received_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
