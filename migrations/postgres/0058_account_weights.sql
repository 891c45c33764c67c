-- An account's share of its lane, and accounts whose jobs are refused.

ALTER TABLE account_overrides
    ALTER COLUMN rule DROP NOT NULL,
    -- The account's share among the accounts of its lane.
    ADD COLUMN weight bigint NOT NULL DEFAULT 1
        CONSTRAINT override_weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    DROP CONSTRAINT rule_is_known,
    ADD CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'refuse', 'limit')),
    DROP CONSTRAINT rule_limit_alone_has_max_requests,
    ADD CONSTRAINT rule_limit_alone_has_max_requests
        CHECK ((coalesce(rule, '') = 'limit') = (max_requests IS NOT NULL)),
    DROP CONSTRAINT window_ms_goes_with_rule_limit,
    ADD CONSTRAINT window_ms_goes_with_rule_limit CHECK (window_ms IS NULL OR coalesce(rule, '') = 'limit'),
    DROP CONSTRAINT override_burst_goes_with_rule_limit,
    ADD CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR coalesce(rule, '') = 'limit'),
    ADD CONSTRAINT rule_refuse_has_no_limit_name CHECK (limit_name IS NULL OR coalesce(rule, '') <> 'refuse'),
    ADD CONSTRAINT weight_above_1_has_no_limit_name CHECK (limit_name IS NULL OR weight = 1),
    ADD CONSTRAINT without_rule_weight_is_above_1 CHECK (rule IS NOT NULL OR weight > 1);
