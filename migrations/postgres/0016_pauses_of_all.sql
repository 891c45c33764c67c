-- Pauses of all providers at once.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- Which providers each pause of all has paused, and how that ended for each of them.
CREATE TABLE pauses_of_all (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The action. A second one while a pause is in force extends it.
    pause bigint NOT NULL CONSTRAINT pause_is_1_or_more CHECK (pause >= 1),
    -- No reference: a deleted provider was paused too.
    provider text COLLATE "C" NOT NULL
        CONSTRAINT paused_provider_is_1_to_63_characters CHECK (char_length(provider) BETWEEN 1 AND 63),
    -- A trigger writes these. The database's user, and that of the operating system as a command names it (user@host).
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text COLLATE "C" NOT NULL DEFAULT session_user,
    os_user text COLLATE "C",
    program text COLLATE "C",
    because text COLLATE "C",
    -- NULL: the pause holds the provider. `resumed`: by whatever resumed it. `kept`: paused by itself since, and no longer
    -- resumed with the others. `deleted`: there is no such provider any more.
    ended text COLLATE "C" CONSTRAINT pause_end_is_known CHECK (ended IN ('resumed', 'kept', 'deleted')),
    ended_at timestamptz,
    CONSTRAINT pause_end_has_an_instant CHECK ((ended IS NULL) = (ended_at IS NULL)),
    CONSTRAINT instants_are_finite CHECK (
        least(at, ended_at) >= '0001-01-01 00:00:00+00' AND greatest(at, ended_at) < '9999-12-30 22:00:00+00')
);
CREATE UNIQUE INDEX pauses_of_all_hold_a_provider_once ON pauses_of_all (provider) WHERE ended IS NULL;

CREATE FUNCTION pauses_of_all_record() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        NEW.at := clock_timestamp();
        NEW.who := session_user;
        NEW.os_user := nullif(current_setting('sluicegate.os_user', true), '');
        NEW.program := nullif(current_setting('application_name'), '');
        NEW.because := nullif(current_setting('sluicegate.because', true), '');
        NEW.ended := NULL;
        NEW.ended_at := NULL;
        RETURN NEW;
    END IF;
    IF OLD.ended IS NOT NULL OR NEW.ended IS NULL
        OR ROW(NEW.id, NEW.pause, NEW.provider, NEW.at, NEW.who, NEW.os_user, NEW.program, NEW.because)
            IS DISTINCT FROM
            ROW(OLD.id, OLD.pause, OLD.provider, OLD.at, OLD.who, OLD.os_user, OLD.program, OLD.because)
    THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'pauses_of_all_end_once',
            MESSAGE = 'a pause of all providers ends once for each of them, and nothing else of it changes';
    END IF;
    NEW.ended_at := clock_timestamp();
    RETURN NEW;
END $$;
CREATE TRIGGER record BEFORE INSERT OR UPDATE ON pauses_of_all
    FOR EACH ROW EXECUTE FUNCTION pauses_of_all_record();

-- Whatever resumes or deletes a provider ends the pause for it: a command, the API, a provider file or SQL.
CREATE FUNCTION pauses_of_all_end() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        UPDATE pauses_of_all SET ended = 'deleted' WHERE provider = OLD.name AND ended IS NULL;
    ELSIF NEW.name <> OLD.name THEN
        UPDATE pauses_of_all SET ended = 'deleted' WHERE provider = OLD.name AND ended IS NULL;
    ELSIF NOT NEW.paused THEN
        UPDATE pauses_of_all SET ended = 'resumed' WHERE provider = OLD.name AND ended IS NULL;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER end_pause_of_all AFTER UPDATE OF name, paused OR DELETE ON providers
    FOR EACH ROW EXECUTE FUNCTION pauses_of_all_end();

REVOKE ALL ON FUNCTION pauses_of_all_record(), pauses_of_all_end() FROM PUBLIC;
