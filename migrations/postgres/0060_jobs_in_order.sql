-- no-transaction
-- The claimed jobs of lanes that keep an account's order. Other jobs have no entry.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_in_order ON jobs (provider, account)
    WHERE in_order AND NOT backlog AND state IN ('waiting', 'sending', 'unknown', 'review');
