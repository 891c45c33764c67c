-- Which copy of a job's message counts, and when an outcome event is tried again.

-- Number of the newest copy of its message; 0 is the producer's own.
ALTER TABLE jobs ADD COLUMN copy INTEGER NOT NULL DEFAULT 0 CONSTRAINT copy_is_0_or_more CHECK (copy >= 0);
-- Number of the copy that a delay queue holds until an instant.
ALTER TABLE jobs ADD COLUMN delayed_copy INTEGER;
ALTER TABLE jobs ADD COLUMN delayed_until INTEGER
    CONSTRAINT a_delayed_copy_has_a_number_and_an_end CHECK ((delayed_copy IS NULL) = (delayed_until IS NULL));

-- An event that a queue rejected is tried again at growing intervals: it leaves the order of those that were never
-- rejected.
ALTER TABLE outcome_events ADD COLUMN tries INTEGER NOT NULL DEFAULT 0 CONSTRAINT tries_is_0_or_more CHECK (tries >= 0);
-- NULL until it is rejected.
ALTER TABLE outcome_events ADD COLUMN next_try_at INTEGER;
DROP INDEX outcome_events_unpublished;
-- Unpublished events: those that were never rejected in their order, and the others by the instant of their next try.
CREATE INDEX outcome_events_by_try ON outcome_events (next_try_at, sequence) WHERE published_at IS NULL;
