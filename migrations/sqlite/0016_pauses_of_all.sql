-- Pauses of all providers at once.

-- Which providers each pause of all has paused, and how that ended for each of them.
CREATE TABLE pauses_of_all (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    -- The action. A second one while a pause is in force extends it.
    pause INTEGER NOT NULL CONSTRAINT pause_is_1_or_more CHECK (pause >= 1),
    -- No reference: a deleted provider was paused too.
    provider TEXT NOT NULL
        CONSTRAINT paused_provider_is_1_to_63_characters CHECK (length(provider) BETWEEN 1 AND 63),
    -- A trigger writes these. A database file has no users; a command adds the operating system's user (user@host).
    at INTEGER NOT NULL DEFAULT 0,
    who TEXT NOT NULL DEFAULT 'database file',
    os_user TEXT,
    program TEXT,
    because TEXT,
    -- NULL: the pause holds the provider. `resumed`: by whatever resumed it. `kept`: paused by itself since, and no longer
    -- resumed with the others. `deleted`: there is no such provider any more.
    ended TEXT CONSTRAINT pause_end_is_known CHECK (ended IN ('resumed', 'kept', 'deleted')),
    ended_at INTEGER
) STRICT;
CREATE UNIQUE INDEX pauses_of_all_hold_a_provider_once ON pauses_of_all (provider) WHERE ended IS NULL;

CREATE TRIGGER instants_are_finite_of_pauses_of_all_on_insert
    BEFORE INSERT ON pauses_of_all
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_pauses_of_all
    BEFORE UPDATE OF at, ended_at ON pauses_of_all
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

CREATE TRIGGER pauses_of_all_record AFTER INSERT ON pauses_of_all
BEGIN
    UPDATE pauses_of_all SET at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        who = 'database file', os_user = (SELECT os_user FROM settings_person),
        program = (SELECT program FROM settings_person), because = (SELECT because FROM settings_person)
    WHERE id = NEW.id;
END;
CREATE TRIGGER pauses_of_all_begin_open BEFORE INSERT ON pauses_of_all
    WHEN NEW.ended IS NOT NULL OR NEW.ended_at IS NOT NULL
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: pause_end_has_an_instant');
END;
CREATE TRIGGER pauses_of_all_end_once BEFORE UPDATE OF id, pause, provider, ended ON pauses_of_all
    WHEN OLD.ended IS NOT NULL OR NEW.ended IS NULL OR NEW.id <> OLD.id OR NEW.pause <> OLD.pause
        OR NEW.provider <> OLD.provider
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: pauses_of_all_end_once');
END;
CREATE TRIGGER pauses_of_all_record_end AFTER UPDATE OF ended ON pauses_of_all
BEGIN
    UPDATE pauses_of_all SET ended_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE id = NEW.id;
END;

-- Whatever resumes or deletes a provider ends the pause for it: a command, the API, a provider file or SQL.
CREATE TRIGGER pauses_of_all_resumed AFTER UPDATE OF paused ON providers
    WHEN NEW.paused = 0
BEGIN
    UPDATE pauses_of_all SET ended = 'resumed' WHERE provider = OLD.name AND ended IS NULL;
END;
CREATE TRIGGER pauses_of_all_renamed AFTER UPDATE OF name ON providers
    WHEN NEW.name <> OLD.name
BEGIN
    UPDATE pauses_of_all SET ended = 'deleted' WHERE provider = OLD.name AND ended IS NULL;
END;
CREATE TRIGGER pauses_of_all_deleted AFTER DELETE ON providers
BEGIN
    UPDATE pauses_of_all SET ended = 'deleted' WHERE provider = OLD.name AND ended IS NULL;
END;
