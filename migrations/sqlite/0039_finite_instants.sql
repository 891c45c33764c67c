-- The program can read every instant: RFC 3339 in milliseconds (`EpochMs` of src/domain/time.rs). One row beyond that
-- made every query that met it fail. Triggers, because SQLite cannot add a CHECK to an existing column.

-- Future instants become the latest that can be written; past ones are no later than now. Audits never change: such a
-- row is reported and left out. A payment's own times change here alone, so the trigger that forbids it is created
-- again below.
DROP TRIGGER content_never_changes;
UPDATE jobs SET
    not_before = min(max(not_before, -62135596800000), 253402207199999),
    expires_at = min(max(expires_at, -62135596800000), 253402207199999),
    wake_at = min(max(wake_at, -62135596800000), 253402207199999),
    wait_until = min(max(wait_until, -62135596800000), 253402207199999),
    lease_until = min(max(lease_until, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    created_at = min(max(created_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    updated_at = min(max(updated_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    sweep_after = min(max(sweep_after, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    scrubbed_at = min(max(scrubbed_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    revived_at = min(max(revived_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    wait_since = min(max(wait_since, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    wait_begun_at = min(max(wait_begun_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    delayed_until = min(max(delayed_until, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    first_sent_at = CASE WHEN first_sent_at > 253402207199999 THEN -62135596800000 ELSE max(first_sent_at, -62135596800000) END
WHERE not_before NOT BETWEEN -62135596800000 AND 253402207199999
    OR expires_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR wake_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR wait_until NOT BETWEEN -62135596800000 AND 253402207199999
    OR lease_until NOT BETWEEN -62135596800000 AND 253402207199999
    OR first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR created_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR updated_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR sweep_after NOT BETWEEN -62135596800000 AND 253402207199999
    OR scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR revived_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR wait_since NOT BETWEEN -62135596800000 AND 253402207199999
    OR wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR delayed_until NOT BETWEEN -62135596800000 AND 253402207199999;
-- The personal data of a payment may be emptied once it has ended.
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    WHEN NEW.id <> OLD.id OR NEW.provider <> OLD.provider OR NEW.idempotency_key <> OLD.idempotency_key
        OR NEW.key_given <> OLD.key_given OR NEW.content_hash <> OLD.content_hash OR NEW.amount <> OLD.amount
        OR NEW.currency <> OLD.currency OR NEW.cost <> OLD.cost OR NEW.priority <> OLD.priority
        OR NEW.not_before IS NOT OLD.not_before OR NEW.expires_at IS NOT OLD.expires_at
        OR (NEW.account IS NOT OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS NOT OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS NOT OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;

UPDATE attempts SET began_at = min(max(began_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    ended_at = min(max(ended_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE began_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR ended_at NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE outcome_events SET at = min(max(at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    taken_until = min(max(taken_until, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    published_at = min(max(published_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    next_try_at = min(max(next_try_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE at NOT BETWEEN -62135596800000 AND 253402207199999
    OR taken_until NOT BETWEEN -62135596800000 AND 253402207199999
    OR published_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR next_try_at NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE rejected_messages SET at = min(max(at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE at NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE upkeep_turns SET taken_until = min(max(taken_until, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE taken_until NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE finished_mark SET counted_from = min(max(counted_from, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    counted_before = min(max(counted_before, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    counted_at = min(max(counted_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    recount_after = min(max(recount_after, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE counted_from NOT BETWEEN -62135596800000 AND 253402207199999
    OR counted_before NOT BETWEEN -62135596800000 AND 253402207199999
    OR counted_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR recount_after NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE providers SET updated_at = min(max(updated_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    resumed_at = min(max(resumed_at, -62135596800000), CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER))
WHERE updated_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR resumed_at NOT BETWEEN -62135596800000 AND 253402207199999;
UPDATE limiter_authority SET since = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
    clock_ahead_least_us = NULL, clock_ahead_most_us = NULL, clock_since_us = NULL, clock_said_at = NULL
WHERE since NOT BETWEEN -62135596800000 AND 253402207199999
    OR clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999;
DELETE FROM worker_reports
WHERE started_at NOT BETWEEN -62135596800000 AND 253402207199999
    OR reported_at NOT BETWEEN -62135596800000 AND 253402207199999;

CREATE TRIGGER instants_are_finite_of_jobs_on_insert
    BEFORE INSERT ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.lease_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.sweep_after NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.delayed_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_jobs
    BEFORE UPDATE OF not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
    scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.lease_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.sweep_after NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.delayed_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_attempts_on_insert
    BEFORE INSERT ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_attempts
    BEFORE UPDATE OF began_at, ended_at ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_outcome_events_on_insert
    BEFORE INSERT ON outcome_events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.published_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_outcome_events
    BEFORE UPDATE OF at, taken_until, published_at, next_try_at ON outcome_events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.published_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_providers_on_insert
    BEFORE INSERT ON providers
    WHEN NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.resumed_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_providers
    BEFORE UPDATE OF updated_at, resumed_at ON providers
    WHEN NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.resumed_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_settings_audit_on_insert
    BEFORE INSERT ON settings_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_settings_audit
    BEFORE UPDATE OF at ON settings_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_rejected_messages_on_insert
    BEFORE INSERT ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_rejected_messages
    BEFORE UPDATE OF at ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_limiter_authority_on_insert
    BEFORE INSERT ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_limiter_authority
    BEFORE UPDATE OF since, clock_said_at ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
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
CREATE TRIGGER instants_are_finite_of_job_audit_on_insert
    BEFORE INSERT ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_job_audit
    BEFORE UPDATE OF at ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
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
