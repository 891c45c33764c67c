-- The sweeper's columns of a job, and the indexes by which it finds its work without reading the rest.

-- No further copy of the message is published before this; NULL until the first.
ALTER TABLE jobs ADD COLUMN sweep_after INTEGER;
-- Copies of the message that the sweeper has published.
ALTER TABLE jobs ADD COLUMN sweeps INTEGER NOT NULL DEFAULT 0 CONSTRAINT sweeps_is_0_or_more CHECK (sweeps >= 0);
-- No queue has a message for the job: the sweeper publishes one when it is due.
ALTER TABLE jobs ADD COLUMN unqueued INTEGER NOT NULL DEFAULT 0
    CONSTRAINT unqueued_is_0_or_1 CHECK (unqueued IN (0, 1));
-- When payload and request body were emptied.
ALTER TABLE jobs ADD COLUMN scrubbed_at INTEGER
    CONSTRAINT open_jobs_are_not_scrubbed
        CHECK (scrubbed_at IS NULL OR state NOT IN ('waiting', 'sending', 'unknown'));

DROP INDEX jobs_open_by_wake;
-- Open jobs of a lane by the instant from which one more copy could be published.
CREATE INDEX jobs_open_by_sweep ON jobs (provider, (CASE WHEN sweep_after > wake_at THEN sweep_after ELSE wake_at END))
    WHERE state IN ('waiting', 'sending', 'unknown');
CREATE INDEX jobs_unqueued_by_wake ON jobs (provider, wake_at) WHERE unqueued AND state = 'waiting';
CREATE INDEX jobs_waiting_by_expiry ON jobs (expires_at) WHERE state = 'waiting' AND expires_at IS NOT NULL;
-- Finished jobs in the order of their finish: jobs to be scrubbed at the front, recent ones at the end.
CREATE INDEX jobs_finished_by_update ON jobs (updated_at)
    WHERE scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled');
CREATE INDEX jobs_in_review_by_update ON jobs (updated_at) WHERE state = 'review';

-- The interval between two copies belongs to one wait: it restarts when the job is claimed or gets another wait.
CREATE TRIGGER new_wait_resets_the_sweep_interval
    AFTER UPDATE OF wake_at, fence ON jobs
    WHEN OLD.sweep_after IS NOT NULL AND (NEW.wake_at <> OLD.wake_at OR NEW.fence <> OLD.fence)
BEGIN
    UPDATE jobs SET sweep_after = NULL WHERE id = NEW.id;
END;

-- Duties that one worker of the cluster does at a time: the one that moved `taken_until`.
CREATE TABLE upkeep_turns (
    duty TEXT NOT NULL PRIMARY KEY
        CONSTRAINT duty_is_a_short_word CHECK (length(duty) BETWEEN 1 AND 32 AND duty NOT GLOB '*[^a-z_]*'),
    taken_until INTEGER NOT NULL
) STRICT;

-- The embedded queue has a delivery limit too: the number of deliveries, and the lane that a message came from.
ALTER TABLE queue_messages ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0
    CONSTRAINT deliveries_is_not_negative CHECK (deliveries >= 0);
ALTER TABLE queue_messages ADD COLUMN dead_of TEXT;
