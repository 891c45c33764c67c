-- The backlog of a lane, and its flows: jobs that wait in the ledger alone, and the order in which they leave it.

-- The job waits here alone: due, without a lease, and no queue has a message for it. Only a dispatcher brings it back.
ALTER TABLE jobs ADD COLUMN backlog INTEGER NOT NULL DEFAULT 0
    CONSTRAINT backlog_is_0_or_1 CHECK (backlog IN (0, 1))
    CONSTRAINT backlog_has_no_lease_and_no_message CHECK (NOT backlog OR (lease_until IS NULL AND NOT unqueued));
-- The order of recording: first in, first out within a flow.
ALTER TABLE jobs ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET seq = rowid;
-- Jobs are never deleted by the program, so the number of the row rises.
CREATE TRIGGER jobs_get_a_sequence_number AFTER INSERT ON jobs
BEGIN
    UPDATE jobs SET seq = NEW.rowid WHERE rowid = NEW.rowid;
END;
CREATE TRIGGER seq_never_changes BEFORE UPDATE OF seq ON jobs WHEN OLD.seq <> 0 AND NEW.seq <> OLD.seq
BEGIN
    SELECT raise(ABORT, 'seq never changes: a constraint of jobs');
END;

-- Jobs of one account, or without an account (''), with one class on one lane.
CREATE TABLE flows (
    -- No foreign key: a flow outlives its provider's row as its jobs do.
    provider TEXT NOT NULL CONSTRAINT flow_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    -- 0: the outcome is unknown; otherwise 10 minus the priority.
    class INTEGER NOT NULL CONSTRAINT class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    account TEXT NOT NULL CONSTRAINT flow_account_is_0_to_64_of_letters_digits_underscore_dash
        CHECK (length(account) <= 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    -- Start-time fair queueing: millionths of cost / weight.
    tag INTEGER NOT NULL DEFAULT 0 CONSTRAINT tag_is_0_or_more CHECK (tag >= 0),
    weight INTEGER NOT NULL DEFAULT 1 CONSTRAINT weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- Jobs in the backlog.
    waiting INTEGER NOT NULL DEFAULT 0 CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    -- For the indexes: a change of `waiting` alone writes none of them.
    queued INTEGER NOT NULL GENERATED ALWAYS AS (waiting > 0) STORED,
    blocked_until INTEGER,
    blocked_reason TEXT CONSTRAINT blocked_reason_is_known
        CHECK (blocked_reason IN ('limit', 'account_blocked', 'misconfigured', 'rejected_streak')),
    -- The limit that is meant.
    blocked_limit TEXT CONSTRAINT blocked_limit_is_at_most_255_characters CHECK (length(blocked_limit) <= 255),
    PRIMARY KEY (provider, class, account),
    CONSTRAINT block_is_whole_or_absent
        CHECK ((blocked_until IS NULL) = (blocked_reason IS NULL)
               AND (blocked_limit IS NULL OR blocked_until IS NOT NULL))
) STRICT;
-- The run queue. A blocked flow is not in it.
CREATE INDEX flows_in_order ON flows (provider, class, tag) WHERE queued AND blocked_until IS NULL;
CREATE INDEX flows_by_wake ON flows (provider, blocked_until) WHERE blocked_until IS NOT NULL;
CREATE INDEX flows_idle ON flows (provider, class, tag) WHERE NOT queued;
CREATE TRIGGER instants_are_finite_of_flows BEFORE UPDATE OF blocked_until ON flows
    WHEN NEW.blocked_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'instants_are_finite: a constraint of flows');
END;
CREATE TRIGGER instants_are_finite_of_flows_on_insert BEFORE INSERT ON flows
    WHEN NEW.blocked_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'instants_are_finite: a constraint of flows');
END;

-- The virtual time of a lane's class: the start tag of the flow that was served last.
CREATE TABLE flow_clocks (
    provider TEXT NOT NULL CONSTRAINT clock_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    class INTEGER NOT NULL CONSTRAINT clock_class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    virtual_time INTEGER NOT NULL CONSTRAINT virtual_time_is_0_or_more CHECK (virtual_time >= 0),
    PRIMARY KEY (provider, class)
) STRICT;

-- One process at a time claims from a lane's backlog. In SQLite, which has one writer, the row has no reader.
CREATE TABLE flow_turns (
    provider TEXT NOT NULL PRIMARY KEY CONSTRAINT turn_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    claims INTEGER NOT NULL DEFAULT 0
) STRICT;

-- The jobs of a flow that wait in the backlog, first in first. Other jobs have no entry.
CREATE INDEX jobs_in_backlog ON jobs
    (provider, (CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END), (COALESCE(account, '')), seq) WHERE backlog;

-- Whatever ends a job in the backlog, or changes its state there, takes it out. The program's own statements say so.
CREATE TRIGGER jobs_leave_backlog AFTER UPDATE OF state ON jobs
    WHEN OLD.backlog AND NEW.backlog AND NEW.state <> OLD.state
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
    -- The trigger below counts the job out of the flow of its new state, where it never was.
    UPDATE flows SET waiting = waiting + 1
    WHERE NEW.state IN ('waiting', 'unknown') AND provider = NEW.provider AND account = coalesce(NEW.account, '')
        AND class = CASE WHEN NEW.state = 'unknown' THEN 0 ELSE 10 - NEW.priority END;
    UPDATE jobs SET backlog = 0 WHERE id = NEW.id;
END;
-- Counts a job that left the backlog without a claim: a claim, which takes a lease, counts by itself.
CREATE TRIGGER jobs_uncount_backlog AFTER UPDATE OF backlog ON jobs
    WHEN OLD.backlog AND NOT NEW.backlog AND NEW.lease_until IS NULL AND OLD.state IN ('waiting', 'unknown')
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
END;
CREATE TRIGGER jobs_uncount_deleted AFTER DELETE ON jobs WHEN OLD.backlog
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
END;
