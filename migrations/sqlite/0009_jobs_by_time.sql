-- Lists of payments, newest first. An index ends with the row's number, which is the order of recording.

-- All payments: the list without a filter, and the filters that no other index serves.
CREATE INDEX jobs_by_time ON jobs (created_at);
-- The payments of a provider in one state.
DROP INDEX jobs_by_provider_and_state;
CREATE INDEX jobs_by_state_and_time ON jobs (provider, state, created_at);
-- The payments of an account.
DROP INDEX jobs_by_account;
CREATE INDEX jobs_by_account_and_time ON jobs (account, created_at) WHERE account IS NOT NULL;
-- Payments by the beginning of their reference.
CREATE INDEX jobs_by_reference ON jobs (reference) WHERE reference IS NOT NULL;
