-- The ledger: one row for each job, one for each request sent, and the backlog. Events are in 0017.

CREATE TABLE jobs (
    -- What the payment is.
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(id) BETWEEN 1 AND 64 AND id NOT GLOB '*[^A-Za-z0-9_-]*'),
    -- No foreign key: a payment outlives its provider's row.
    provider TEXT NOT NULL
        CONSTRAINT job_provider_is_a_provider_name
            CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    -- The effective key: the id itself unless one was given.
    idempotency_key TEXT NOT NULL
        CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(idempotency_key) BETWEEN 1 AND 64 AND idempotency_key NOT GLOB '*[^A-Za-z0-9_-]*'),
    key_given INTEGER NOT NULL CONSTRAINT key_given_is_0_or_1 CHECK (key_given IN (0, 1)),
    content_hash BLOB NOT NULL CONSTRAINT content_hash_is_32_bytes CHECK (length(content_hash) = 32),
    amount INTEGER NOT NULL CONSTRAINT amount_is_above_0 CHECK (amount > 0),
    currency TEXT NOT NULL CONSTRAINT currency_is_3_capital_letters CHECK (currency GLOB '[A-Z][A-Z][A-Z]'),
    account TEXT CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (length(account) BETWEEN 1 AND 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    reference TEXT CONSTRAINT reference_is_at_most_255_characters CHECK (length(reference) <= 255),
    cost INTEGER NOT NULL CONSTRAINT cost_is_1_to_1000 CHECK (cost BETWEEN 1 AND 1000),
    priority INTEGER NOT NULL CONSTRAINT priority_is_0_to_9 CHECK (priority BETWEEN 0 AND 9),
    not_before INTEGER,
    expires_at INTEGER,
    -- A JSON object exactly as the producer wrote it; emptied (NULL) when the job is scrubbed. Not a JSON
    -- type, which would lose the formatting; the reader of messages has checked it.
    payload TEXT,

    -- How far it is.
    state TEXT NOT NULL
        CONSTRAINT state_is_known CHECK (state IN ('waiting', 'sending', 'unknown', 'succeeded', 'declined', 'dead',
                                                   'expired', 'review', 'cancelled')),
    -- Why it ended, or an operator's words.
    reason TEXT,
    wake_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0 CONSTRAINT attempts_is_0_or_more CHECK (attempts >= 0),
    last_attempt INTEGER NOT NULL DEFAULT 0 CONSTRAINT last_attempt_is_0_or_more CHECK (last_attempt >= 0),
    lookups INTEGER NOT NULL DEFAULT 0 CONSTRAINT lookups_is_0_or_more CHECK (lookups >= 0),
    -- Whether a look-up without a result has allowed one more request, and whether that may have been sent.
    resend TEXT CONSTRAINT resend_is_granted_or_used CHECK (resend IN ('granted', 'used')),
    -- Some attempt's outcome was unknown. Only an operator's decision clears this.
    maybe_charged INTEGER NOT NULL DEFAULT 0 CONSTRAINT maybe_charged_is_0_or_1 CHECK (maybe_charged IN (0, 1)),
    provider_reference TEXT,
    -- ISO 4217 minor units, where another sum than `amount` was charged.
    charged_amount INTEGER CONSTRAINT charged_amount_is_1_or_more CHECK (charged_amount >= 1),

    -- The lease: a worker process may write on the job until its row of `workers` is gone, or the fence is higher.
    fence INTEGER NOT NULL CONSTRAINT fence_is_0_or_more CHECK (fence >= 0),
    holder TEXT,
    -- While a request may be at the provider, or its response under way: the instant until when the response may come.
    response_by INTEGER,
    -- Consecutive workers that were lost while the job was active, before they began a request for it.
    lost_holders INTEGER NOT NULL DEFAULT 0 CONSTRAINT lost_holders_is_0_or_more CHECK (lost_holders >= 0),

    -- The time of the first byte of the first request that may have been sent, and the number of that attempt.
    first_sent_at INTEGER,
    first_sent_number INTEGER,
    -- The frozen request of the first attempt; later attempts send the same.
    frozen_method TEXT,
    frozen_url TEXT,
    frozen_key TEXT,
    frozen_content_type TEXT,
    frozen_body BLOB,
    frozen_account TEXT,
    frozen_fingerprint TEXT,
    -- The sum that the body has: units of which 10^frozen_decimals are one of the currency.
    frozen_units INTEGER CONSTRAINT frozen_units_is_1_or_more CHECK (frozen_units >= 1),
    frozen_decimals INTEGER CONSTRAINT frozen_decimals_is_0_to_6 CHECK (frozen_decimals BETWEEN 0 AND 6),

    -- Why the job waits, or waited last: the statement that delays it writes this, and later ones keep it. The codes are
    -- those of `WaitReason` in src/domain/wait_reason.rs. Only human readers read the detail.
    wait_reason TEXT CONSTRAINT wait_reason_is_known CHECK (wait_reason IN (
        'not_before', 'egress', 'limit', 'cost_exceeds_limit', 'account_blocked', 'provider_paused', 'throttled',
        'limiter_cold', 'needs_history', 'limiter_unavailable', 'stale_settings', 'circuit_open', 'circuit_probing',
        'operator_paused', 'quota_closed', 'misconfigured', 'rejected_streak', 'unbuildable', 'local_fault',
        'object_busy', 'in_progress', 'outcome_unknown', 'lookup', 'resend', 'retry', 'permit_missed',
        'ledger_unavailable', 'ledger_refused', 'worker_lost', 'lane_held'
    )),
    wait_limit TEXT,
    wait_detail TEXT,
    wait_since INTEGER,
    wait_until INTEGER,
    -- The number of the request that it waits to send: delays for one reason before one request are one wait.
    wait_request INTEGER,
    -- A change of a limit wakes the jobs whose wait for it began before. Instants that every claim changes do not show
    -- that.
    wait_begun_at INTEGER,

    -- The order of recording: first in, first out within a flow. Set by a trigger.
    seq INTEGER NOT NULL DEFAULT 0,
    -- The job is due and may be claimed by a dispatcher. An open job that is neither here nor has a holder sleeps until
    -- `wake_at`.
    backlog INTEGER NOT NULL DEFAULT 0 CONSTRAINT backlog_is_0_or_1 CHECK (backlog IN (0, 1)),
    -- A claimed job of a lane that keeps an account's order: no later job of its account is claimed while this one is
    -- undecided and not in the backlog.
    in_order INTEGER NOT NULL DEFAULT 0 CONSTRAINT in_order_is_0_or_1 CHECK (in_order IN (0, 1)),

    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    -- When an operator last sent the job again: its age counts from then.
    revived_at INTEGER,
    -- When payload and request body were emptied.
    scrubbed_at INTEGER,

    CONSTRAINT jobs_one_payment_per_provider_and_key UNIQUE (provider, idempotency_key),
    CONSTRAINT request_in_flight_has_a_holder CHECK (response_by IS NULL OR holder IS NOT NULL),
    CONSTRAINT final_states_have_no_holder CHECK (state IN ('waiting', 'sending', 'unknown') OR holder IS NULL),
    CONSTRAINT maybe_charged_is_never_waiting_dead_expired_or_cancelled
        CHECK (NOT (maybe_charged AND state IN ('waiting', 'dead', 'expired', 'cancelled'))),
    CONSTRAINT unknown_is_maybe_charged CHECK (state <> 'unknown' OR maybe_charged),
    CONSTRAINT sending_and_unknown_have_a_frozen_request
        CHECK (state NOT IN ('sending', 'unknown') OR (frozen_method IS NOT NULL AND first_sent_at IS NOT NULL)),
    CONSTRAINT first_sent_is_whole_or_absent CHECK ((first_sent_at IS NULL) = (first_sent_number IS NULL)),
    CONSTRAINT frozen_request_is_whole_or_absent
        CHECK ((frozen_method IS NULL) + (frozen_url IS NULL) + (frozen_key IS NULL) + (frozen_content_type IS NULL)
               + (frozen_body IS NULL) + (frozen_fingerprint IS NULL) + (frozen_units IS NULL)
               + (frozen_decimals IS NULL) IN (0, 8)
               AND (frozen_account IS NULL OR frozen_method IS NOT NULL)),
    CONSTRAINT wait_limit_is_named_by_its_reason CHECK (
        (wait_limit IS NOT NULL) = coalesce(wait_reason IN ('limit', 'cost_exceeds_limit'), false)),
    CONSTRAINT backlog_has_no_holder CHECK (NOT backlog OR holder IS NULL),
    CONSTRAINT open_jobs_are_not_scrubbed
        CHECK (scrubbed_at IS NULL OR state NOT IN ('waiting', 'sending', 'unknown'))
) STRICT;

-- Indexes. Most are partial: a payment that does not wait, and one that has ended, costs them nothing.

-- For status, and to find requests in flight at a provider.
CREATE INDEX jobs_by_provider_and_state ON jobs (provider, state);
-- Payments are searched by account.
CREATE INDEX jobs_by_account ON jobs (account, id) WHERE account IS NOT NULL;
-- A provider's reference is one charge: no two payments succeed by it. It comes first, because a reference is unique at
-- one provider only. The provider is written as in the query, so that no other index fits, whatever the statistics say.
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider_reference, (provider || '')) WHERE state = 'succeeded';
-- Open jobs of a lane, longest due first.
CREATE INDEX jobs_open_by_wake ON jobs (provider, wake_at) WHERE state IN ('waiting', 'sending', 'unknown');
-- Jobs that sleep until an instant, and those that a dispatcher has claimed and not sent.
CREATE INDEX jobs_out_of_backlog ON jobs (provider, wake_at) WHERE state IN ('waiting', 'unknown') AND NOT backlog;
CREATE INDEX jobs_waiting_by_expiry ON jobs (expires_at) WHERE state = 'waiting' AND expires_at IS NOT NULL;
-- Jobs that a limit has delayed, and those that a provider's named wait has delayed: both may be woken early.
CREATE INDEX jobs_waiting_for_limits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND wait_reason IN ('limit', 'cost_exceeds_limit');
CREATE INDEX jobs_waiting_for_providers ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND wait_reason IN ('provider_paused', 'throttled');
-- The jobs of a flow that wait in the backlog, first in first.
CREATE INDEX jobs_in_backlog ON jobs
    (provider, (CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END), (COALESCE(account, '')), seq) WHERE backlog;
-- The claimed jobs of lanes that keep an account's order.
CREATE INDEX jobs_in_order ON jobs (provider, account)
    WHERE in_order AND NOT backlog AND state IN ('waiting', 'sending', 'unknown', 'review');
-- Finished jobs in the order of their finish: jobs to be scrubbed at the front, recent ones at the end.
CREATE INDEX jobs_finished_by_update ON jobs (updated_at)
    WHERE scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled');
CREATE INDEX jobs_in_review_by_update ON jobs (updated_at) WHERE state = 'review';

CREATE TRIGGER instants_are_finite_of_jobs_on_insert
    BEFORE INSERT ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.response_by NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_jobs
    BEFORE UPDATE OF not_before, expires_at, wake_at, response_by, first_sent_at, created_at, updated_at, scrubbed_at,
    revived_at, wait_since, wait_until, wait_begun_at ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.response_by NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- One message could expand into a request of gigabytes and kill each worker that claims it. The stored request is
-- bounded (src/domain/expansion.rs).
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib BEFORE UPDATE OF frozen_body, frozen_url ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib BEFORE UPDATE OF payload ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;

-- The personal data of a payment may be emptied once it has ended.
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    WHEN NEW.id <> OLD.id OR NEW.provider <> OLD.provider OR NEW.idempotency_key <> OLD.idempotency_key
        OR NEW.key_given <> OLD.key_given OR NEW.content_hash <> OLD.content_hash OR NEW.amount <> OLD.amount
        OR NEW.currency <> OLD.currency OR NEW.cost <> OLD.cost OR NEW.priority <> OLD.priority
        OR NEW.not_before IS NOT OLD.not_before OR NEW.expires_at IS NOT OLD.expires_at
        OR (NEW.account IS NOT OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS NOT OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS NOT OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;

-- There are two exceptions. As long as no request can have charged, the next one may have another credential. Once the
-- payment has ended, its body, URL and account may be emptied: they may hold personal data.
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint, frozen_units, frozen_decimals ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method
             OR NEW.frozen_units IS NOT OLD.frozen_units OR NEW.frozen_decimals IS NOT OLD.frozen_decimals
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR (NEW.frozen_account IS NOT OLD.frozen_account
                 AND NOT (NEW.frozen_account IS NULL AND NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
             OR (NEW.frozen_fingerprint IS NOT OLD.frozen_fingerprint
                 AND (OLD.maybe_charged OR OLD.state <> 'waiting' OR NEW.state <> 'sending'))
             OR (NEW.frozen_url IS NOT OLD.frozen_url
                 AND NOT (NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
             OR (NEW.frozen_body IS NOT OLD.frozen_body
                 AND NOT (length(NEW.frozen_body) = 0 AND NEW.state NOT IN ('waiting', 'sending', 'unknown'))))
BEGIN
    SELECT raise(ABORT, 'the frozen request of a job never changes');
END;

-- Jobs are never deleted by the program, so the number of the row rises.
CREATE TRIGGER jobs_get_a_sequence_number AFTER INSERT ON jobs
BEGIN
    UPDATE jobs SET seq = NEW.rowid WHERE rowid = NEW.rowid;
END;
CREATE TRIGGER seq_never_changes BEFORE UPDATE OF seq ON jobs WHEN OLD.seq <> 0 AND NEW.seq <> OLD.seq
BEGIN
    SELECT raise(ABORT, 'seq never changes: a constraint of jobs');
END;

CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL CONSTRAINT attempt_number_is_1_or_more CHECK (number >= 1),
    provider TEXT NOT NULL,
    -- A look-up is a request like any other: it has a row, and it counts at the provider.
    kind TEXT NOT NULL DEFAULT 'charge' CONSTRAINT kind_is_charge_or_lookup CHECK (kind IN ('charge', 'lookup')),
    -- A limiter that did not count the uses of an account or a reference asks for just those.
    account TEXT,
    reference TEXT,
    began_at INTEGER NOT NULL,
    ended_at INTEGER,
    outcome TEXT CONSTRAINT outcome_is_a_short_word
        CHECK (length(outcome) BETWEEN 1 AND 32 AND outcome NOT GLOB '*[^a-z_]*'),
    status INTEGER CONSTRAINT status_is_100_to_999 CHECK (status BETWEEN 100 AND 999),
    detail TEXT,
    counted INTEGER CONSTRAINT counted_is_0_or_1 CHECK (counted IN (0, 1)),
    PRIMARY KEY (job_id, number),
    CONSTRAINT attempt_end_is_whole_or_absent
        CHECK ((ended_at IS NULL) = (outcome IS NULL) AND (ended_at IS NULL) = (counted IS NULL))
) STRICT;
-- For rebuilding the limiter's state: the youngest end of each provider.
CREATE INDEX attempts_by_provider_and_end ON attempts (provider, ended_at);
-- 429s, for their count and the pace that gets through. The condition is written exactly as in the statements.
CREATE INDEX attempts_throttled ON attempts (provider, ended_at)
    WHERE (outcome = 'throttled' OR (outcome = 'unknown' AND status = 429));
CREATE INDEX attempts_by_account ON attempts (provider, account, began_at) WHERE account IS NOT NULL;
CREATE INDEX attempts_by_reference ON attempts (provider, reference, began_at) WHERE reference IS NOT NULL;
-- References that no limit counts any more, oldest first. The condition is written exactly as in the statement that
-- empties them, so that no search for one reference uses this index, whatever the statistics say.
CREATE INDEX attempts_with_a_reference ON attempts (began_at) WHERE (reference || '') IS NOT NULL;
CREATE TRIGGER instants_are_finite_of_attempts_on_insert
    BEFORE INSERT ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_attempts
    BEFORE UPDATE OF began_at, ended_at ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- The reference of an attempt is emptied when no window counts it any more, and never replaced by another.
CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON attempts
    WHEN NEW.reference IS NOT NULL AND NEW.reference IS NOT OLD.reference
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;

-- How often a provider has refused single payments as such (address, method, credential), or their requests could not be
-- built. docs/failures.md.
CREATE TABLE payment_refusals (
    job_id TEXT NOT NULL PRIMARY KEY REFERENCES jobs (id),
    -- All under this version of the provider's row.
    refusals INTEGER NOT NULL CONSTRAINT refusals_are_1_or_more CHECK (refusals >= 1),
    -- The first one, and each before which another payment of its account has passed since the last one.
    alone INTEGER NOT NULL CONSTRAINT alone_is_1_or_more CHECK (alone >= 1),
    row_version INTEGER NOT NULL,
    refused_at INTEGER NOT NULL
) STRICT;
CREATE TRIGGER instants_are_finite_of_payment_refusals_on_insert
    BEFORE INSERT ON payment_refusals
    WHEN NEW.refused_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_payment_refusals
    BEFORE UPDATE OF refused_at ON payment_refusals
    WHEN NEW.refused_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

CREATE TABLE rejected_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    lane TEXT NOT NULL CONSTRAINT lane_is_a_provider_name
        CHECK (lane GLOB '[a-z0-9]*' AND lane NOT GLOB '*[^a-z0-9_-]*' AND length(lane) <= 63),
    -- The id in the message, if it could be read.
    job_id TEXT CONSTRAINT rejected_job_id_is_at_most_255_characters CHECK (length(job_id) <= 255),
    reason TEXT NOT NULL CONSTRAINT rejected_reason_is_a_short_word
        CHECK (length(reason) BETWEEN 1 AND 32 AND reason NOT GLOB '*[^a-z_]*'),
    detail TEXT NOT NULL,
    body_sha256 BLOB NOT NULL CONSTRAINT body_sha256_is_32_bytes CHECK (length(body_sha256) = 32),
    body_bytes INTEGER NOT NULL CONSTRAINT body_bytes_is_0_or_more CHECK (body_bytes >= 0)
) STRICT;
-- `jobs explain` searches the rejected messages of an id. A producer's mistake may have caused a million of them.
CREATE INDEX rejected_messages_by_job ON rejected_messages (job_id) WHERE job_id IS NOT NULL;
CREATE TRIGGER instants_are_finite_of_rejected_messages_on_insert
    BEFORE INSERT ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_rejected_messages
    BEFORE UPDATE OF at ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- The backlog of a lane: jobs that wait in the ledger alone, and the order in which they leave it. A flow is the jobs
-- of one account, or without an account (''), with one class on one lane.
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
CREATE TRIGGER instants_are_finite_of_flows_on_insert BEFORE INSERT ON flows
    WHEN NEW.blocked_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'instants_are_finite: a constraint of flows');
END;
CREATE TRIGGER instants_are_finite_of_flows BEFORE UPDATE OF blocked_until ON flows
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

-- Whatever ends a job in the backlog, or changes its state there, takes it out, also if the statement does not say so.
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
    WHEN OLD.backlog AND NOT NEW.backlog AND NEW.holder IS NULL AND OLD.state IN ('waiting', 'unknown')
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
