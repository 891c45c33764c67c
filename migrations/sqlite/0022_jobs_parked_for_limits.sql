-- Only what a limit has put down stands in it: a payment that need not wait costs it nothing.
CREATE INDEX jobs_parked_for_limits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND substr(reason, 1, 16) = 'waits for limit ';
