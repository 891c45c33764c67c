-- What workers report and share among themselves: their lanes, duties that one of them does, and totals.

-- The running worker processes. Each moves its beat on every two seconds. A worker that has seen another's beat stand still
-- deletes that row, and the jobs that it held return to the backlog.
CREATE TABLE workers (
    -- New at each start of a process.
    id text COLLATE "C" NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash CHECK (id ~ '^[A-Za-z0-9_-]{1,64}$'),
    beat bigint NOT NULL CONSTRAINT beat_is_0_or_more CHECK (beat >= 0)
) WITH (fillfactor = 50);

-- The report of each running worker, every two seconds: one row for each process, so that any process can show all.
-- Only pages and `status` use these rows; a deleted row comes back.
CREATE TABLE worker_reports (
    id text COLLATE "C" NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash CHECK (id ~ '^[A-Za-z0-9_-]{1,64}$'),
    host text COLLATE "C" NOT NULL CONSTRAINT host_is_at_most_255_characters CHECK (char_length(host) <= 255),
    pid bigint NOT NULL CONSTRAINT pid_is_0_or_more CHECK (pid >= 0),
    version text COLLATE "C" NOT NULL CONSTRAINT version_is_at_most_64_characters CHECK (char_length(version) <= 64),
    started_at timestamptz NOT NULL,
    -- By the database's clock, like every instant here: the clocks of workers may differ.
    reported_at timestamptz NOT NULL,
    -- The format of `report`; a program that knows only older formats ignores the row.
    format bigint NOT NULL CONSTRAINT format_is_1_or_more CHECK (format >= 1),
    report jsonb NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(started_at, reported_at) >= '0001-01-01 00:00:00+00'
        AND greatest(started_at, reported_at) < '9999-12-30 22:00:00+00')
);

-- Duties that one worker of the cluster does at a time: the one that moved `taken_until`.
CREATE TABLE upkeep_turns (
    duty text COLLATE "C" NOT NULL PRIMARY KEY CONSTRAINT duty_is_a_short_word CHECK (duty ~ '^[a-z0-9_]{1,32}$'),
    taken_until timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(taken_until) >= '0001-01-01 00:00:00+00' AND greatest(taken_until) < '9999-12-30 22:00:00+00')
);

-- What `check` and `status` write to see whether the database commits. One row: while a commit waits for its standby,
-- the next one waits for the row, and no further session hangs.
CREATE TABLE commit_checks (
    only_row boolean PRIMARY KEY DEFAULT true CONSTRAINT commit_checks_has_one_row CHECK (only_row),
    checked_at timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(checked_at) >= '0001-01-01 00:00:00+00' AND greatest(checked_at) < '9999-12-30 22:00:00+00')
);
INSERT INTO commit_checks (checked_at) VALUES (now());

-- Totals of finished jobs, so that a reconciliation need not count them all. Payments write nothing here. The worker
-- that reconciles each minute adds the jobs that finished since, and sometimes counts all again.
CREATE TABLE finished_jobs (
    provider text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL
        CONSTRAINT finished_state_is_for_good CHECK (state IN ('succeeded', 'declined', 'expired', 'cancelled')),
    -- Jobs whose `updated_at` is before `finished_mark.counted_before`.
    jobs bigint NOT NULL CONSTRAINT finished_jobs_is_0_or_more CHECK (jobs >= 0),
    PRIMARY KEY (provider, state)
);

CREATE TABLE finished_mark (
    only_row boolean PRIMARY KEY DEFAULT true CONSTRAINT finished_mark_has_one_row CHECK (only_row),
    -- The mark before this one: the jobs between both were added last.
    counted_from timestamptz NOT NULL,
    counted_before timestamptz NOT NULL,
    -- When all were last counted, and when they are counted next.
    counted_at timestamptz NOT NULL,
    recount_after timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(counted_from, counted_before, counted_at, recount_after) >= '0001-01-01 00:00:00+00'
        AND greatest(counted_from, counted_before, counted_at, recount_after) < '9999-12-30 22:00:00+00')
);
-- The totals start at the epoch, so that a job imported by SQL is counted.
INSERT INTO finished_mark (counted_from, counted_before, counted_at, recount_after)
VALUES (timestamptz 'epoch', timestamptz 'epoch', now(), now());
