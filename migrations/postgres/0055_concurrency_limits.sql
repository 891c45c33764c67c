-- Limits of requests in flight. They have no window, and nor has an account's own number of such a limit.

ALTER TABLE provider_limits
    ALTER COLUMN window_ms DROP NOT NULL,
    DROP CONSTRAINT algorithm_is_known,
    ADD CONSTRAINT algorithm_is_known
        CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra', 'concurrency')),
    ADD CONSTRAINT concurrency_alone_has_no_window_ms CHECK ((algorithm = 'concurrency') = (window_ms IS NULL));

ALTER TABLE account_overrides
    DROP CONSTRAINT rule_limit_alone_has_max_requests_and_window_ms,
    ADD CONSTRAINT rule_limit_alone_has_max_requests CHECK ((rule = 'limit') = (max_requests IS NOT NULL)),
    ADD CONSTRAINT window_ms_goes_with_rule_limit CHECK (window_ms IS NULL OR rule = 'limit');
