-- no-transaction
-- Only jobs that a provider's named wait has delayed are in it: a payment that does not wait costs it nothing.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_parked_for_named_waits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND reason IN ('the provider asked for a pause', 'throttled by the provider');
