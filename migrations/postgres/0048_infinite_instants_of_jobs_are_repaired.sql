-- Instants of jobs from before 0042 that the program cannot read. What lies ahead stays as late as can be written: nothing is
-- sent that was delayed for ever. What has happened was no later than now, and a first request was sent so long ago that no
-- provider remembers its key. A file of its own: the table is read first, and locked for as long as these few rows take.
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
END $$;
