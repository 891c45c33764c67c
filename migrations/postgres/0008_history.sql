-- The history of each provider for charts: samples of ten seconds for a day and of five minutes for a month.

-- One worker of the cluster writes them. A provider without a change has no new row, except once an hour: then the row
-- before is still right. `history_runs` says for which time that holds.
CREATE TABLE history_samples (
    provider text COLLATE "C" NOT NULL
        CONSTRAINT sample_provider_is_1_to_64_characters CHECK (char_length(provider) BETWEEN 1 AND 64),
    -- Length of the sample, in seconds.
    step_s bigint NOT NULL CONSTRAINT step_is_10_or_300_seconds CHECK (step_s IN (10, 300)),
    -- End of the sample, a multiple of its length.
    at timestamptz NOT NULL,
    -- Requests that started, payments that succeeded, were declined, expired or were cancelled, and 429 responses within the sample.
    started bigint NOT NULL CONSTRAINT started_is_0_or_more CHECK (started >= 0),
    finished bigint NOT NULL CONSTRAINT finished_is_0_or_more CHECK (finished >= 0),
    throttled bigint NOT NULL CONSTRAINT throttled_is_0_or_more CHECK (throttled >= 0),
    -- At the end of the sample. NULL: a source did not answer.
    waiting bigint CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    review bigint CONSTRAINT review_is_0_or_more CHECK (review >= 0),
    -- Mean rate of the slowest limit. NULL: no row is in force.
    limit_per_s double precision,
    PRIMARY KEY (provider, step_s, at),
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);

-- The times for which samples were written without a gap. Between two of them nothing is known.
CREATE TABLE history_runs (
    began_at timestamptz NOT NULL PRIMARY KEY,
    recorded_until timestamptz NOT NULL,
    CONSTRAINT run_ends_after_its_start CHECK (recorded_until > began_at),
    CONSTRAINT instants_are_finite CHECK (
        least(began_at, recorded_until) >= '0001-01-01 00:00:00+00'
        AND greatest(began_at, recorded_until) < '9999-12-30 22:00:00+00')
);

-- Events that no other table keeps, for a month: starts of workers, and changes of circuit breakers.
CREATE TABLE history_marks (
    -- Empty: all providers.
    provider text COLLATE "C" NOT NULL
        CONSTRAINT mark_provider_is_at_most_64_characters CHECK (char_length(provider) <= 64),
    at timestamptz NOT NULL,
    kind text COLLATE "C" NOT NULL CONSTRAINT mark_kind_is_a_short_word CHECK (kind ~ '^[a-z_]{1,32}$'),
    -- The worker that reported it.
    worker text COLLATE "C" NOT NULL
        CONSTRAINT mark_worker_is_1_to_64_characters CHECK (char_length(worker) BETWEEN 1 AND 64),
    detail text COLLATE "C" NOT NULL
        CONSTRAINT mark_detail_is_at_most_1000_characters CHECK (char_length(detail) <= 1000),
    PRIMARY KEY (provider, at, kind, worker),
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
