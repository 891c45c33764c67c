-- Messages of a newer format: each waits here for a worker that can read it, and the row is the only copy.

CREATE TABLE held_messages (
    lane text COLLATE "C" NOT NULL CONSTRAINT held_lane_is_a_provider_name CHECK (lane ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    body_sha256 bytea NOT NULL CONSTRAINT held_body_sha256_is_32_bytes CHECK (octet_length(body_sha256) = 32),
    -- The format's version, as the message says it.
    version bigint NOT NULL CONSTRAINT held_version_is_above_0 CHECK (version > 0),
    body bytea NOT NULL CONSTRAINT held_body_is_at_most_64_kib CHECK (octet_length(body) <= 65536),
    properties jsonb NOT NULL,
    -- When the lane received it first: a repeated message changes nothing.
    received_at timestamptz NOT NULL,
    PRIMARY KEY (lane, body_sha256),
    CONSTRAINT instants_are_finite CHECK (
        least(received_at) >= '0001-01-01 00:00:00+00' AND greatest(received_at) < '9999-12-30 22:00:00+00')
);

-- A sweep reads a lane's messages in the order of their arrival.
CREATE INDEX held_messages_by_time ON held_messages (lane, received_at);
