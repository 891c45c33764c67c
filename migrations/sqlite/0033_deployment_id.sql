-- The id of this database, so that a command can tell its running process from one on another database. A copy and a
-- restored backup have the id of their original; docs/runbook.md says when to change it.
CREATE TABLE deployment (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id TEXT NOT NULL CONSTRAINT deployment_id_is_a_uuid
        CHECK (id GLOB '????????-????-????-????-????????????'
            AND length(replace(id, '-', '')) = 32 AND replace(id, '-', '') NOT GLOB '*[^0-9a-f]*')
) STRICT;

-- A random UUID, version 4: https://www.rfc-editor.org/rfc/rfc9562#section-5.4
INSERT INTO deployment (id) VALUES (lower(
    hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
    || substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))
));
