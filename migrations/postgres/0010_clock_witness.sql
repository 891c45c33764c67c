-- What a worker said last of the limiter store's clock beside this database's: for one that comes later and could not see
-- a step that was made before. Forgotten with each change of the holder.

ALTER TABLE limiter_authority
    -- The store's clock is ahead of the database's by no less and no more than this.
    ADD COLUMN clock_ahead_least_us bigint,
    ADD COLUMN clock_ahead_most_us bigint,
    -- By the store's clock: no step from then on.
    ADD COLUMN clock_since_us bigint,
    ADD COLUMN clock_said_at timestamptz,
    ADD CONSTRAINT a_word_on_the_clock_is_whole
        CHECK (num_nulls(clock_ahead_least_us, clock_ahead_most_us, clock_since_us, clock_said_at) IN (0, 4));
