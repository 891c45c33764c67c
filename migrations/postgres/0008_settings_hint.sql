-- A hint for workers, so that they need not wait for their next poll; and author and reason in the audit of settings.

-- The same notification for every change: PostgreSQL sends equal ones of a transaction once, at its commit. A worker
-- that does not listen polls, so nothing depends on it.
CREATE FUNCTION settings_hint() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('sluicegate_settings', '');
    RETURN NULL;
END $$;
CREATE TRIGGER hint AFTER UPDATE ON settings_version
    FOR EACH STATEMENT EXECUTE FUNCTION settings_hint();

-- `who` is the database's user; a command adds the operating system's user (user@host), and the reason.
ALTER TABLE settings_audit ADD COLUMN os_user text, ADD COLUMN because text;

CREATE FUNCTION settings_audit_person() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.os_user := nullif(current_setting('sluicegate.os_user', true), '');
    NEW.because := nullif(current_setting('sluicegate.because', true), '');
    RETURN NEW;
END $$;
CREATE TRIGGER person BEFORE INSERT ON settings_audit
    FOR EACH ROW EXECUTE FUNCTION settings_audit_person();
