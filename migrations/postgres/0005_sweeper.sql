-- The sweeper's columns of a job, and the indexes by which it finds its work without reading the rest. The indexes are
-- built under a lock because no release has this table yet (rule 6 of migrations/README.md).

ALTER TABLE jobs
    -- No further copy of the message is published before this; NULL until the first.
    ADD COLUMN sweep_after timestamptz,
    -- Copies of the message that the sweeper has published.
    ADD COLUMN sweeps bigint NOT NULL DEFAULT 0 CONSTRAINT sweeps_is_0_or_more CHECK (sweeps >= 0),
    -- No queue has a message for the job: the sweeper publishes one when it is due.
    ADD COLUMN unqueued boolean NOT NULL DEFAULT false,
    -- When payload and request body were emptied.
    ADD COLUMN scrubbed_at timestamptz
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
CREATE FUNCTION jobs_forget_sweep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.sweep_after := NULL;
    RETURN NEW;
END $$;
CREATE TRIGGER new_wait_resets_the_sweep_interval
    BEFORE UPDATE OF wake_at, fence ON jobs
    FOR EACH ROW WHEN (OLD.sweep_after IS NOT NULL AND (NEW.wake_at <> OLD.wake_at OR NEW.fence <> OLD.fence))
    EXECUTE FUNCTION jobs_forget_sweep();

-- Duties that one worker of the cluster does at a time: the one that moved `taken_until`.
CREATE TABLE upkeep_turns (
    duty text NOT NULL PRIMARY KEY CONSTRAINT duty_is_a_short_word CHECK (duty ~ '^[a-z_]{1,32}$'),
    taken_until timestamptz NOT NULL
);
