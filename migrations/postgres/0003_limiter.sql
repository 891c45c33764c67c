-- The limiter leader of each quota. Workers write it by compare-and-set; it is no setting.

CREATE TABLE limiter_authority (
    quota text COLLATE "C" NOT NULL PRIMARY KEY
        CONSTRAINT authority_quota_is_a_provider_name CHECK (quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    holder text COLLATE "C" NOT NULL
        CONSTRAINT holder_is_share_or_redis_and_a_run_id
            CHECK (holder = 'share' OR holder ~ '^redis:[A-Za-z0-9_-]{1,64}$'),
    -- Increases by one with each change of the holder.
    term bigint NOT NULL CONSTRAINT term_is_1_or_more CHECK (term >= 1),
    -- When the holder took over, by the database's clock.
    since timestamptz NOT NULL,

    -- The last clock attestation: the limiter store's clock compared with this database's, for a worker that starts
    -- later and did not see an earlier step. Each change of the holder clears it.
    -- Bounds of the store's clock minus the database's.
    clock_ahead_least_us bigint,
    clock_ahead_most_us bigint,
    -- By the store's clock: it made no step after this.
    clock_since_us bigint,
    clock_said_at timestamptz,

    CONSTRAINT a_word_on_the_clock_is_whole
        CHECK (num_nulls(clock_ahead_least_us, clock_ahead_most_us, clock_since_us, clock_said_at) IN (0, 4)),
    CONSTRAINT instants_are_finite CHECK (
        least(since, clock_said_at) >= '0001-01-01 00:00:00+00'
        AND greatest(since, clock_said_at) < '9999-12-30 22:00:00+00')
);
