-- The limiter leader of each quota. Workers write it by compare-and-set; it is no setting.

CREATE TABLE limiter_authority (
    quota TEXT NOT NULL PRIMARY KEY
        CONSTRAINT authority_quota_is_a_provider_name
            CHECK (quota GLOB '[a-z0-9]*' AND quota NOT GLOB '*[^a-z0-9_-]*' AND length(quota) <= 63),
    holder TEXT NOT NULL
        CONSTRAINT holder_is_share_or_redis_and_a_run_id
            CHECK (holder = 'share' OR (substr(holder, 1, 6) = 'redis:' AND length(holder) BETWEEN 7 AND 70
                                        AND substr(holder, 7) NOT GLOB '*[^A-Za-z0-9_-]*')),
    -- Increases by one with each change of the holder.
    term INTEGER NOT NULL CONSTRAINT term_is_1_or_more CHECK (term >= 1),
    -- When the holder took over, by the database's clock.
    since INTEGER NOT NULL,

    -- The last clock attestation: the limiter store's clock compared with this database's, for a worker that starts
    -- later and did not see an earlier step. Each change of the holder clears it.
    -- Bounds of the store's clock minus the database's.
    clock_ahead_least_us INTEGER,
    clock_ahead_most_us INTEGER,
    -- By the store's clock: it made no step after this.
    clock_since_us INTEGER,
    clock_said_at INTEGER,

    CONSTRAINT a_word_on_the_clock_is_whole
        CHECK ((clock_ahead_least_us IS NULL) + (clock_ahead_most_us IS NULL) + (clock_since_us IS NULL)
               + (clock_said_at IS NULL) IN (0, 4))
) STRICT;
CREATE TRIGGER instants_are_finite_of_limiter_authority_on_insert
    BEFORE INSERT ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_limiter_authority
    BEFORE UPDATE OF since, clock_said_at ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
