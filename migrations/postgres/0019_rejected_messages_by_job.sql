-- `jobs explain` asks for what never became a job under its id. A producer's mistake may have rejected a million messages.
CREATE INDEX rejected_messages_by_job ON rejected_messages (job_id) WHERE job_id IS NOT NULL;
