-- The program can read every instant: RFC 3339 in milliseconds (`EpochMs` of src/domain/time.rs). `infinity`, or a year
-- of five digits, made every query that met the row fail. One file for each table that payments write, because each is
-- locked for a moment. Older rows are repaired afterwards without a lock (0046), so nothing needs validation.
ALTER TABLE jobs ADD CONSTRAINT instants_are_finite CHECK (
    least(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
                   scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) >= '0001-01-01 00:00:00+00'
    AND greatest(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
                   scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) < '9999-12-30 22:00:00+00') NOT VALID;
