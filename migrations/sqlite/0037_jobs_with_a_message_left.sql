-- For the count of messages in a lane's queue: jobs that were claimed without their message, which is still in the
-- queue. No copy is delayed before its job is recorded, so such an instant marks them.
CREATE INDEX jobs_with_a_message_left ON jobs (provider) WHERE delayed_until <= created_at;
