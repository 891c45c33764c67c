-- An account's share of its lane, and accounts whose jobs are refused. SQLite cannot change a CHECK, so the table is made
-- again, without its triggers: no row changes, so nothing is audited.

DROP TRIGGER providers_delete_what_is_theirs;
CREATE TABLE former_overrides AS SELECT * FROM account_overrides;
DROP TABLE account_overrides;

CREATE TABLE account_overrides (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    account TEXT NOT NULL
        CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(account) BETWEEN 1 AND 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    limit_name TEXT,
    rule TEXT CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'refuse', 'limit')),
    max_requests INTEGER
        CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER
        CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    burst INTEGER
        CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000)
        CONSTRAINT override_burst_is_given_back_within_31_days
            CHECK (max_requests = 0 OR burst * window_ms <= 2678400000 * max_requests),
    -- The account's share among the accounts of its lane.
    weight INTEGER NOT NULL DEFAULT 1 CONSTRAINT override_weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    CONSTRAINT rule_limit_alone_has_max_requests
        CHECK ((coalesce(rule, '') = 'limit') = (max_requests IS NOT NULL)),
    CONSTRAINT window_ms_goes_with_rule_limit CHECK (window_ms IS NULL OR coalesce(rule, '') = 'limit'),
    CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR coalesce(rule, '') = 'limit'),
    CONSTRAINT rule_refuse_has_no_limit_name CHECK (limit_name IS NULL OR coalesce(rule, '') <> 'refuse'),
    CONSTRAINT weight_above_1_has_no_limit_name CHECK (limit_name IS NULL OR weight = 1),
    CONSTRAINT without_rule_weight_is_above_1 CHECK (rule IS NOT NULL OR weight > 1),
    -- No cascade: deleting a limit must not silently end a block that names it.
    CONSTRAINT limit_name_is_a_limit_of_this_provider
        FOREIGN KEY (provider, limit_name) REFERENCES provider_limits (provider, name)
) STRICT;
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

INSERT INTO account_overrides (
    id, provider, account, limit_name, rule, max_requests, window_ms, burst)
SELECT
    id, provider, account, limit_name, rule, max_requests, window_ms, burst
FROM former_overrides;
DROP TABLE former_overrides;

CREATE TRIGGER account_overrides_insert AFTER INSERT ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms,
            'burst', NEW.burst, 'weight', NEW.weight) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight
    ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms,
            'burst', OLD.burst, 'weight', OLD.weight) AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms,
            'burst', NEW.burst, 'weight', NEW.weight) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_delete AFTER DELETE ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        OLD.provider || '/' || OLD.account || '/' || coalesce(OLD.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms,
            'burst', OLD.burst, 'weight', OLD.weight) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete_what_is_theirs AFTER DELETE ON providers
BEGIN
    DELETE FROM account_overrides WHERE provider = OLD.name;
    DELETE FROM provider_limits WHERE provider = OLD.name;
END;
