-- Author and reason in the audit of settings. Hints exist in PostgreSQL alone: one machine polls one file.

-- `who` is 'database file'; a command adds the operating system's user (user@host), and the reason.
ALTER TABLE settings_audit ADD COLUMN os_user TEXT;
ALTER TABLE settings_audit ADD COLUMN because TEXT;

-- PostgreSQL keeps this as a setting of the transaction. Here, it is set before a change and cleared after it in the
-- same transaction, so that no other change sees it.
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
