-- `jobs explain` searches the rejected messages of an id. A producer's mistake may have caused a million of them.
CREATE INDEX rejected_messages_by_job ON rejected_messages (job_id) WHERE job_id IS NOT NULL;
