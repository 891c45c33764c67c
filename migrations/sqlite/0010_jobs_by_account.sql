-- Payments are searched by account.
CREATE INDEX jobs_by_account ON jobs (account, id) WHERE account IS NOT NULL;
