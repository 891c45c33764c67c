-- Instants from before 0042 that the program cannot read. What lies ahead stays as late as can be written: nothing is sent
-- that somebody has put off for ever. What has happened was no later than now, and a first request was sent so long ago that
-- no provider remembers its key. Tables are read and not locked. Audits never change, and triggers alone give them their time.
DO $$
DECLARE
    earliest CONSTANT timestamptz := '0001-01-01 00:00:00+00';
    latest CONSTANT timestamptz := timestamptz '9999-12-30 22:00:00+00' - interval '1 millisecond';
    now CONSTANT timestamptz := statement_timestamp();
    unreadable CONSTANT text[] := ARRAY(SELECT id FROM jobs WHERE NOT (
        least(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
              scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) >= earliest
        AND greatest(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
                 scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) <= latest));
BEGIN
    IF cardinality(unreadable) > 0 THEN
        -- Which locks the table, for as long as these few rows take.
        ALTER TABLE jobs DISABLE TRIGGER content_never_changes;
        UPDATE jobs SET
            not_before = CASE WHEN not_before IS NOT NULL THEN least(greatest(not_before, earliest), latest) END,
            expires_at = CASE WHEN expires_at IS NOT NULL THEN least(greatest(expires_at, earliest), latest) END,
            wake_at = least(greatest(wake_at, earliest), latest),
            lease_until = CASE WHEN lease_until <= latest THEN greatest(lease_until, earliest)
                WHEN lease_until IS NOT NULL THEN now END,
            first_sent_at = CASE WHEN first_sent_at <= latest THEN greatest(first_sent_at, earliest)
                WHEN first_sent_at IS NOT NULL THEN earliest END,
            created_at = least(greatest(created_at, earliest), now),
            updated_at = least(greatest(updated_at, earliest), now),
            sweep_after = NULL,
            scrubbed_at = CASE WHEN scrubbed_at IS NOT NULL THEN least(greatest(scrubbed_at, earliest), now) END,
            revived_at = CASE WHEN revived_at IS NOT NULL THEN least(greatest(revived_at, earliest), now) END,
            wait_since = CASE WHEN wait_since IS NOT NULL THEN least(greatest(wait_since, earliest), now) END,
            wait_until = CASE WHEN wait_until IS NOT NULL THEN least(greatest(wait_until, earliest), latest) END,
            wait_begun_at = CASE WHEN wait_begun_at IS NOT NULL THEN least(greatest(wait_begun_at, earliest), now) END,
            delayed_until = CASE WHEN delayed_until IS NOT NULL THEN least(greatest(delayed_until, earliest), now) END
        WHERE id = ANY (unreadable);
        ALTER TABLE jobs ENABLE TRIGGER content_never_changes;
    END IF;
    UPDATE attempts SET began_at = least(greatest(began_at, earliest), now),
        ended_at = CASE WHEN ended_at IS NOT NULL THEN least(greatest(ended_at, earliest), now) END
        WHERE NOT (least(began_at, ended_at) >= earliest AND greatest(began_at, ended_at) <= latest);
    UPDATE outcome_events SET at = least(greatest(at, earliest), now), taken_until = NULL,
        published_at = CASE WHEN published_at IS NOT NULL THEN least(greatest(published_at, earliest), now) END,
        next_try_at = CASE WHEN next_try_at IS NOT NULL THEN now END
        WHERE NOT (least(at, taken_until, published_at, next_try_at) >= earliest
                   AND greatest(at, taken_until, published_at, next_try_at) <= latest);
    UPDATE rejected_messages SET at = least(greatest(at, earliest), now) WHERE NOT (at >= earliest AND at <= latest);
    -- Whoever grants has just begun to, and what was said of the store's clock is forgotten.
    UPDATE limiter_authority SET since = now, clock_ahead_least_us = NULL, clock_ahead_most_us = NULL,
        clock_since_us = NULL, clock_said_at = NULL
        WHERE NOT (least(since, clock_said_at) >= earliest AND greatest(since, clock_said_at) <= latest);
    UPDATE upkeep_turns SET taken_until = now WHERE NOT (taken_until >= earliest AND taken_until <= latest);
    DELETE FROM worker_reports
        WHERE NOT (least(started_at, reported_at) >= earliest AND greatest(started_at, reported_at) <= latest);
    -- Counted anew at the next look.
    UPDATE settled_mark SET counted_from = now - interval '2 minutes', counted_before = now - interval '2 minutes',
        counted_at = now, recount_after = now
        WHERE NOT (least(counted_from, counted_before, counted_at, recount_after) >= earliest
                   AND greatest(counted_from, counted_before, counted_at, recount_after) <= latest);
    -- A trigger says when the row was changed.
    UPDATE providers SET resumed_at = CASE WHEN resumed_at IS NOT NULL THEN now END
        WHERE NOT (least(updated_at, resumed_at) >= earliest AND greatest(updated_at, resumed_at) <= latest);
END $$;
