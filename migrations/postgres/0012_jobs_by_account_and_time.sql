-- no-transaction
-- The payments of an account, newest first. It replaces jobs_by_account.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_by_account_and_time ON jobs (account, created_at, seq)
    WHERE account IS NOT NULL;
