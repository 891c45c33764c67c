-- Repairs instants from before 0043 that the program cannot read, of all tables but `jobs` (0048). Past instants become
-- no later than now. Tables are read and not locked. Audits never change, and only triggers set their time.
DO $$
DECLARE
    earliest CONSTANT timestamptz := '0001-01-01 00:00:00+00';
    latest CONSTANT timestamptz := timestamptz '9999-12-30 22:00:00+00' - interval '1 millisecond';
    now CONSTANT timestamptz := statement_timestamp();
BEGIN
    UPDATE attempts SET began_at = least(greatest(began_at, earliest), now),
        ended_at = CASE WHEN ended_at IS NOT NULL THEN least(greatest(ended_at, earliest), now) END
        WHERE NOT (least(began_at, ended_at) >= earliest AND greatest(began_at, ended_at) <= latest);
    UPDATE outcome_events SET at = least(greatest(at, earliest), now), taken_until = NULL,
        published_at = CASE WHEN published_at IS NOT NULL THEN least(greatest(published_at, earliest), now) END,
        next_try_at = CASE WHEN next_try_at IS NOT NULL THEN now END
        WHERE NOT (least(at, taken_until, published_at, next_try_at) >= earliest
                   AND greatest(at, taken_until, published_at, next_try_at) <= latest);
    UPDATE rejected_messages SET at = least(greatest(at, earliest), now) WHERE NOT (at >= earliest AND at <= latest);
    -- The leader counts as new, and the clock attestation is cleared.
    UPDATE limiter_authority SET since = now, clock_ahead_least_us = NULL, clock_ahead_most_us = NULL,
        clock_since_us = NULL, clock_said_at = NULL
        WHERE NOT (least(since, clock_said_at) >= earliest AND greatest(since, clock_said_at) <= latest);
    UPDATE upkeep_turns SET taken_until = now WHERE NOT (taken_until >= earliest AND taken_until <= latest);
    DELETE FROM worker_reports
        WHERE NOT (least(started_at, reported_at) >= earliest AND greatest(started_at, reported_at) <= latest);
    -- All jobs are counted again at the next update.
    UPDATE finished_mark SET counted_from = now - interval '2 minutes', counted_before = now - interval '2 minutes',
        counted_at = now, recount_after = now
        WHERE NOT (least(counted_from, counted_before, counted_at, recount_after) >= earliest
                   AND greatest(counted_from, counted_before, counted_at, recount_after) <= latest);
    -- A trigger sets `updated_at`.
    UPDATE providers SET resumed_at = CASE WHEN resumed_at IS NOT NULL THEN now END
        WHERE NOT (least(updated_at, resumed_at) >= earliest AND greatest(updated_at, resumed_at) <= latest);
END $$;
