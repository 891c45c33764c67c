-- Totals of finished jobs, so that a reconciliation need not count them all. Payments write nothing here. The worker
-- that reconciles each minute adds the jobs that finished since, and sometimes counts all again.

CREATE TABLE finished_jobs (
    provider text NOT NULL,
    state text NOT NULL
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
    recount_after timestamptz NOT NULL
);

-- Without a job, the totals start at the epoch, so that a job imported by SQL is counted.
INSERT INTO finished_mark (counted_from, counted_before, counted_at, recount_after)
SELECT before, before, now(), now()
FROM (SELECT CASE WHEN EXISTS (SELECT 1 FROM jobs) THEN now() - interval '2 minutes' ELSE timestamptz 'epoch' END AS before)
    AS mark;
-- All jobs by an index alone, minus the recent ones: the index does not show a job's age.
INSERT INTO finished_jobs (provider, state, jobs)
SELECT provider, state, sum(jobs)
FROM (SELECT provider, state, count(*) AS jobs FROM jobs
      WHERE state IN ('succeeded', 'declined', 'expired', 'cancelled') GROUP BY provider, state
      UNION ALL
      SELECT provider, state, -count(*) FROM jobs
      WHERE scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'
          AND updated_at >= (SELECT counted_before FROM finished_mark)
      GROUP BY provider, state) AS counted
GROUP BY provider, state;
