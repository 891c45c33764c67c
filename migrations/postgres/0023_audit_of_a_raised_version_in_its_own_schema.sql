-- A caller may have a temporary table with the audit's name. PostgreSQL looks there first, unless the search path names
-- pg_temp last.
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION settings_version_audit() SET search_path = %I, pg_temp', current_schema());
END $$;
