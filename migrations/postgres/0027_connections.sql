-- How long a connection to the provider serves new requests, and whether a charge may go on one that was used before; NULL
-- leaves that to what the row says of repeated keys and look-ups.
ALTER TABLE providers ADD COLUMN connection_max_age_ms bigint NOT NULL DEFAULT 60000
    CONSTRAINT connection_max_age_ms_is_1000_to_3600000 CHECK (connection_max_age_ms BETWEEN 1000 AND 3600000);
ALTER TABLE providers ADD COLUMN reuse_connections boolean;
