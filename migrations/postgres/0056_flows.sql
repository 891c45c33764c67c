-- The backlog of a lane, and its flows: jobs that wait in the ledger alone, and the order in which they leave it.

ALTER TABLE jobs
    -- The order of recording: first in, first out within a flow. 0 for jobs recorded before this migration.
    ADD COLUMN seq bigint NOT NULL DEFAULT 0,
    -- The job waits here alone: due, without a lease, and no queue has a message for it. Only a dispatcher brings it
    -- back.
    ADD COLUMN backlog boolean NOT NULL DEFAULT false;
ALTER TABLE jobs ALTER COLUMN seq DROP DEFAULT;
-- No role needs a right to the sequence of an identity.
ALTER TABLE jobs ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY;
ALTER TABLE jobs ADD CONSTRAINT backlog_has_no_lease_and_no_message
    CHECK (NOT backlog OR (lease_until IS NULL AND NOT unqueued)) NOT VALID;

-- Jobs of one account, or without an account (''), with one class on one lane.
CREATE TABLE flows (
    -- No foreign key: a flow outlives its provider's row as its jobs do.
    provider text NOT NULL CONSTRAINT flow_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    -- 0: the outcome is unknown; otherwise 10 minus the priority.
    class bigint NOT NULL CONSTRAINT class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    account text NOT NULL CONSTRAINT flow_account_is_0_to_64_of_letters_digits_underscore_dash
        CHECK (account ~ '^[A-Za-z0-9_-]*$' AND char_length(account) <= 64),
    -- Start-time fair queueing: millionths of cost / weight.
    tag bigint NOT NULL DEFAULT 0 CONSTRAINT tag_is_0_or_more CHECK (tag >= 0),
    weight bigint NOT NULL DEFAULT 1 CONSTRAINT weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- Jobs in the backlog.
    waiting bigint NOT NULL DEFAULT 0 CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    -- For the indexes: a change of `waiting` alone writes none of them.
    queued boolean NOT NULL GENERATED ALWAYS AS (waiting > 0) STORED,
    blocked_until timestamptz,
    blocked_reason text CONSTRAINT blocked_reason_is_known
        CHECK (blocked_reason IN ('limit', 'account_blocked', 'misconfigured', 'rejected_streak')),
    -- The limit that is meant.
    blocked_limit text CONSTRAINT blocked_limit_is_at_most_255_characters CHECK (char_length(blocked_limit) <= 255),
    PRIMARY KEY (provider, class, account),
    CONSTRAINT block_is_whole_or_absent
        CHECK ((blocked_until IS NULL) = (blocked_reason IS NULL)
               AND (blocked_limit IS NULL OR blocked_until IS NOT NULL)),
    CONSTRAINT instants_are_finite
        CHECK (blocked_until >= '0001-01-01 00:00:00+00' AND blocked_until < '9999-12-30 22:00:00+00')
) WITH (fillfactor = 70);
-- The run queue. A blocked flow is not in it.
CREATE INDEX flows_in_order ON flows (provider, class, tag) WHERE queued AND blocked_until IS NULL;
CREATE INDEX flows_by_wake ON flows (provider, blocked_until) WHERE blocked_until IS NOT NULL;
CREATE INDEX flows_idle ON flows (provider, class, tag) WHERE NOT queued;

-- The virtual time of a lane's class: the start tag of the flow that was served last.
CREATE TABLE flow_clocks (
    provider text NOT NULL CONSTRAINT clock_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    class bigint NOT NULL CONSTRAINT clock_class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    virtual_time bigint NOT NULL CONSTRAINT virtual_time_is_0_or_more CHECK (virtual_time >= 0),
    PRIMARY KEY (provider, class)
) WITH (fillfactor = 50);

-- One process at a time claims from a lane's backlog: the one that locks this row. The number changes with each claim.
CREATE TABLE flow_turns (
    provider text NOT NULL PRIMARY KEY CONSTRAINT turn_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    claims bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Whatever ends a job in the backlog, changes its state there or claims it, takes it out. The program's own statements
-- say so. During a rolling deployment, a program that knows no backlog claims a job by a late message; the next
-- comparison of the flows counts it out.
CREATE FUNCTION jobs_leave_backlog() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.backlog := false;
    RETURN NEW;
END $$;
CREATE TRIGGER leave_backlog BEFORE UPDATE OF state, lease_until ON jobs
    FOR EACH ROW WHEN (OLD.backlog AND NEW.backlog AND (NEW.state <> OLD.state OR NEW.lease_until IS NOT NULL))
    EXECUTE FUNCTION jobs_leave_backlog();

-- Counts a job that left the backlog without a claim: a claim, which takes a lease, counts by itself.
CREATE FUNCTION jobs_uncount_backlog() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE flows SET waiting = greatest(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
    RETURN NULL;
END $$;
-- At the end of the transaction: an operator's open transaction does not hold up the other jobs of the flow.
CREATE CONSTRAINT TRIGGER uncount_backlog AFTER UPDATE OF state, backlog ON jobs DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (OLD.backlog AND NOT NEW.backlog AND NEW.lease_until IS NULL)
    EXECUTE FUNCTION jobs_uncount_backlog();
CREATE CONSTRAINT TRIGGER uncount_deleted AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (OLD.backlog)
    EXECUTE FUNCTION jobs_uncount_backlog();

-- A deferred trigger runs as the session's user, who may have no right to the flows.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION jobs_uncount_backlog() SECURITY DEFINER SET search_path = %I, pg_temp',
                   current_schema());
END $$;
REVOKE ALL ON FUNCTION jobs_leave_backlog() FROM PUBLIC;
REVOKE ALL ON FUNCTION jobs_uncount_backlog() FROM PUBLIC;
