-- no-transaction
-- The payments of a provider in one state, newest first. It replaces jobs_by_provider_and_state.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_state_and_time ON jobs (provider, state, created_at, seq);
