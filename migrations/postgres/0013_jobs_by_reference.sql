-- no-transaction
-- Payments by the beginning of their reference.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_reference ON jobs (reference) WHERE reference IS NOT NULL;
