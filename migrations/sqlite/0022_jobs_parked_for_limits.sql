-- Only jobs that a limit has delayed are in it: a payment that does not wait costs it nothing.
CREATE INDEX jobs_parked_for_limits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND substr(reason, 1, 16) = 'waits for limit ';
