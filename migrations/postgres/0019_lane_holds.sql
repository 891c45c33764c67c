-- Lanes that start no charge until an operator releases them: the ledger may lack payments that were charged.

-- Written by the worker that proves it, and deleted by `provider resume NAME --release-hold`. Workers read these rows each
-- second, and not with the settings: the version of the settings may have gone back with the rest.
CREATE TABLE lane_holds (
    -- No foreign key: a provider that is deleted and added again was charged all the same.
    provider text COLLATE "C" NOT NULL PRIMARY KEY CONSTRAINT held_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    cause text COLLATE "C" NOT NULL CONSTRAINT hold_cause_is_known
        CHECK (cause IN ('database_went_back', 'two_writable_servers', 'recover')),
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- What was found, in words.
    evidence text COLLATE "C" NOT NULL
        CONSTRAINT evidence_is_1_to_1000_characters CHECK (char_length(evidence) BETWEEN 1 AND 1000),
    CONSTRAINT instants_are_finite CHECK (
        least(since) >= '0001-01-01 00:00:00+00' AND greatest(since) < '9999-12-30 22:00:00+00')
);

CREATE TRIGGER bump_version BEFORE INSERT OR UPDATE OR DELETE ON lane_holds
    FOR EACH STATEMENT EXECUTE FUNCTION settings_bump_version();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON lane_holds
    FOR EACH ROW EXECUTE FUNCTION settings_record_change('provider');
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON lane_holds
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();
