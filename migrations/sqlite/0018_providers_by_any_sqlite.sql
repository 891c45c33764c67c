-- Operators insert rows with their own sqlite3. In that of Debian 12, 3.40, json_valid(NULL) is 0, so the CHECKs of
-- columns that may be NULL rejected every row without them. And such a shell does not enforce foreign keys by default,
-- so a provider's limits outlived it, and came back with the next one of its name. A CHECK cannot be changed, so each
-- column is created again; the triggers that name it are the same as before.

DROP TRIGGER providers_insert;
DROP TRIGGER providers_update;
DROP TRIGGER providers_delete;

ALTER TABLE providers ADD COLUMN request_or_null TEXT CONSTRAINT request_is_an_object
    CHECK (request_or_null IS NULL OR (json_valid(request_or_null) AND json_type(request_or_null) = 'object'));
UPDATE providers SET request_or_null = request;
ALTER TABLE providers DROP COLUMN request;
ALTER TABLE providers RENAME COLUMN request_or_null TO request;

ALTER TABLE providers ADD COLUMN lookup_or_null TEXT CONSTRAINT lookup_is_an_object
    CHECK (lookup_or_null IS NULL OR (json_valid(lookup_or_null) AND json_type(lookup_or_null) = 'object'));
UPDATE providers SET lookup_or_null = lookup;
ALTER TABLE providers DROP COLUMN lookup;
ALTER TABLE providers RENAME COLUMN lookup_or_null TO lookup;

ALTER TABLE providers ADD COLUMN statuses_or_null TEXT CONSTRAINT statuses_is_an_object
    CHECK (statuses_or_null IS NULL OR (json_valid(statuses_or_null) AND json_type(statuses_or_null) = 'object'));
UPDATE providers SET statuses_or_null = statuses;
ALTER TABLE providers DROP COLUMN statuses;
ALTER TABLE providers RENAME COLUMN statuses_or_null TO statuses;

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
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses)) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete_what_is_theirs AFTER DELETE ON providers
BEGIN
    DELETE FROM account_overrides WHERE provider = OLD.name;
    DELETE FROM provider_limits WHERE provider = OLD.name;
END;
