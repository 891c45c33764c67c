-- As 0042.
ALTER TABLE providers ADD CONSTRAINT instants_are_finite CHECK (
    least(updated_at, resumed_at) >= '0001-01-01 00:00:00+00'
    AND greatest(updated_at, resumed_at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE settings_audit ADD CONSTRAINT instants_are_finite CHECK (
    least(at) >= '0001-01-01 00:00:00+00'
    AND greatest(at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE rejected_messages ADD CONSTRAINT instants_are_finite CHECK (
    least(at) >= '0001-01-01 00:00:00+00'
    AND greatest(at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE limiter_authority ADD CONSTRAINT instants_are_finite CHECK (
    least(since, clock_said_at) >= '0001-01-01 00:00:00+00'
    AND greatest(since, clock_said_at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE upkeep_turns ADD CONSTRAINT instants_are_finite CHECK (
    least(taken_until) >= '0001-01-01 00:00:00+00'
    AND greatest(taken_until) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE job_audit ADD CONSTRAINT instants_are_finite CHECK (
    least(at) >= '0001-01-01 00:00:00+00'
    AND greatest(at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE worker_reports ADD CONSTRAINT instants_are_finite CHECK (
    least(started_at, reported_at) >= '0001-01-01 00:00:00+00'
    AND greatest(started_at, reported_at) < '9999-12-30 22:00:00+00') NOT VALID;
ALTER TABLE finished_mark ADD CONSTRAINT instants_are_finite CHECK (
    least(counted_from, counted_before, counted_at, recount_after) >= '0001-01-01 00:00:00+00'
    AND greatest(counted_from, counted_before, counted_at, recount_after) < '9999-12-30 22:00:00+00') NOT VALID;
