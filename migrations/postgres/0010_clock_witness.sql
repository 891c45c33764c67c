-- The last clock attestation: the limiter store's clock compared with this database's, for a worker that starts later
-- and did not see an earlier step. Each change of the holder clears it.

ALTER TABLE limiter_authority
    -- Bounds of the store's clock minus the database's.
    ADD COLUMN clock_ahead_least_us bigint,
    ADD COLUMN clock_ahead_most_us bigint,
    -- By the store's clock: it made no step after this.
    ADD COLUMN clock_since_us bigint,
    ADD COLUMN clock_said_at timestamptz,
    ADD CONSTRAINT a_word_on_the_clock_is_whole
        CHECK (num_nulls(clock_ahead_least_us, clock_ahead_most_us, clock_since_us, clock_said_at) IN (0, 4));
