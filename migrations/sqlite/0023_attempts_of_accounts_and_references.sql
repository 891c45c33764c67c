-- A limiter that did not count the uses of an account or a reference asks for just those.
ALTER TABLE attempts ADD COLUMN account TEXT;
ALTER TABLE attempts ADD COLUMN reference TEXT;
UPDATE attempts SET account = jobs.account, reference = jobs.reference FROM jobs
    WHERE jobs.id = attempts.job_id AND (jobs.account IS NOT NULL OR jobs.reference IS NOT NULL);
CREATE INDEX attempts_by_account ON attempts (provider, account, began_at) WHERE account IS NOT NULL;
CREATE INDEX attempts_by_reference ON attempts (provider, reference, began_at) WHERE reference IS NOT NULL;
