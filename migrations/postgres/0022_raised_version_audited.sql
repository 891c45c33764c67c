-- A worker that finds a restored database raises the version, and changes no setting: it has no right to write the
-- audit itself. Changes of settings move the version from within their own triggers, which audit them.
CREATE FUNCTION settings_version_audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO settings_audit (who, program, table_name, row_key, old_row, new_row)
    VALUES (session_user, nullif(current_setting('application_name'), ''), 'settings_version', 'version',
            jsonb_build_object('version', OLD.version), jsonb_build_object('version', NEW.version));
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION settings_version_audit() FROM PUBLIC;
CREATE TRIGGER audit AFTER UPDATE ON settings_version
    FOR EACH ROW WHEN (NEW.version > OLD.version AND pg_trigger_depth() = 0) EXECUTE FUNCTION settings_version_audit();
