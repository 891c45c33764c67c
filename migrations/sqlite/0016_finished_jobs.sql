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

-- Without a job, the totals start at the epoch, so that a job imported by SQL is counted.
INSERT INTO finished_mark (counted_from, counted_before, counted_at, recount_after)
SELECT before, before, at, at
FROM (SELECT at, CASE WHEN EXISTS (SELECT 1 FROM jobs) THEN at - 120000 ELSE 0 END AS before
      FROM (SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) AS at));
-- All jobs by an index alone, minus the recent ones: the index does not show a job's age.
INSERT INTO finished_jobs (provider, state, jobs)
SELECT provider, state, sum(jobs)
FROM (SELECT provider, state, count(*) AS jobs FROM jobs
      WHERE state IN ('succeeded', 'declined', 'expired', 'cancelled') GROUP BY provider, state
      UNION ALL
      SELECT provider, state, -count(*) FROM jobs
      WHERE scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'
          AND updated_at >= (SELECT counted_before FROM finished_mark)
      GROUP BY provider, state)
GROUP BY provider, state;
