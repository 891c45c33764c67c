-- Whoever calls it may have a temporary table of the audit's name, which PostgreSQL looks at first unless it is told to look
-- there last.
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION settings_version_audit() SET search_path = %I, pg_temp', current_schema());
END $$;
