-- Providers, their limits and account rules, as operators set them. Column meanings and defaults: docs, "Database".
-- Constraint names are sentences, because operators read them in error messages.

-- Times are milliseconds since the Unix epoch, booleans 0 and 1.

CREATE TABLE settings_version (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_version_has_one_row CHECK (only_row = 1),
    version  INTEGER NOT NULL
) STRICT;
INSERT INTO settings_version (version) VALUES (1);

CREATE TABLE providers (
    name TEXT NOT NULL PRIMARY KEY
        CONSTRAINT name_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (name GLOB '[a-z0-9]*' AND name NOT GLOB '*[^a-z0-9_-]*' AND length(name) <= 63)
        CONSTRAINT name_is_not_one_of_our_queues CHECK (name NOT IN ('invalid', 'dead', 'outcomes')),
    kind TEXT NOT NULL DEFAULT 'http' CONSTRAINT kind_is_http CHECK (kind = 'http'),
    quota TEXT
        CONSTRAINT quota_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (quota GLOB '[a-z0-9]*' AND quota NOT GLOB '*[^a-z0-9_-]*' AND length(quota) <= 63),
    enabled INTEGER NOT NULL DEFAULT 1 CONSTRAINT enabled_is_0_or_1 CHECK (enabled IN (0, 1)),
    paused INTEGER NOT NULL DEFAULT 0 CONSTRAINT paused_is_0_or_1 CHECK (paused IN (0, 1)),
    url TEXT NOT NULL
        CONSTRAINT url_is_http_or_https_without_spaces
            CHECK ((url GLOB 'http://?*' OR url GLOB 'https://?*') AND length(url) <= 2048
                   AND url NOT GLOB '*[' || char(1) || '-' || char(32) || char(127) || ']*'),
    mode TEXT NOT NULL DEFAULT 'blocking'
        CONSTRAINT mode_is_blocking_or_requeue CHECK (mode IN ('blocking', 'requeue')),
    slot_release TEXT NOT NULL DEFAULT 'response'
        CONSTRAINT slot_release_is_response_or_grant CHECK (slot_release IN ('response', 'grant')),
    transit_jitter_ms INTEGER NOT NULL DEFAULT 50
        CONSTRAINT transit_jitter_ms_is_10_to_60000 CHECK (transit_jitter_ms BETWEEN 10 AND 60000),
    pacing TEXT NOT NULL DEFAULT 'burst' CONSTRAINT pacing_is_burst_or_even CHECK (pacing IN ('burst', 'even')),
    reserve_percent INTEGER NOT NULL DEFAULT 0
        CONSTRAINT reserve_percent_is_0_to_99 CHECK (reserve_percent BETWEEN 0 AND 99),
    store_down TEXT NOT NULL DEFAULT 'wait'
        CONSTRAINT store_down_is_wait_or_share CHECK (store_down IN ('wait', 'share')),
    share_of INTEGER CONSTRAINT share_of_is_1_to_10000 CHECK (share_of BETWEEN 1 AND 10000),
    timeout_ms INTEGER NOT NULL DEFAULT 10000
        CONSTRAINT timeout_ms_is_1_to_600000 CHECK (timeout_ms BETWEEN 1 AND 600000),
    send_budget_ms INTEGER NOT NULL DEFAULT 500
        CONSTRAINT send_budget_ms_is_1_to_60000 CHECK (send_budget_ms BETWEEN 1 AND 60000),
    workers INTEGER NOT NULL DEFAULT 32 CONSTRAINT workers_is_1_to_10000 CHECK (workers BETWEEN 1 AND 10000),
    bucket_capacity INTEGER NOT NULL DEFAULT 256
        CONSTRAINT bucket_capacity_is_1_to_65535 CHECK (bucket_capacity BETWEEN 1 AND 65535),
    leak_per_second REAL
        CONSTRAINT leak_per_second_is_above_0 CHECK (leak_per_second > 0 AND leak_per_second <= 1000000),
    max_wait_ms INTEGER NOT NULL DEFAULT 5000
        CONSTRAINT max_wait_ms_is_0_to_60000 CHECK (max_wait_ms BETWEEN 0 AND 60000),
    max_attempts INTEGER NOT NULL DEFAULT 8
        CONSTRAINT max_attempts_is_1_to_1000 CHECK (max_attempts BETWEEN 1 AND 1000),
    max_age_s INTEGER NOT NULL DEFAULT 259200
        CONSTRAINT max_age_s_is_1_to_315360000 CHECK (max_age_s BETWEEN 1 AND 315360000),
    backoff_base_ms INTEGER NOT NULL DEFAULT 500
        CONSTRAINT backoff_base_ms_is_at_least_1 CHECK (backoff_base_ms >= 1),
    backoff_max_ms INTEGER NOT NULL DEFAULT 60000
        CONSTRAINT backoff_max_ms_is_at_most_86400000 CHECK (backoff_max_ms BETWEEN 1 AND 86400000),
    idempotency_retention_s INTEGER
        CONSTRAINT idempotency_retention_s_is_1_to_315360000_or_null
            CHECK (idempotency_retention_s BETWEEN 1 AND 315360000),
    headers TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT headers_is_an_object
            CHECK (json_valid(headers) AND json_type(headers) = 'object'),
    request TEXT CONSTRAINT request_is_an_object CHECK (json_valid(request) AND json_type(request) = 'object'),
    lookup TEXT CONSTRAINT lookup_is_an_object CHECK (json_valid(lookup) AND json_type(lookup) = 'object'),
    statuses TEXT CONSTRAINT statuses_is_an_object CHECK (json_valid(statuses) AND json_type(statuses) = 'object'),
    version INTEGER NOT NULL DEFAULT 0,
    updated_at INTEGER NOT NULL DEFAULT 0,
    CONSTRAINT store_down_share_needs_share_of CHECK (store_down <> 'share' OR share_of IS NOT NULL),
    CONSTRAINT backoff_base_ms_is_at_most_backoff_max_ms CHECK (backoff_base_ms <= backoff_max_ms)
) STRICT;

CREATE TABLE provider_limits (
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    name TEXT NOT NULL
        CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (name GLOB '[a-z0-9]*' AND name NOT GLOB '*[^a-z0-9_-]*' AND length(name) <= 63),
    algorithm TEXT NOT NULL DEFAULT 'sliding_log'
        CONSTRAINT algorithm_is_known
            CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra')),
    max_requests INTEGER NOT NULL
        CONSTRAINT max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER NOT NULL
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
    CONSTRAINT rule_limit_alone_has_max_requests_and_window_ms
        CHECK ((rule = 'limit') = (max_requests IS NOT NULL) AND (rule = 'limit') = (window_ms IS NOT NULL)),
    -- No cascade: deleting a limit must not silently end a block that names it.
    CONSTRAINT limit_name_is_a_limit_of_this_provider
        FOREIGN KEY (provider, limit_name) REFERENCES provider_limits (provider, name)
) STRICT;
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

CREATE TABLE settings_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    who TEXT NOT NULL,
    program TEXT,
    table_name TEXT NOT NULL,
    row_key TEXT NOT NULL,
    old_row TEXT,
    new_row TEXT
) STRICT;

-- A database file has no users, so `who` is 'database file'; the columns are PostgreSQL's.
-- Nested updates set only `version` and `updated_at`, which the column lists below leave out: no trigger fires twice.

CREATE TRIGGER providers_insert AFTER INSERT ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name = NEW.name;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'providers', NEW.name,
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'name', NEW.name, 'kind', NEW.kind, 'quota', NEW.quota, 'enabled', NEW.enabled,
            'paused', NEW.paused, 'url', NEW.url, 'mode', NEW.mode, 'slot_release', NEW.slot_release,
            'transit_jitter_ms', NEW.transit_jitter_ms, 'pacing', NEW.pacing,
            'reserve_percent', NEW.reserve_percent, 'store_down', NEW.store_down, 'share_of', NEW.share_of,
            'timeout_ms', NEW.timeout_ms, 'send_budget_ms', NEW.send_budget_ms, 'workers', NEW.workers,
            'bucket_capacity', NEW.bucket_capacity, 'leak_per_second', NEW.leak_per_second,
            'max_wait_ms', NEW.max_wait_ms, 'max_attempts', NEW.max_attempts, 'max_age_s', NEW.max_age_s,
            'backoff_base_ms', NEW.backoff_base_ms, 'backoff_max_ms', NEW.backoff_max_ms,
            'idempotency_retention_s', NEW.idempotency_retention_s, 'headers', json(NEW.headers),
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses)) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_update AFTER UPDATE OF
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing,
        reserve_percent, store_down, share_of, timeout_ms, send_budget_ms, workers, bucket_capacity,
        leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, headers, request, lookup, statuses
    ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name IN (OLD.name, NEW.name);
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'providers', NEW.name,
        old_row, new_row
    FROM (SELECT json_object(
            'name', OLD.name, 'kind', OLD.kind, 'quota', OLD.quota, 'enabled', OLD.enabled,
            'paused', OLD.paused, 'url', OLD.url, 'mode', OLD.mode, 'slot_release', OLD.slot_release,
            'transit_jitter_ms', OLD.transit_jitter_ms, 'pacing', OLD.pacing,
            'reserve_percent', OLD.reserve_percent, 'store_down', OLD.store_down, 'share_of', OLD.share_of,
            'timeout_ms', OLD.timeout_ms, 'send_budget_ms', OLD.send_budget_ms, 'workers', OLD.workers,
            'bucket_capacity', OLD.bucket_capacity, 'leak_per_second', OLD.leak_per_second,
            'max_wait_ms', OLD.max_wait_ms, 'max_attempts', OLD.max_attempts, 'max_age_s', OLD.max_age_s,
            'backoff_base_ms', OLD.backoff_base_ms, 'backoff_max_ms', OLD.backoff_max_ms,
            'idempotency_retention_s', OLD.idempotency_retention_s, 'headers', json(OLD.headers),
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses)) AS old_row,
        json_object(
            'name', NEW.name, 'kind', NEW.kind, 'quota', NEW.quota, 'enabled', NEW.enabled,
            'paused', NEW.paused, 'url', NEW.url, 'mode', NEW.mode, 'slot_release', NEW.slot_release,
            'transit_jitter_ms', NEW.transit_jitter_ms, 'pacing', NEW.pacing,
            'reserve_percent', NEW.reserve_percent, 'store_down', NEW.store_down, 'share_of', NEW.share_of,
            'timeout_ms', NEW.timeout_ms, 'send_budget_ms', NEW.send_budget_ms, 'workers', NEW.workers,
            'bucket_capacity', NEW.bucket_capacity, 'leak_per_second', NEW.leak_per_second,
            'max_wait_ms', NEW.max_wait_ms, 'max_attempts', NEW.max_attempts, 'max_age_s', NEW.max_age_s,
            'backoff_base_ms', NEW.backoff_base_ms, 'backoff_max_ms', NEW.backoff_max_ms,
            'idempotency_retention_s', NEW.idempotency_retention_s, 'headers', json(NEW.headers),
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses)) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete AFTER DELETE ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'providers', OLD.name,
        old_row, new_row
    FROM (SELECT json_object(
            'name', OLD.name, 'kind', OLD.kind, 'quota', OLD.quota, 'enabled', OLD.enabled,
            'paused', OLD.paused, 'url', OLD.url, 'mode', OLD.mode, 'slot_release', OLD.slot_release,
            'transit_jitter_ms', OLD.transit_jitter_ms, 'pacing', OLD.pacing,
            'reserve_percent', OLD.reserve_percent, 'store_down', OLD.store_down, 'share_of', OLD.share_of,
            'timeout_ms', OLD.timeout_ms, 'send_budget_ms', OLD.send_budget_ms, 'workers', OLD.workers,
            'bucket_capacity', OLD.bucket_capacity, 'leak_per_second', OLD.leak_per_second,
            'max_wait_ms', OLD.max_wait_ms, 'max_attempts', OLD.max_attempts, 'max_age_s', OLD.max_age_s,
            'backoff_base_ms', OLD.backoff_base_ms, 'backoff_max_ms', OLD.backoff_max_ms,
            'idempotency_retention_s', OLD.idempotency_retention_s, 'headers', json(OLD.headers),
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses)) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_insert AFTER INSERT ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
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
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
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
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'provider_limits', OLD.provider || '/' || OLD.name,
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
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms
    ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms) AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_delete AFTER DELETE ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round(unixepoch('subsec') * 1000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (who, table_name, row_key, old_row, new_row)
    SELECT 'database file', 'account_overrides',
        OLD.provider || '/' || OLD.account || '/' || coalesce(OLD.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_version_is_set_by_triggers BEFORE UPDATE OF version ON providers
WHEN NEW.version <> (SELECT version FROM settings_version)
BEGIN
    SELECT raise(ABORT, 'version is set by triggers');
END;
