-- Names this database, so that a command can tell the process that works on it from one that works on another. A copy and a
-- restored backup have the id of their original; docs/runbook.md says when to give them another.
CREATE TABLE deployment (
    only_row integer PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id uuid NOT NULL
);

INSERT INTO deployment (id) VALUES (gen_random_uuid());
