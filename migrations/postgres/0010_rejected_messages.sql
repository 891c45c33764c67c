-- Rejected messages in an operator's hands: how each begins, and what was decided about it.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

ALTER TABLE rejected_messages
    -- How the body begins, without sensitive text. NULL: an older program recorded it, or it was discarded.
    ADD COLUMN head text COLLATE "C" CONSTRAINT head_is_at_most_120_characters CHECK (char_length(head) <= 120),
    -- The only copy of the message, until a decision: its bytes, and its properties as JSON. NULL: decided.
    ADD COLUMN body bytea CONSTRAINT rejected_body_is_at_most_64_kib CHECK (octet_length(body) <= 65536),
    ADD COLUMN properties jsonb,
    -- It held what must not be stored, or was longer: `body` is not what came, and can only be discarded.
    ADD COLUMN masked boolean NOT NULL DEFAULT false,
    -- NULL: its event is still to be published.
    ADD COLUMN announced_at timestamptz,
    -- NULL: open. A trigger writes the columns after it.
    ADD COLUMN decision text COLLATE "C"
        CONSTRAINT rejected_decision_is_known CHECK (decision IN ('republished', 'discarded')),
    ADD COLUMN decided_at timestamptz,
    -- The database's user, and that of the operating system as a command names it (user@host).
    ADD COLUMN decided_by text COLLATE "C",
    ADD COLUMN os_user text COLLATE "C",
    ADD COLUMN program text COLLATE "C",
    ADD COLUMN because text COLLATE "C",
    ADD CONSTRAINT masked_is_never_republished CHECK (NOT (masked AND decision = 'republished')),
    DROP CONSTRAINT instants_are_finite,
    ADD CONSTRAINT instants_are_finite CHECK (
        least(at, decided_at, announced_at) >= '0001-01-01 00:00:00+00'
        AND greatest(at, decided_at, announced_at) < '9999-12-30 22:00:00+00');

-- Lists begin with the newest. A producer's mistake may have caused a million open ones.
CREATE INDEX rejected_messages_open ON rejected_messages (id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_open_by_lane ON rejected_messages (lane, id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_open_by_reason ON rejected_messages (reason, id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_decided ON rejected_messages (id) WHERE decision IS NOT NULL;
CREATE INDEX rejected_messages_unannounced ON rejected_messages (id) WHERE announced_at IS NULL;

CREATE FUNCTION rejected_messages_record_decision() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF OLD.decision IS NOT NULL OR NEW.decision IS NULL
        OR ROW(NEW.id, NEW.at, NEW.lane, NEW.job_id, NEW.reason, NEW.detail, NEW.body_sha256, NEW.body_bytes,
            NEW.masked)
            IS DISTINCT FROM
            ROW(OLD.id, OLD.at, OLD.lane, OLD.job_id, OLD.reason, OLD.detail, OLD.body_sha256, OLD.body_bytes, OLD.masked)
        OR (NEW.body IS DISTINCT FROM OLD.body AND NEW.body IS NOT NULL)
        OR (NEW.properties IS DISTINCT FROM OLD.properties AND NEW.properties IS NOT NULL)
        OR (NEW.head IS DISTINCT FROM OLD.head AND NEW.head IS NOT NULL)
    THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'rejected_messages_are_decided_once',
            MESSAGE = 'a rejected message is decided once, and nothing else of it changes';
    END IF;
    -- It may hold personal data, which a discard removes.
    IF NEW.decision = 'discarded' THEN
        NEW.head := NULL;
    END IF;
    -- It is in its lane, or not needed any more.
    NEW.body := NULL;
    NEW.properties := NULL;
    NEW.decided_at := clock_timestamp();
    NEW.decided_by := session_user;
    NEW.os_user := nullif(current_setting('sluicegate.os_user', true), '');
    NEW.program := nullif(current_setting('application_name'), '');
    NEW.because := nullif(current_setting('sluicegate.because', true), '');
    RETURN NEW;
END $$;
CREATE TRIGGER record_decision BEFORE UPDATE OF id, at, lane, job_id, reason, detail, body_sha256, body_bytes, head, body,
    properties, masked, decision, decided_at, decided_by, os_user, program, because ON rejected_messages
    FOR EACH ROW EXECUTE FUNCTION rejected_messages_record_decision();

REVOKE ALL ON FUNCTION rejected_messages_record_decision() FROM PUBLIC;
