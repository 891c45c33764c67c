-- What workers report and share among themselves: their lanes, duties that one of them does, and totals.

-- The running worker processes. Each moves its beat on every two seconds. A worker that has seen another's beat stand still
-- deletes that row, and the jobs that it held return to the backlog.
CREATE TABLE workers (
    -- New at each start of a process.
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(id) BETWEEN 1 AND 64 AND id NOT GLOB '*[^A-Za-z0-9_-]*'),
    beat INTEGER NOT NULL CONSTRAINT beat_is_0_or_more CHECK (beat >= 0)
) STRICT;

-- The report of each running worker, every two seconds: one row for each process, so that any process can show all.
-- Only pages and `status` use these rows; a deleted row comes back.
CREATE TABLE worker_reports (
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(id) BETWEEN 1 AND 64 AND id NOT GLOB '*[^A-Za-z0-9_-]*'),
    host TEXT NOT NULL CONSTRAINT host_is_at_most_255_characters CHECK (length(host) <= 255),
    pid INTEGER NOT NULL CONSTRAINT pid_is_0_or_more CHECK (pid >= 0),
    version TEXT NOT NULL CONSTRAINT version_is_at_most_64_characters CHECK (length(version) <= 64),
    started_at INTEGER NOT NULL,
    -- By the database's clock, like every instant here: the clocks of workers may differ.
    reported_at INTEGER NOT NULL,
    -- The format of `report`; a program that knows only older formats ignores the row.
    format INTEGER NOT NULL CONSTRAINT format_is_1_or_more CHECK (format >= 1),
    report TEXT NOT NULL CONSTRAINT report_is_json CHECK (json_valid(report))
) STRICT;
CREATE TRIGGER instants_are_finite_of_worker_reports_on_insert
    BEFORE INSERT ON worker_reports
    WHEN NEW.started_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.reported_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_worker_reports
    BEFORE UPDATE OF started_at, reported_at ON worker_reports
    WHEN NEW.started_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.reported_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- Duties that one worker of the cluster does at a time: the one that moved `taken_until`.
CREATE TABLE upkeep_turns (
    duty TEXT NOT NULL PRIMARY KEY
        CONSTRAINT duty_is_a_short_word CHECK (length(duty) BETWEEN 1 AND 32 AND duty NOT GLOB '*[^a-z0-9_]*'),
    taken_until INTEGER NOT NULL
) STRICT;
CREATE TRIGGER instants_are_finite_of_upkeep_turns_on_insert
    BEFORE INSERT ON upkeep_turns
    WHEN NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_upkeep_turns
    BEFORE UPDATE OF taken_until ON upkeep_turns
    WHEN NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- What `check` and `status` write to see whether the database commits. One row: while a commit hangs, the next one waits
-- for the row, and no further session hangs.
CREATE TABLE commit_checks (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT commit_checks_has_one_row CHECK (only_row = 1),
    checked_at INTEGER NOT NULL
) STRICT;
CREATE TRIGGER instants_are_finite_of_commit_checks_on_insert
    BEFORE INSERT ON commit_checks
    WHEN NEW.checked_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_commit_checks
    BEFORE UPDATE OF checked_at ON commit_checks
    WHEN NEW.checked_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
INSERT INTO commit_checks (checked_at) VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER));

-- Totals of finished jobs, so that a reconciliation need not count them all. Payments write nothing here. The worker
-- that reconciles each minute adds the jobs that finished since, and sometimes counts all again.
CREATE TABLE finished_jobs (
    provider TEXT NOT NULL,
    state TEXT NOT NULL
        CONSTRAINT finished_state_is_for_good CHECK (state IN ('succeeded', 'declined', 'expired', 'cancelled')),
    -- Jobs whose `updated_at` is before `finished_mark.counted_before`.
    jobs INTEGER NOT NULL CONSTRAINT finished_jobs_is_0_or_more CHECK (jobs >= 0),
    PRIMARY KEY (provider, state)
) STRICT;

CREATE TABLE finished_mark (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT finished_mark_has_one_row CHECK (only_row = 1),
    -- The mark before this one: the jobs between both were added last.
    counted_from INTEGER NOT NULL,
    counted_before INTEGER NOT NULL,
    -- When all were last counted, and when they are counted next.
    counted_at INTEGER NOT NULL,
    recount_after INTEGER NOT NULL
) STRICT;
CREATE TRIGGER instants_are_finite_of_finished_mark_on_insert
    BEFORE INSERT ON finished_mark
    WHEN NEW.counted_from NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recount_after NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_finished_mark
    BEFORE UPDATE OF counted_from, counted_before, counted_at, recount_after ON finished_mark
    WHEN NEW.counted_from NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recount_after NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
-- The totals start at the epoch, so that a job imported by SQL is counted.
INSERT INTO finished_mark (counted_from, counted_before, counted_at, recount_after)
SELECT 0, 0, at, at FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS at);
