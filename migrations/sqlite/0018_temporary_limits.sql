-- A limit's rate for a time: until when it applies, and the rate that comes back then. docs/configuration.md,
-- `provider_limits`.
ALTER TABLE provider_limits ADD COLUMN until_at INTEGER;
ALTER TABLE provider_limits ADD COLUMN then_max_requests INTEGER
    CONSTRAINT then_max_requests_is_0_to_1000000 CHECK (then_max_requests BETWEEN 0 AND 1000000)
    CONSTRAINT until_at_goes_with_then_max_requests CHECK ((until_at IS NULL) = (then_max_requests IS NULL));
ALTER TABLE provider_limits ADD COLUMN then_window_ms INTEGER
    CONSTRAINT then_window_ms_is_1_ms_to_31_days CHECK (then_window_ms BETWEEN 1 AND 2678400000)
    CONSTRAINT then_window_ms_goes_with_until_at CHECK (then_window_ms IS NULL OR until_at IS NOT NULL);

CREATE TRIGGER instants_are_finite_of_provider_limits_on_insert
    BEFORE INSERT ON provider_limits
    WHEN NEW.until_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_provider_limits
    BEFORE UPDATE OF until_at ON provider_limits
    WHEN NEW.until_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- The triggers of 0001 with the new columns: a change of them bumps the version and is audited.
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
            'enabled', NEW.enabled, 'until_at', NEW.until_at, 'then_max_requests', NEW.then_max_requests,
            'then_window_ms', NEW.then_window_ms) AS new_row)
    WHERE old_row IS NOT new_row;
END;

-- Any other change of a limit ends its return: the later change wins. The nested update does not fire this trigger
-- again, and the audit has the row as it is after it.
DROP TRIGGER provider_limits_update;
CREATE TRIGGER provider_limits_update AFTER UPDATE OF
        provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow,
        enabled, until_at, then_max_requests, then_window_ms
    ON provider_limits
BEGIN
    UPDATE provider_limits SET until_at = NULL, then_max_requests = NULL, then_window_ms = NULL
    WHERE provider = NEW.provider AND name = NEW.name AND OLD.until_at IS NOT NULL
        AND (NEW.until_at, NEW.then_max_requests, NEW.then_window_ms)
            IS (OLD.until_at, OLD.then_max_requests, OLD.then_window_ms)
        AND (NEW.provider, NEW.name, NEW.algorithm, NEW.max_requests, NEW.window_ms, NEW.offset_ms, NEW.burst,
             NEW.scope, NEW.applies_to, NEW.shadow, NEW.enabled)
            IS NOT (OLD.provider, OLD.name, OLD.algorithm, OLD.max_requests, OLD.window_ms, OLD.offset_ms, OLD.burst,
             OLD.scope, OLD.applies_to, OLD.shadow, OLD.enabled);
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
            'enabled', OLD.enabled, 'until_at', OLD.until_at, 'then_max_requests', OLD.then_max_requests,
            'then_window_ms', OLD.then_window_ms) AS old_row,
        json_object(
            'provider', provider, 'name', name, 'algorithm', algorithm, 'max_requests', max_requests,
            'window_ms', window_ms, 'offset_ms', offset_ms, 'burst', burst, 'scope', scope,
            'applies_to', applies_to, 'shadow', shadow, 'enabled', enabled, 'until_at', until_at,
            'then_max_requests', then_max_requests, 'then_window_ms', then_window_ms) AS new_row
        FROM provider_limits WHERE provider = NEW.provider AND name = NEW.name)
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
            'enabled', OLD.enabled, 'until_at', OLD.until_at, 'then_max_requests', OLD.then_max_requests,
            'then_window_ms', OLD.then_window_ms) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;
