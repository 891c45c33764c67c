-- The history of each provider for charts: samples of ten seconds for a day and of five minutes for a month.

-- One worker of the cluster writes them. A provider without a change has no new row, except once an hour: then the row
-- before is still right. `history_runs` says for which time that holds.
CREATE TABLE history_samples (
    provider TEXT NOT NULL CONSTRAINT sample_provider_is_1_to_64_characters CHECK (length(provider) BETWEEN 1 AND 64),
    -- Length of the sample, in seconds.
    step_s INTEGER NOT NULL CONSTRAINT step_is_10_or_300_seconds CHECK (step_s IN (10, 300)),
    -- End of the sample, a multiple of its length.
    at INTEGER NOT NULL,
    -- Requests that started, payments that succeeded, were declined, expired or were cancelled, and 429 responses within the sample.
    started INTEGER NOT NULL CONSTRAINT started_is_0_or_more CHECK (started >= 0),
    finished INTEGER NOT NULL CONSTRAINT finished_is_0_or_more CHECK (finished >= 0),
    throttled INTEGER NOT NULL CONSTRAINT throttled_is_0_or_more CHECK (throttled >= 0),
    -- At the end of the sample. NULL: a source did not answer.
    waiting INTEGER CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    review INTEGER CONSTRAINT review_is_0_or_more CHECK (review >= 0),
    -- Mean rate of the slowest limit. NULL: no row is in force.
    limit_per_s REAL,
    PRIMARY KEY (provider, step_s, at)
) STRICT;
CREATE TRIGGER instants_are_finite_of_history_samples_on_insert
    BEFORE INSERT ON history_samples
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_history_samples
    BEFORE UPDATE OF at ON history_samples
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- The times for which samples were written without a gap. Between two of them nothing is known.
CREATE TABLE history_runs (
    began_at INTEGER NOT NULL PRIMARY KEY,
    recorded_until INTEGER NOT NULL,
    CONSTRAINT run_ends_after_its_start CHECK (recorded_until > began_at)
) STRICT;
CREATE TRIGGER instants_are_finite_of_history_runs_on_insert
    BEFORE INSERT ON history_runs
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recorded_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_history_runs
    BEFORE UPDATE OF began_at, recorded_until ON history_runs
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recorded_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- Events that no other table keeps, for a month: starts of workers, and changes of circuit breakers.
CREATE TABLE history_marks (
    -- Empty: all providers.
    provider TEXT NOT NULL CONSTRAINT mark_provider_is_at_most_64_characters CHECK (length(provider) <= 64),
    at INTEGER NOT NULL,
    kind TEXT NOT NULL
        CONSTRAINT mark_kind_is_a_short_word CHECK (length(kind) BETWEEN 1 AND 32 AND kind NOT GLOB '*[^a-z_]*'),
    -- The worker that reported it.
    worker TEXT NOT NULL CONSTRAINT mark_worker_is_1_to_64_characters CHECK (length(worker) BETWEEN 1 AND 64),
    detail TEXT NOT NULL CONSTRAINT mark_detail_is_at_most_1000_characters CHECK (length(detail) <= 1000),
    PRIMARY KEY (provider, at, kind, worker)
) STRICT;
CREATE TRIGGER instants_are_finite_of_history_marks_on_insert
    BEFORE INSERT ON history_marks
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_history_marks
    BEFORE UPDATE OF at ON history_marks
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
