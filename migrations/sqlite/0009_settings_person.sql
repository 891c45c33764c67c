-- Who and why beside every change of settings. Hints are PostgreSQL's alone: one machine polls one file.

-- `who` is the file's; a command adds the user of the operating system (user@host), and why.
ALTER TABLE settings_audit ADD COLUMN os_user TEXT;
ALTER TABLE settings_audit ADD COLUMN because TEXT;

-- What PostgreSQL keeps as a setting of the transaction: said before a change and taken back after it, within its
-- transaction, so that nobody else's change sees it.
CREATE TABLE settings_person (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_person_has_one_row CHECK (only_row = 1),
    os_user TEXT,
    because TEXT,
    program TEXT
) STRICT;
INSERT INTO settings_person DEFAULT VALUES;

CREATE TRIGGER settings_audit_person AFTER INSERT ON settings_audit
BEGIN
    UPDATE settings_audit SET os_user = (SELECT os_user FROM settings_person),
        because = (SELECT because FROM settings_person), program = (SELECT program FROM settings_person)
    WHERE id = NEW.id;
END;
