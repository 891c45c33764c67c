-- Actions that wait for a second person, and what became of each.

-- An approval is written in the transaction of the action itself.
CREATE TABLE pending_approvals (
    -- A UUID of version 7: a later request has a larger id.
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT approval_id_is_32_hex_digits CHECK (length(id) = 32 AND id NOT GLOB '*[^0-9a-f]*'),
    state TEXT NOT NULL DEFAULT 'pending'
        CONSTRAINT approval_state_is_known CHECK (state IN ('pending', 'approved', 'refused', 'withdrawn', 'expired')),
    -- The action as approvals.require names it, and all that it needs, a JSON object.
    action TEXT NOT NULL CONSTRAINT approval_action_is_1_to_32_characters CHECK (length(action) BETWEEN 1 AND 32),
    stored_action TEXT NOT NULL CONSTRAINT approval_action_is_json CHECK (json_valid(stored_action)),
    -- Of a decision about many payments: their ids, a JSON array.
    members TEXT CONSTRAINT approval_members_are_json CHECK (json_valid(members)),
    -- Of the stored action.
    digest TEXT NOT NULL
        CONSTRAINT approval_digest_is_64_hex_digits CHECK (length(digest) = 64 AND digest NOT GLOB '*[^0-9a-f]*'),
    -- Payments, and their number and sum by currency, a JSON array.
    jobs INTEGER NOT NULL CONSTRAINT approval_jobs_are_0_or_more CHECK (jobs >= 0),
    sums TEXT NOT NULL CONSTRAINT approval_sums_are_json CHECK (json_valid(sums)),
    requested_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    -- The person, how it was identified, and as the audit names it.
    requested_by TEXT NOT NULL
        CONSTRAINT requester_is_1_to_1000_characters CHECK (length(requested_by) BETWEEN 1 AND 1000),
    requested_role TEXT NOT NULL
        CONSTRAINT requester_role_is_known CHECK (requested_role IN ('viewer', 'operator', 'admin')),
    requested_path TEXT NOT NULL
        CONSTRAINT requester_path_is_known CHECK (requested_path IN ('user', 'proxy', 'os')),
    requested_as TEXT NOT NULL
        CONSTRAINT requester_author_is_1_to_1000_characters CHECK (length(requested_as) BETWEEN 1 AND 1000),
    because TEXT CONSTRAINT approval_reason_is_at_most_1000_characters CHECK (length(because) <= 1000),
    -- NULL: pending or expired.
    decided_at INTEGER,
    decided_by TEXT CONSTRAINT approver_is_1_to_1000_characters CHECK (length(decided_by) BETWEEN 1 AND 1000),
    decided_role TEXT CONSTRAINT approver_role_is_known CHECK (decided_role IN ('viewer', 'operator', 'admin')),
    decided_path TEXT CONSTRAINT approver_path_is_known CHECK (decided_path IN ('user', 'proxy', 'os')),
    decided_because TEXT
        CONSTRAINT decision_reason_is_at_most_1000_characters CHECK (length(decided_because) <= 1000),
    -- The batch that an approval began.
    batch TEXT,
    CONSTRAINT decided_approval_names_a_person CHECK (
        (state IN ('pending', 'expired')) = (decided_at IS NULL) AND (decided_at IS NULL) = (decided_by IS NULL))
) STRICT;
CREATE TRIGGER instants_are_finite_of_pending_approvals_on_insert
    BEFORE INSERT ON pending_approvals
    WHEN NEW.requested_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.decided_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_pending_approvals
    BEFORE UPDATE OF requested_at, expires_at, decided_at ON pending_approvals
    WHEN NEW.requested_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.decided_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
-- The same action is requested once at a time.
CREATE UNIQUE INDEX pending_approvals_once ON pending_approvals (digest) WHERE state = 'pending';
CREATE INDEX pending_approvals_by_end ON pending_approvals (state, expires_at);
