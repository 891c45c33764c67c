-- Actions that wait for a second person, and what became of each.

-- An approval is written in the transaction of the action itself.
CREATE TABLE pending_approvals (
    -- A UUID of version 7: a later request has a larger id.
    id text NOT NULL PRIMARY KEY
        CONSTRAINT approval_id_is_32_hex_digits CHECK (char_length(id) = 32 AND id ~ '^[0-9a-f]+$'),
    state text NOT NULL DEFAULT 'pending'
        CONSTRAINT approval_state_is_known CHECK (state IN ('pending', 'approved', 'refused', 'withdrawn', 'expired')),
    -- The action as approvals.require names it, and all that it needs, a JSON object.
    action text NOT NULL CONSTRAINT approval_action_is_1_to_32_characters CHECK (char_length(action) BETWEEN 1 AND 32),
    stored_action jsonb NOT NULL,
    -- Of a decision about many payments: their ids, a JSON array.
    members jsonb,
    -- Of the stored action.
    digest text NOT NULL
        CONSTRAINT approval_digest_is_64_hex_digits CHECK (char_length(digest) = 64 AND digest ~ '^[0-9a-f]+$'),
    -- Payments, and their number and sum by currency, a JSON array.
    jobs bigint NOT NULL CONSTRAINT approval_jobs_are_0_or_more CHECK (jobs >= 0),
    sums jsonb NOT NULL,
    requested_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    -- The person, how it was identified, and as the audit names it.
    requested_by text NOT NULL
        CONSTRAINT requester_is_1_to_1000_characters CHECK (char_length(requested_by) BETWEEN 1 AND 1000),
    requested_role text NOT NULL
        CONSTRAINT requester_role_is_known CHECK (requested_role IN ('viewer', 'operator', 'admin')),
    requested_path text NOT NULL
        CONSTRAINT requester_path_is_known CHECK (requested_path IN ('user', 'proxy', 'os')),
    requested_as text NOT NULL
        CONSTRAINT requester_author_is_1_to_1000_characters CHECK (char_length(requested_as) BETWEEN 1 AND 1000),
    because text CONSTRAINT approval_reason_is_at_most_1000_characters CHECK (char_length(because) <= 1000),
    -- NULL: pending or expired.
    decided_at timestamptz,
    decided_by text CONSTRAINT approver_is_1_to_1000_characters CHECK (char_length(decided_by) BETWEEN 1 AND 1000),
    decided_role text CONSTRAINT approver_role_is_known CHECK (decided_role IN ('viewer', 'operator', 'admin')),
    decided_path text CONSTRAINT approver_path_is_known CHECK (decided_path IN ('user', 'proxy', 'os')),
    decided_because text
        CONSTRAINT decision_reason_is_at_most_1000_characters CHECK (char_length(decided_because) <= 1000),
    -- The batch that an approval began.
    batch text,
    CONSTRAINT decided_approval_names_a_person CHECK (
        (state IN ('pending', 'expired')) = (decided_at IS NULL) AND (decided_at IS NULL) = (decided_by IS NULL)),
    CONSTRAINT instants_are_finite CHECK (
        least(requested_at, expires_at, decided_at) >= '0001-01-01 00:00:00+00'
        AND greatest(requested_at, expires_at, decided_at) < '9999-12-30 22:00:00+00')
);
-- The same action is requested once at a time.
CREATE UNIQUE INDEX pending_approvals_once ON pending_approvals (digest) WHERE state = 'pending';
CREATE INDEX pending_approvals_by_end ON pending_approvals (state, expires_at);
