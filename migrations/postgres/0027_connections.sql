-- How long a connection to the provider is used for new requests, and whether a charge may use one that was used
-- before. NULL: decided by the row's idempotency retention and look-ups.
ALTER TABLE providers ADD COLUMN connection_max_age_ms bigint NOT NULL DEFAULT 60000
    CONSTRAINT connection_max_age_ms_is_1000_to_3600000 CHECK (connection_max_age_ms BETWEEN 1000 AND 3600000);
ALTER TABLE providers ADD COLUMN reuse_connections boolean;
