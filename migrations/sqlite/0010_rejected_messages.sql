-- Rejected messages in an operator's hands: how each begins, and what was decided about it.

-- How the body begins, without sensitive text. NULL: an older program recorded it, or it was discarded.
ALTER TABLE rejected_messages ADD COLUMN head TEXT
    CONSTRAINT head_is_at_most_120_characters CHECK (length(head) <= 120);
-- The only copy of the message, until a decision: its bytes, and its properties as JSON. NULL: decided.
ALTER TABLE rejected_messages ADD COLUMN body BLOB
    CONSTRAINT rejected_body_is_at_most_64_kib CHECK (length(body) <= 65536);
ALTER TABLE rejected_messages ADD COLUMN properties TEXT;
-- It held what must not be stored, or was longer: `body` is not what came, and can only be discarded.
ALTER TABLE rejected_messages ADD COLUMN masked INTEGER NOT NULL DEFAULT 0
    CONSTRAINT masked_is_0_or_1 CHECK (masked IN (0, 1));
-- NULL: its event is still to be published.
ALTER TABLE rejected_messages ADD COLUMN announced_at INTEGER;
-- NULL: open. A trigger writes the columns after it.
ALTER TABLE rejected_messages ADD COLUMN decision TEXT
    CONSTRAINT rejected_decision_is_known CHECK (decision IN ('republished', 'discarded'))
    CONSTRAINT masked_is_never_republished CHECK (NOT (masked AND decision = 'republished'));
ALTER TABLE rejected_messages ADD COLUMN decided_at INTEGER;
-- A database file has no users, so `decided_by` is 'database file'; a command adds the operating system's user
-- (user@host).
ALTER TABLE rejected_messages ADD COLUMN decided_by TEXT;
ALTER TABLE rejected_messages ADD COLUMN os_user TEXT;
ALTER TABLE rejected_messages ADD COLUMN program TEXT;
ALTER TABLE rejected_messages ADD COLUMN because TEXT;

DROP TRIGGER instants_are_finite_of_rejected_messages_on_insert;
CREATE TRIGGER instants_are_finite_of_rejected_messages_on_insert
    BEFORE INSERT ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.decided_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.announced_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
DROP TRIGGER instants_are_finite_of_rejected_messages;
CREATE TRIGGER instants_are_finite_of_rejected_messages
    BEFORE UPDATE OF at, decided_at, announced_at ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.decided_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.announced_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- Lists begin with the newest. A producer's mistake may have caused a million open ones.
CREATE INDEX rejected_messages_open ON rejected_messages (id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_open_by_lane ON rejected_messages (lane, id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_open_by_reason ON rejected_messages (reason, id) WHERE decision IS NULL;
CREATE INDEX rejected_messages_decided ON rejected_messages (id) WHERE decision IS NOT NULL;
CREATE INDEX rejected_messages_unannounced ON rejected_messages (id) WHERE announced_at IS NULL;

CREATE TRIGGER rejected_messages_are_decided_once BEFORE UPDATE OF id, at, lane, job_id, reason, detail, body_sha256, body_bytes,
    head, body, properties, masked, decision, decided_at, decided_by, os_user, program, because ON rejected_messages
    WHEN OLD.decided_at IS NOT NULL OR NEW.decision IS NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at
        OR NEW.lane <> OLD.lane OR NEW.job_id IS NOT OLD.job_id OR NEW.reason IS NOT OLD.reason OR NEW.detail <> OLD.detail
        OR NEW.body_sha256 <> OLD.body_sha256 OR NEW.body_bytes <> OLD.body_bytes OR NEW.masked <> OLD.masked
        OR (NEW.body IS NOT OLD.body AND NEW.body IS NOT NULL)
        OR (NEW.properties IS NOT OLD.properties AND NEW.properties IS NOT NULL)
        OR (NEW.head IS NOT OLD.head AND NEW.head IS NOT NULL)
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: rejected_messages_are_decided_once');
END;
CREATE TRIGGER rejected_messages_record_decision AFTER UPDATE OF decision ON rejected_messages
BEGIN
    UPDATE rejected_messages SET decided_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        -- It may hold personal data, which a discard removes.
        head = CASE WHEN NEW.decision <> 'discarded' THEN NEW.head END,
        -- It is in its lane, or not needed any more.
        body = NULL, properties = NULL,
        decided_by = 'database file', os_user = (SELECT os_user FROM settings_person),
        program = (SELECT program FROM settings_person), because = (SELECT because FROM settings_person)
    WHERE id = NEW.id;
END;
