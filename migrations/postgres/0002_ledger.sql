-- The ledger: one row for each job, one for each request sent, and the backlog. Events are in 0017.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The text fields of a job. PostgreSQL evaluates all CHECKs of a table at every update, but those of a domain only when
-- its column is written: a job's steps do not pay for them. A length is checked beside its regular expression, because
-- a bounded repetition such as {1,64} costs twenty times as much.
CREATE DOMAIN job_id AS text COLLATE "C"
    CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64);
CREATE DOMAIN job_provider AS text COLLATE "C"
    CONSTRAINT job_provider_is_a_provider_name CHECK (VALUE ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(VALUE) <= 63);
CREATE DOMAIN job_idempotency_key AS text COLLATE "C"
    CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64);
CREATE DOMAIN job_currency AS text COLLATE "C"
    CONSTRAINT currency_is_3_capital_letters CHECK (VALUE ~ '^[A-Z]+$' AND char_length(VALUE) = 3);
CREATE DOMAIN job_account AS text COLLATE "C"
    CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (VALUE ~ '^[A-Za-z0-9_-]+$' AND char_length(VALUE) <= 64);

CREATE TABLE jobs (
    -- What the payment is.
    id job_id NOT NULL PRIMARY KEY,
    -- No foreign key: a payment outlives its provider's row.
    provider job_provider NOT NULL,
    -- The effective key: the id itself unless one was given.
    idempotency_key job_idempotency_key NOT NULL,
    key_given boolean NOT NULL,
    content_hash bytea NOT NULL CONSTRAINT content_hash_is_32_bytes CHECK (octet_length(content_hash) = 32),
    amount bigint NOT NULL CONSTRAINT amount_is_above_0 CHECK (amount > 0),
    currency job_currency NOT NULL,
    account job_account,
    reference text COLLATE "C" CONSTRAINT reference_is_at_most_255_characters CHECK (char_length(reference) <= 255),
    cost bigint NOT NULL CONSTRAINT cost_is_1_to_1000 CHECK (cost BETWEEN 1 AND 1000),
    priority bigint NOT NULL CONSTRAINT priority_is_0_to_9 CHECK (priority BETWEEN 0 AND 9),
    not_before timestamptz,
    expires_at timestamptz,
    -- A JSON object exactly as the producer wrote it; emptied (NULL) when the job is scrubbed. Not a JSON
    -- type, which would lose the formatting; the reader of messages has checked it.
    payload text COLLATE "C",

    -- How far it is.
    state text COLLATE "C" NOT NULL
        CONSTRAINT state_is_known CHECK (state IN ('waiting', 'sending', 'unknown', 'succeeded', 'declined', 'dead',
                                                   'expired', 'review', 'cancelled')),
    -- Why it ended, or an operator's words.
    reason text COLLATE "C",
    wake_at timestamptz NOT NULL,
    attempts bigint NOT NULL DEFAULT 0 CONSTRAINT attempts_is_0_or_more CHECK (attempts >= 0),
    last_attempt bigint NOT NULL DEFAULT 0 CONSTRAINT last_attempt_is_0_or_more CHECK (last_attempt >= 0),
    lookups bigint NOT NULL DEFAULT 0 CONSTRAINT lookups_is_0_or_more CHECK (lookups >= 0),
    -- Whether a look-up without a result has allowed one more request, and whether that may have been sent.
    resend text COLLATE "C" CONSTRAINT resend_is_granted_or_used CHECK (resend IN ('granted', 'used')),
    -- Some attempt's outcome was unknown. Only an operator's decision clears this.
    maybe_charged boolean NOT NULL DEFAULT false,
    provider_reference text COLLATE "C",
    -- ISO 4217 minor units, where another sum than `amount` was charged.
    charged_amount bigint CONSTRAINT charged_amount_is_1_or_more CHECK (charged_amount >= 1),

    -- The lease: a worker process may write on the job until its row of `workers` is gone, or the fence is higher.
    fence bigint NOT NULL CONSTRAINT fence_is_0_or_more CHECK (fence >= 0),
    holder text COLLATE "C",
    -- While a request may be at the provider, or its response under way: the instant until when the response may come.
    response_by timestamptz,
    -- Consecutive workers that were lost while the job was active, before they began a request for it.
    lost_holders bigint NOT NULL DEFAULT 0 CONSTRAINT lost_holders_is_0_or_more CHECK (lost_holders >= 0),

    -- The time of the first byte of the first request that may have been sent, and the number of that attempt.
    first_sent_at timestamptz,
    first_sent_number bigint,
    -- The frozen request of the first attempt; later attempts send the same.
    frozen_method text COLLATE "C",
    frozen_url text COLLATE "C",
    frozen_key text COLLATE "C",
    frozen_content_type text COLLATE "C",
    frozen_body bytea,
    frozen_account text COLLATE "C",
    frozen_fingerprint text COLLATE "C",
    -- The sum that the body has: units of which 10^frozen_decimals are one of the currency.
    frozen_units bigint CONSTRAINT frozen_units_is_1_or_more CHECK (frozen_units >= 1),
    frozen_decimals bigint CONSTRAINT frozen_decimals_is_0_to_6 CHECK (frozen_decimals BETWEEN 0 AND 6),

    -- Why the job waits, or waited last: the statement that delays it writes this, and later ones keep it. The codes are
    -- those of `WaitReason` in src/domain/wait_reason.rs. Only human readers read the detail.
    wait_reason text COLLATE "C" CONSTRAINT wait_reason_is_known CHECK (wait_reason IN (
        'not_before', 'egress', 'limit', 'cost_exceeds_limit', 'account_blocked', 'provider_paused', 'throttled',
        'limiter_cold', 'needs_history', 'limiter_unavailable', 'stale_settings', 'circuit_open', 'circuit_probing',
        'operator_paused', 'quota_closed', 'misconfigured', 'rejected_streak', 'unbuildable', 'local_fault',
        'object_busy', 'in_progress', 'outcome_unknown', 'lookup', 'resend', 'retry', 'permit_missed',
        'ledger_unavailable', 'ledger_refused', 'worker_lost', 'lane_held'
    )),
    wait_limit text COLLATE "C",
    wait_detail text COLLATE "C",
    wait_since timestamptz,
    wait_until timestamptz,
    -- The number of the request that it waits to send: delays for one reason before one request are one wait.
    wait_request bigint,
    -- A change of a limit wakes the jobs whose wait for it began before. Instants that every claim changes do not show
    -- that.
    wait_begun_at timestamptz,

    -- The order of recording: first in, first out within a flow. No role needs a right to the sequence of an identity.
    seq bigint GENERATED ALWAYS AS IDENTITY,
    -- The job is due and may be claimed by a dispatcher. An open job that is neither here nor has a holder sleeps until
    -- `wake_at`.
    backlog boolean NOT NULL DEFAULT false,
    -- A claimed job of a lane that keeps an account's order: no later job of its account is claimed while this one is
    -- undecided and not in the backlog.
    in_order boolean NOT NULL DEFAULT false,

    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    -- When an operator last sent the job again: its age counts from then.
    revived_at timestamptz,
    -- When payload and request body were emptied.
    scrubbed_at timestamptz,

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
        CHECK (num_nulls(frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_fingerprint,
                         frozen_units, frozen_decimals)
               IN (0, 8) AND (frozen_account IS NULL OR frozen_method IS NOT NULL)),
    CONSTRAINT wait_limit_is_named_by_its_reason CHECK (
        (wait_limit IS NOT NULL) = coalesce(wait_reason IN ('limit', 'cost_exceeds_limit'), false)),
    CONSTRAINT backlog_has_no_holder CHECK (NOT backlog OR holder IS NULL),
    CONSTRAINT open_jobs_are_not_scrubbed
        CHECK (scrubbed_at IS NULL OR state NOT IN ('waiting', 'sending', 'unknown')),
    CONSTRAINT instants_are_finite CHECK (
        least(not_before, expires_at, wake_at, response_by, first_sent_at, created_at, updated_at, scrubbed_at,
              revived_at, wait_since, wait_until, wait_begun_at) >= '0001-01-01 00:00:00+00'
        AND greatest(not_before, expires_at, wake_at, response_by, first_sent_at, created_at, updated_at, scrubbed_at,
              revived_at, wait_since, wait_until, wait_begun_at) < '9999-12-30 22:00:00+00')
);

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

-- One message could expand into a request of gigabytes and kill each worker that claims it. The stored request is
-- bounded (src/domain/expansion.rs). Triggers, because a CHECK would run at each step of a job.
CREATE FUNCTION jobs_refuse_what_is_too_large() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME,
        MESSAGE = format('a row of jobs violates constraint "%s"', TG_NAME);
END $$;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib
    BEFORE INSERT OR UPDATE OF frozen_body, frozen_url ON jobs
    FOR EACH ROW WHEN (octet_length(NEW.frozen_body) > 1048576 OR octet_length(NEW.frozen_url) > 8192)
    EXECUTE FUNCTION jobs_refuse_what_is_too_large();
CREATE TRIGGER payload_is_at_most_64_kib
    BEFORE INSERT OR UPDATE OF payload ON jobs
    FOR EACH ROW WHEN (octet_length(NEW.payload) > 65536)
    EXECUTE FUNCTION jobs_refuse_what_is_too_large();

CREATE FUNCTION jobs_refuse_change_of_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'content_never_changes',
        MESSAGE = 'what a payment is never changes: publish a new payment';
END $$;
-- The personal data of a payment may be emptied once it has ended.
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    FOR EACH ROW WHEN (
        (NEW.id, NEW.provider, NEW.idempotency_key, NEW.key_given, NEW.content_hash, NEW.amount, NEW.currency, NEW.cost,
         NEW.priority, NEW.not_before, NEW.expires_at)
        IS DISTINCT FROM
        (OLD.id, OLD.provider, OLD.idempotency_key, OLD.key_given, OLD.content_hash, OLD.amount, OLD.currency, OLD.cost,
         OLD.priority, OLD.not_before, OLD.expires_at)
        OR (NEW.account IS DISTINCT FROM OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS DISTINCT FROM OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS DISTINCT FROM OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown'))))
    EXECUTE FUNCTION jobs_refuse_change_of_content();

-- There are two exceptions. As long as no request can have charged, the next one may have another credential. Once the
-- payment has ended, its body, URL and account may be emptied: they may hold personal data.
CREATE FUNCTION jobs_refuse_change_of_frozen_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT OLD.maybe_charged AND OLD.state = 'waiting' AND NEW.state = 'sending'
       AND (NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_body,
            NEW.frozen_account, NEW.frozen_units, NEW.frozen_decimals)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_body,
            OLD.frozen_account, OLD.frozen_units, OLD.frozen_decimals)
    THEN
        RETURN NEW;
    END IF;
    IF NEW.state NOT IN ('waiting', 'sending', 'unknown') AND NEW.frozen_url = '' AND NEW.frozen_body = ''
       AND (NEW.frozen_account IS NULL OR NEW.frozen_account IS NOT DISTINCT FROM OLD.frozen_account)
       AND (NEW.frozen_method, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_fingerprint, NEW.frozen_units,
            NEW.frozen_decimals)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_fingerprint, OLD.frozen_units,
            OLD.frozen_decimals)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'frozen_request_never_changes',
        MESSAGE = 'the frozen request of a job never changes';
END $$;
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint, frozen_units, frozen_decimals ON jobs
    FOR EACH ROW WHEN (
        OLD.frozen_method IS NOT NULL
        AND ((NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_account,
              NEW.frozen_fingerprint, NEW.frozen_units, NEW.frozen_decimals)
             IS DISTINCT FROM
             (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_account,
              OLD.frozen_fingerprint, OLD.frozen_units, OLD.frozen_decimals)
             OR (NEW.frozen_body IS DISTINCT FROM OLD.frozen_body
                 AND NOT (NEW.frozen_body = '' AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))))
    EXECUTE FUNCTION jobs_refuse_change_of_frozen_request();

CREATE TABLE attempts (
    job_id text COLLATE "C" NOT NULL REFERENCES jobs (id),
    number bigint NOT NULL CONSTRAINT attempt_number_is_1_or_more CHECK (number >= 1),
    provider text COLLATE "C" NOT NULL,
    -- A look-up is a request like any other: it has a row, and it counts at the provider.
    kind text COLLATE "C" NOT NULL DEFAULT 'charge'
        CONSTRAINT kind_is_charge_or_lookup CHECK (kind IN ('charge', 'lookup')),
    -- A limiter that did not count the uses of an account or a reference asks for just those.
    account text COLLATE "C",
    reference text COLLATE "C",
    began_at timestamptz NOT NULL,
    ended_at timestamptz,
    outcome text COLLATE "C"
        CONSTRAINT outcome_is_a_short_word CHECK (outcome ~ '^[a-z_]+$' AND char_length(outcome) <= 32),
    status bigint CONSTRAINT status_is_100_to_999 CHECK (status BETWEEN 100 AND 999),
    detail text COLLATE "C",
    counted boolean,
    PRIMARY KEY (job_id, number),
    CONSTRAINT attempt_end_is_whole_or_absent
        CHECK ((ended_at IS NULL) = (outcome IS NULL) AND (ended_at IS NULL) = (counted IS NULL)),
    CONSTRAINT instants_are_finite CHECK (
        least(began_at, ended_at) >= '0001-01-01 00:00:00+00'
        AND greatest(began_at, ended_at) < '9999-12-30 22:00:00+00')
);
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

-- The reference of an attempt is emptied when no window counts it any more, and never replaced by another.
CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON attempts
    FOR EACH ROW WHEN (NEW.reference IS NOT NULL AND NEW.reference IS DISTINCT FROM OLD.reference)
    EXECUTE FUNCTION jobs_refuse_change_of_content();

-- How often a provider has refused single payments as such (address, method, credential), or their requests could not be
-- built. docs/failures.md.
CREATE TABLE payment_refusals (
    job_id text COLLATE "C" NOT NULL PRIMARY KEY REFERENCES jobs (id),
    -- All under this version of the provider's row.
    refusals bigint NOT NULL CONSTRAINT refusals_are_1_or_more CHECK (refusals >= 1),
    -- The first one, and each before which another payment of its account has passed since the last one.
    alone bigint NOT NULL CONSTRAINT alone_is_1_or_more CHECK (alone >= 1),
    row_version bigint NOT NULL,
    refused_at timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        refused_at >= '0001-01-01 00:00:00+00' AND refused_at < '9999-12-30 22:00:00+00')
);

CREATE TABLE rejected_messages (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    lane text COLLATE "C" NOT NULL CONSTRAINT lane_is_a_provider_name CHECK (lane ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    -- The id in the message, if it could be read.
    job_id text COLLATE "C" CONSTRAINT rejected_job_id_is_at_most_255_characters CHECK (char_length(job_id) <= 255),
    reason text COLLATE "C" NOT NULL CONSTRAINT rejected_reason_is_a_short_word CHECK (reason ~ '^[a-z_]{1,32}$'),
    detail text COLLATE "C" NOT NULL,
    body_sha256 bytea NOT NULL CONSTRAINT body_sha256_is_32_bytes CHECK (octet_length(body_sha256) = 32),
    body_bytes bigint NOT NULL CONSTRAINT body_bytes_is_0_or_more CHECK (body_bytes >= 0),
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
-- `jobs explain` searches the rejected messages of an id. A producer's mistake may have caused a million of them.
CREATE INDEX rejected_messages_by_job ON rejected_messages (job_id) WHERE job_id IS NOT NULL;

-- The backlog of a lane: jobs that wait in the ledger alone, and the order in which they leave it. A flow is the jobs
-- of one account, or without an account (''), with one class on one lane.
CREATE TABLE flows (
    -- No foreign key: a flow outlives its provider's row as its jobs do.
    provider text COLLATE "C" NOT NULL CONSTRAINT flow_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    -- 0: the outcome is unknown; otherwise 10 minus the priority.
    class bigint NOT NULL CONSTRAINT class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    account text COLLATE "C" NOT NULL CONSTRAINT flow_account_is_0_to_64_of_letters_digits_underscore_dash
        CHECK (account ~ '^[A-Za-z0-9_-]*$' AND char_length(account) <= 64),
    -- Start-time fair queueing: millionths of cost / weight.
    tag bigint NOT NULL DEFAULT 0 CONSTRAINT tag_is_0_or_more CHECK (tag >= 0),
    weight bigint NOT NULL DEFAULT 1 CONSTRAINT weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- Jobs in the backlog.
    waiting bigint NOT NULL DEFAULT 0 CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    -- For the indexes: a change of `waiting` alone writes none of them.
    queued boolean NOT NULL GENERATED ALWAYS AS (waiting > 0) STORED,
    blocked_until timestamptz,
    blocked_reason text COLLATE "C" CONSTRAINT blocked_reason_is_known
        CHECK (blocked_reason IN ('limit', 'account_blocked', 'misconfigured', 'rejected_streak')),
    -- The limit that is meant.
    blocked_limit text COLLATE "C"
        CONSTRAINT blocked_limit_is_at_most_255_characters CHECK (char_length(blocked_limit) <= 255),
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
    provider text COLLATE "C" NOT NULL CONSTRAINT clock_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    class bigint NOT NULL CONSTRAINT clock_class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    virtual_time bigint NOT NULL CONSTRAINT virtual_time_is_0_or_more CHECK (virtual_time >= 0),
    PRIMARY KEY (provider, class)
) WITH (fillfactor = 50);

-- One process at a time claims from a lane's backlog: the one that locks this row. The number changes with each claim.
CREATE TABLE flow_turns (
    provider text COLLATE "C" NOT NULL PRIMARY KEY CONSTRAINT turn_provider_is_a_provider_name
        CHECK (provider ~ '^[a-z0-9][a-z0-9_-]*$' AND char_length(provider) <= 63),
    claims bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Whatever ends a job in the backlog, changes its state there or claims it, takes it out, also if the statement does not
-- say so. The program's own statements do.
CREATE FUNCTION jobs_leave_backlog() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.backlog := false;
    RETURN NEW;
END $$;
CREATE TRIGGER leave_backlog BEFORE UPDATE OF state, holder ON jobs
    FOR EACH ROW WHEN (OLD.backlog AND NEW.backlog AND (NEW.state <> OLD.state OR NEW.holder IS NOT NULL))
    EXECUTE FUNCTION jobs_leave_backlog();

-- Counts a job that left the backlog without a claim: a claim, which takes a lease, counts by itself. With the owner's
-- rights, because a deferred trigger runs as the session's user, who may have no right to the flows.
CREATE FUNCTION jobs_uncount_backlog() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE flows SET waiting = greatest(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
    RETURN NULL;
END $$;
-- At the end of the transaction: an operator's open transaction does not hold up the other jobs of the flow.
CREATE CONSTRAINT TRIGGER uncount_backlog AFTER UPDATE OF state, backlog ON jobs DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (OLD.backlog AND NOT NEW.backlog AND NEW.holder IS NULL)
    EXECUTE FUNCTION jobs_uncount_backlog();
CREATE CONSTRAINT TRIGGER uncount_deleted AFTER DELETE ON jobs DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (OLD.backlog)
    EXECUTE FUNCTION jobs_uncount_backlog();

REVOKE ALL ON FUNCTION
    jobs_refuse_change_of_content(), jobs_refuse_change_of_frozen_request(), jobs_leave_backlog(),
    jobs_uncount_backlog()
FROM PUBLIC;
