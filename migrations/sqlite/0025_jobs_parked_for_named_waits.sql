-- Only what a wait that a provider named has put down stands in it: a payment that need not wait costs it nothing.
CREATE INDEX jobs_parked_for_named_waits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND reason IN ('the provider asked for a pause', 'throttled by the provider');
