-- The id of this database, so that a command can tell its running process from one on another database. A copy and a
-- restored backup have the id of their original; docs/runbook.md says when to change it.
CREATE TABLE deployment (
    only_row integer PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id uuid NOT NULL
);

INSERT INTO deployment (id) VALUES (gen_random_uuid());
