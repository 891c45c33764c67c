-- no-transaction
-- Payments by the beginning of their reference, byte by byte: the order of a language has no beginnings.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_reference ON jobs ((reference COLLATE "C"))
    WHERE reference IS NOT NULL;
