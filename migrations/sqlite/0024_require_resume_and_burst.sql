-- A message without the fields of `require` is no job. `resumed_at`: when an operator ended the waits that the provider
-- had named. An account's own limit may have a burst of its own. The triggers list the columns that they record.

ALTER TABLE providers ADD COLUMN require TEXT NOT NULL DEFAULT '[]'
    CONSTRAINT require_is_a_list_of_account_and_reference
        CHECK (json_valid(require) AND json_type(require) = 'array'
            AND replace(replace(replace(replace(replace(json(require), '"account"', ''), '"reference"', ''), ',', ''),
                '[', ''), ']', '') = '');
ALTER TABLE providers ADD COLUMN resumed_at INTEGER;

ALTER TABLE account_overrides ADD COLUMN burst INTEGER
    CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000)
    CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR rule = 'limit')
    CONSTRAINT override_burst_is_given_back_within_31_days
        CHECK (max_requests = 0 OR burst * window_ms <= 2678400000 * max_requests);

DROP TRIGGER providers_insert;
DROP TRIGGER providers_update;
DROP TRIGGER providers_delete;

CREATE TRIGGER providers_insert AFTER INSERT ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.name;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', NEW.name,
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
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses),
            'require', json(NEW.require), 'resumed_at', NEW.resumed_at) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_update AFTER UPDATE OF
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing,
        reserve_percent, store_down, share_of, timeout_ms, send_budget_ms, workers, bucket_capacity,
        leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, headers, request, lookup, statuses, require, resumed_at
    ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.name, NEW.name);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', NEW.name,
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
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses),
            'require', json(OLD.require), 'resumed_at', OLD.resumed_at) AS old_row,
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
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses),
            'require', json(NEW.require), 'resumed_at', NEW.resumed_at) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete AFTER DELETE ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', OLD.name,
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
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses),
            'require', json(OLD.require), 'resumed_at', OLD.resumed_at) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

DROP TRIGGER account_overrides_insert;
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

DROP TRIGGER account_overrides_update;
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

DROP TRIGGER account_overrides_delete;
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
