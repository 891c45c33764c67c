-- Limits of requests in flight. They have no window, and nor has an account's own number of such a limit. SQLite cannot
-- change a CHECK, so both tables are made again, without their triggers: no row changes, so nothing is audited.

DROP TRIGGER providers_delete_what_is_theirs;
CREATE TABLE former_limits AS SELECT * FROM provider_limits;
CREATE TABLE former_overrides AS SELECT * FROM account_overrides;
DROP TABLE account_overrides;
DROP TABLE provider_limits;

CREATE TABLE provider_limits (
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    name TEXT NOT NULL
        CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (name GLOB '[a-z0-9]*' AND name NOT GLOB '*[^a-z0-9_-]*' AND length(name) <= 63),
    algorithm TEXT NOT NULL DEFAULT 'sliding_log'
        CONSTRAINT algorithm_is_known
            CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra', 'concurrency')),
    max_requests INTEGER NOT NULL
        CONSTRAINT max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER
        CONSTRAINT window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    offset_ms INTEGER NOT NULL DEFAULT 0
        CONSTRAINT offset_ms_is_0_to_31_days CHECK (offset_ms BETWEEN 0 AND 2678400000),
    burst INTEGER CONSTRAINT burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    scope TEXT NOT NULL DEFAULT 'provider'
        CONSTRAINT scope_is_known CHECK (scope IN ('provider', 'account', 'reference')),
    applies_to TEXT NOT NULL DEFAULT 'all'
        CONSTRAINT applies_to_is_known CHECK (applies_to IN ('all', 'charge', 'lookup')),
    shadow INTEGER NOT NULL DEFAULT 0 CONSTRAINT shadow_is_0_or_1 CHECK (shadow IN (0, 1)),
    enabled INTEGER NOT NULL DEFAULT 1 CONSTRAINT enabled_is_0_or_1 CHECK (enabled IN (0, 1)),
    PRIMARY KEY (provider, name),
    CONSTRAINT concurrency_alone_has_no_window_ms CHECK ((algorithm = 'concurrency') = (window_ms IS NULL)),
    CONSTRAINT burst_goes_with_token_bucket_or_gcra
        CHECK (burst IS NULL OR algorithm IN ('token_bucket', 'gcra')),
    -- No usage is stored longer; GCRA allows one request beyond its burst.
    CONSTRAINT burst_is_given_back_within_31_days
        CHECK (max_requests = 0 OR (burst + CASE algorithm WHEN 'gcra' THEN 1 ELSE 0 END) * window_ms
               <= 2678400000 * max_requests),
    CONSTRAINT offset_ms_goes_with_fixed_window_and_is_below_window_ms
        CHECK (offset_ms = 0 OR (algorithm = 'fixed_window' AND offset_ms < window_ms)),
    CONSTRAINT sliding_window_has_window_ms_of_1000_or_more
        CHECK (algorithm <> 'sliding_window' OR window_ms >= 1000),
    CONSTRAINT sliding_log_by_account_or_reference_is_at_most_10000
        CHECK (algorithm <> 'sliding_log' OR scope = 'provider' OR max_requests <= 10000)
) STRICT;

CREATE TABLE account_overrides (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    account TEXT NOT NULL
        CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(account) BETWEEN 1 AND 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    limit_name TEXT,
    rule TEXT NOT NULL CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'limit')),
    max_requests INTEGER
        CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER
        CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    burst INTEGER
        CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000)
        CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR rule = 'limit')
        CONSTRAINT override_burst_is_given_back_within_31_days
            CHECK (max_requests = 0 OR burst * window_ms <= 2678400000 * max_requests),
    CONSTRAINT rule_limit_alone_has_max_requests CHECK ((rule = 'limit') = (max_requests IS NOT NULL)),
    CONSTRAINT window_ms_goes_with_rule_limit CHECK (window_ms IS NULL OR rule = 'limit'),
    -- No cascade: deleting a limit must not silently end a block that names it.
    CONSTRAINT limit_name_is_a_limit_of_this_provider
        FOREIGN KEY (provider, limit_name) REFERENCES provider_limits (provider, name)
) STRICT;
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

INSERT INTO provider_limits (
    provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow, enabled)
SELECT
    provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow, enabled
FROM former_limits;
DROP TABLE former_limits;

INSERT INTO account_overrides (
    id, provider, account, limit_name, rule, max_requests, window_ms, burst)
SELECT
    id, provider, account, limit_name, rule, max_requests, window_ms, burst
FROM former_overrides;
DROP TABLE former_overrides;

CREATE TRIGGER provider_limits_insert AFTER INSERT ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'provider', NEW.provider, 'name', NEW.name, 'algorithm', NEW.algorithm,
            'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms, 'offset_ms', NEW.offset_ms,
            'burst', NEW.burst, 'scope', NEW.scope, 'applies_to', NEW.applies_to, 'shadow', NEW.shadow,
            'enabled', NEW.enabled) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_update AFTER UPDATE OF
        provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow,
        enabled
    ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
        old_row, new_row
    FROM (SELECT json_object(
            'provider', OLD.provider, 'name', OLD.name, 'algorithm', OLD.algorithm,
            'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms, 'offset_ms', OLD.offset_ms,
            'burst', OLD.burst, 'scope', OLD.scope, 'applies_to', OLD.applies_to, 'shadow', OLD.shadow,
            'enabled', OLD.enabled) AS old_row,
        json_object(
            'provider', NEW.provider, 'name', NEW.name, 'algorithm', NEW.algorithm,
            'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms, 'offset_ms', NEW.offset_ms,
            'burst', NEW.burst, 'scope', NEW.scope, 'applies_to', NEW.applies_to, 'shadow', NEW.shadow,
            'enabled', NEW.enabled) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_delete AFTER DELETE ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', OLD.provider || '/' || OLD.name,
        old_row, new_row
    FROM (SELECT json_object(
            'provider', OLD.provider, 'name', OLD.name, 'algorithm', OLD.algorithm,
            'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms, 'offset_ms', OLD.offset_ms,
            'burst', OLD.burst, 'scope', OLD.scope, 'applies_to', OLD.applies_to, 'shadow', OLD.shadow,
            'enabled', OLD.enabled) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

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
            'burst', NEW.burst) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms, burst
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
            'burst', OLD.burst) AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms,
            'burst', NEW.burst) AS new_row)
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
            'burst', OLD.burst) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete_what_is_theirs AFTER DELETE ON providers
BEGIN
    DELETE FROM account_overrides WHERE provider = OLD.name;
    DELETE FROM provider_limits WHERE provider = OLD.name;
END;
