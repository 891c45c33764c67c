-- no-transaction
-- The jobs of a flow that wait in the backlog, first in first. Other jobs have no entry.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_in_backlog ON jobs
    (provider, (CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END), (COALESCE(account, '')), seq) WHERE backlog;
