-- What a worker said last of the limiter store's clock beside this database's: for one that comes later and could not see
-- a step that was made before. Forgotten with each change of the holder.

-- The store's clock is ahead of the database's by no less and no more than this.
ALTER TABLE limiter_authority ADD COLUMN clock_ahead_least_us INTEGER;
ALTER TABLE limiter_authority ADD COLUMN clock_ahead_most_us INTEGER;
-- By the store's clock: no step from then on.
ALTER TABLE limiter_authority ADD COLUMN clock_since_us INTEGER;
ALTER TABLE limiter_authority ADD COLUMN clock_said_at INTEGER
    CONSTRAINT a_word_on_the_clock_is_whole
        CHECK ((clock_ahead_least_us IS NULL) + (clock_ahead_most_us IS NULL) + (clock_since_us IS NULL)
               + (clock_said_at IS NULL) IN (0, 4));
