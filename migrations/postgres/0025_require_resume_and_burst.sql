-- A message without the fields of `require` is no job. `resumed_at`: when an operator ended the waits that the provider
-- had named. An account's own limit may have a burst of its own.

ALTER TABLE providers ADD COLUMN require jsonb NOT NULL DEFAULT '[]'
    CONSTRAINT require_is_a_list_of_account_and_reference
        CHECK (jsonb_typeof(require) = 'array' AND require <@ '["account", "reference"]');
ALTER TABLE providers ADD COLUMN resumed_at timestamptz;

ALTER TABLE account_overrides ADD COLUMN burst bigint
    CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000)
    CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR rule = 'limit')
    CONSTRAINT override_burst_is_given_back_within_31_days
        CHECK (max_requests = 0 OR burst * window_ms <= 2678400000 * max_requests);
