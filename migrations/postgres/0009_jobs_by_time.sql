-- no-transaction
-- All payments, newest first: the list without a filter, and the filters that no other index serves.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_time ON jobs (created_at, seq);
