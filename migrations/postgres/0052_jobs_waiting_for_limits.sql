-- no-transaction
-- Only jobs that a limit has delayed are in it: a payment that does not wait costs it nothing.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_waiting_for_limits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND wait_reason IN ('limit', 'cost_exceeds_limit');
