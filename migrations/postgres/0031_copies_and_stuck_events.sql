-- Which copy of a job's message counts, and when an outcome event is tried again.

ALTER TABLE jobs
    -- Number of the newest copy of its message; 0 is the producer's own.
    ADD COLUMN copy bigint NOT NULL DEFAULT 0,
    -- Number of the copy that a delay queue holds until an instant.
    ADD COLUMN delayed_copy bigint,
    ADD COLUMN delayed_until timestamptz;
ALTER TABLE jobs
    ADD CONSTRAINT copy_is_0_or_more CHECK (copy >= 0) NOT VALID,
    ADD CONSTRAINT a_delayed_copy_has_a_number_and_an_end
        CHECK ((delayed_copy IS NULL) = (delayed_until IS NULL)) NOT VALID;

-- An event that a queue rejected is tried again at growing intervals: it leaves the order of those that were never
-- rejected.
ALTER TABLE outcome_events
    ADD COLUMN tries bigint NOT NULL DEFAULT 0,
    -- NULL until it is rejected.
    ADD COLUMN next_try_at timestamptz;
ALTER TABLE outcome_events ADD CONSTRAINT tries_is_0_or_more CHECK (tries >= 0) NOT VALID;
DROP INDEX outcome_events_unpublished;
