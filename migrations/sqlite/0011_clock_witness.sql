-- The last clock attestation: the limiter store's clock compared with this database's, for a worker that starts later
-- and did not see an earlier step. Each change of the holder clears it.

-- Bounds of the store's clock minus the database's.
ALTER TABLE limiter_authority ADD COLUMN clock_ahead_least_us INTEGER;
ALTER TABLE limiter_authority ADD COLUMN clock_ahead_most_us INTEGER;
-- By the store's clock: it made no step after this.
ALTER TABLE limiter_authority ADD COLUMN clock_since_us INTEGER;
ALTER TABLE limiter_authority ADD COLUMN clock_said_at INTEGER
    CONSTRAINT a_word_on_the_clock_is_whole
        CHECK ((clock_ahead_least_us IS NULL) + (clock_ahead_most_us IS NULL) + (clock_since_us IS NULL)
               + (clock_said_at IS NULL) IN (0, 4));
