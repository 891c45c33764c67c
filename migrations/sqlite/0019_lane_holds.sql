-- Lanes that start no charge until an operator releases them: the ledger may lack payments that were charged.

-- Written by the worker that proves it, and deleted by `provider resume NAME --release-hold`. Workers read these rows each
-- second, and not with the settings: the version of the settings may have gone back with the rest.
CREATE TABLE lane_holds (
    -- No foreign key: a provider that is deleted and added again was charged all the same.
    provider TEXT NOT NULL PRIMARY KEY CONSTRAINT held_provider_is_a_provider_name
        CHECK (length(provider) BETWEEN 1 AND 63 AND provider NOT GLOB '*[^a-z0-9_-]*' AND provider GLOB '[a-z0-9]*'),
    cause TEXT NOT NULL CONSTRAINT hold_cause_is_known
        CHECK (cause IN ('database_went_back', 'two_writable_servers', 'recover')),
    since INTEGER NOT NULL DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)),
    -- What was found, in words.
    evidence TEXT NOT NULL CONSTRAINT evidence_is_1_to_1000_characters CHECK (length(evidence) BETWEEN 1 AND 1000)
) STRICT;

CREATE TRIGGER instants_are_finite_of_lane_holds_on_insert
    BEFORE INSERT ON lane_holds
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_lane_holds
    BEFORE UPDATE OF since ON lane_holds
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

CREATE TRIGGER lane_holds_insert AFTER INSERT ON lane_holds
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'lane_holds', NEW.provider,
        NULL,
        json_object('provider', NEW.provider, 'cause', NEW.cause, 'since', NEW.since, 'evidence', NEW.evidence));
END;

CREATE TRIGGER lane_holds_update AFTER UPDATE OF provider, cause, since, evidence ON lane_holds
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'lane_holds', NEW.provider,
        json_object('provider', OLD.provider, 'cause', OLD.cause, 'since', OLD.since, 'evidence', OLD.evidence),
        json_object('provider', NEW.provider, 'cause', NEW.cause, 'since', NEW.since, 'evidence', NEW.evidence));
END;

CREATE TRIGGER lane_holds_delete AFTER DELETE ON lane_holds
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'lane_holds', OLD.provider,
        json_object('provider', OLD.provider, 'cause', OLD.cause, 'since', OLD.since, 'evidence', OLD.evidence),
        NULL);
END;
