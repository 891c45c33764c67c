-- no-transaction
-- For the count of messages in a lane's queue: of jobs that were taken up without theirs, which is in the queue still. No copy is
-- delayed before its job is recorded, so that instant says so.
CREATE INDEX CONCURRENTLY IF NOT EXISTS jobs_with_a_message_left ON jobs (provider) WHERE delayed_until <= created_at;
