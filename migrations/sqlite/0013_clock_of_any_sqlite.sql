-- Operators change rows with their own sqlite3. That of Debian 12 is 3.40, which does not know unixepoch('subsec') and
-- returns NULL for it. The triggers use julianday instead, and set `at` themselves, because the default of a column
-- cannot be changed.

DROP TRIGGER providers_insert;
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

DROP TRIGGER providers_update;
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

DROP TRIGGER providers_delete;
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

DROP TRIGGER provider_limits_insert;
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

DROP TRIGGER provider_limits_update;
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

DROP TRIGGER provider_limits_delete;
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
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms) AS new_row)
    WHERE old_row IS NOT new_row;
END;

DROP TRIGGER account_overrides_update;
CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms
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
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms) AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms) AS new_row)
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
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

DROP TRIGGER jobs_record_decision;
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (NEW.state <> OLD.state OR (OLD.maybe_charged AND NOT NEW.maybe_charged))
        AND NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
        AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.maybe_charged >= OLD.maybe_charged
                 AND NEW.state <> 'cancelled')
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged);
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
    SELECT NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts,
        CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown');
END;

DROP TRIGGER jobs_record_deletion;
CREATE TRIGGER jobs_record_deletion AFTER DELETE ON jobs
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, 0);
END;
