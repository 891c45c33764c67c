-- The ledger: one row for each job, one for each request sent, one event for each final state.

CREATE TABLE jobs (
    id text NOT NULL PRIMARY KEY
        CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash CHECK (id ~ '^[A-Za-z0-9_-]{1,64}$'),
    -- No foreign key: a payment outlives its provider's row.
    provider text NOT NULL
        CONSTRAINT job_provider_is_a_provider_name CHECK (provider ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    -- The effective key: the id itself unless one was given.
    idempotency_key text NOT NULL
        CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (idempotency_key ~ '^[A-Za-z0-9_-]{1,64}$'),
    key_given boolean NOT NULL,
    content_hash bytea NOT NULL CONSTRAINT content_hash_is_32_bytes CHECK (octet_length(content_hash) = 32),
    amount bigint NOT NULL CONSTRAINT amount_is_above_0 CHECK (amount > 0),
    currency text NOT NULL CONSTRAINT currency_is_3_capital_letters CHECK (currency ~ '^[A-Z]{3}$'),
    account text CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (account ~ '^[A-Za-z0-9_-]{1,64}$'),
    reference text CONSTRAINT reference_is_at_most_255_characters CHECK (char_length(reference) <= 255),
    cost bigint NOT NULL CONSTRAINT cost_is_1_to_1000 CHECK (cost BETWEEN 1 AND 1000),
    priority bigint NOT NULL CONSTRAINT priority_is_0_to_9 CHECK (priority BETWEEN 0 AND 9),
    not_before timestamptz,
    expires_at timestamptz,
    -- A JSON object exactly as the producer wrote it; emptied (NULL) when the job is scrubbed. Not a JSON
    -- type, which would lose the formatting; the reader of messages has checked it.
    payload text,

    state text NOT NULL
        CONSTRAINT state_is_known CHECK (state IN ('waiting', 'sending', 'unknown', 'succeeded', 'declined', 'dead',
                                                   'expired', 'review', 'cancelled')),
    wake_at timestamptz NOT NULL,
    attempts bigint NOT NULL DEFAULT 0 CONSTRAINT attempts_is_0_or_more CHECK (attempts >= 0),
    last_attempt bigint NOT NULL DEFAULT 0 CONSTRAINT last_attempt_is_0_or_more CHECK (last_attempt >= 0),
    -- Some attempt's outcome was unknown. Only an operator's decision clears this.
    maybe_charged boolean NOT NULL DEFAULT false,
    fence bigint NOT NULL CONSTRAINT fence_is_0_or_more CHECK (fence >= 0),
    lease_owner text,
    lease_until timestamptz,
    -- The time of the first byte of the first request that may have been sent, and the number of that attempt.
    first_sent_at timestamptz,
    first_sent_number bigint,

    -- The frozen request of the first attempt; later attempts send the same.
    frozen_method text,
    frozen_url text,
    frozen_key text,
    frozen_content_type text,
    frozen_body bytea,
    frozen_account text,
    frozen_fingerprint text,

    provider_reference text,
    reason text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,

    CONSTRAINT lease_is_whole_or_absent CHECK ((lease_owner IS NULL) = (lease_until IS NULL)),
    CONSTRAINT final_states_have_no_lease CHECK (state IN ('waiting', 'sending', 'unknown') OR lease_until IS NULL),
    CONSTRAINT maybe_charged_is_never_waiting_dead_expired_or_cancelled
        CHECK (NOT (maybe_charged AND state IN ('waiting', 'dead', 'expired', 'cancelled'))),
    CONSTRAINT unknown_is_maybe_charged CHECK (state <> 'unknown' OR maybe_charged),
    CONSTRAINT sending_and_unknown_have_a_frozen_request
        CHECK (state NOT IN ('sending', 'unknown') OR (frozen_method IS NOT NULL AND first_sent_at IS NOT NULL)),
    CONSTRAINT first_sent_is_whole_or_absent CHECK ((first_sent_at IS NULL) = (first_sent_number IS NULL)),
    CONSTRAINT frozen_request_is_whole_or_absent
        CHECK (num_nulls(frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_fingerprint)
               IN (0, 6) AND (frozen_account IS NULL OR frozen_method IS NOT NULL)),
    CONSTRAINT jobs_one_payment_per_provider_and_key UNIQUE (provider, idempotency_key)
);
-- For status, and to find requests in flight at a provider.
CREATE INDEX jobs_by_provider_and_state ON jobs (provider, state);
-- For the sweeper.
CREATE INDEX jobs_open_by_wake ON jobs (wake_at) WHERE state IN ('waiting', 'sending', 'unknown');

CREATE FUNCTION jobs_refuse_change_of_frozen_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'frozen_request_never_changes',
        MESSAGE = 'the frozen request of a job never changes';
END $$;
-- The body of a finished job may be emptied.
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    FOR EACH ROW WHEN (
        OLD.frozen_method IS NOT NULL
        AND ((NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_account,
              NEW.frozen_fingerprint)
             IS DISTINCT FROM
             (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_account,
              OLD.frozen_fingerprint)
             OR (NEW.frozen_body IS DISTINCT FROM OLD.frozen_body
                 AND NOT (NEW.frozen_body = '' AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))))
    EXECUTE FUNCTION jobs_refuse_change_of_frozen_request();

CREATE TABLE attempts (
    job_id text NOT NULL REFERENCES jobs (id),
    number bigint NOT NULL CONSTRAINT attempt_number_is_1_or_more CHECK (number >= 1),
    provider text NOT NULL,
    began_at timestamptz NOT NULL,
    ended_at timestamptz,
    outcome text CONSTRAINT outcome_is_a_short_word CHECK (outcome ~ '^[a-z_]{1,32}$'),
    status bigint CONSTRAINT status_is_100_to_999 CHECK (status BETWEEN 100 AND 999),
    detail text,
    counted boolean,
    PRIMARY KEY (job_id, number),
    CONSTRAINT attempt_end_is_whole_or_absent
        CHECK ((ended_at IS NULL) = (outcome IS NULL) AND (ended_at IS NULL) = (counted IS NULL))
);
-- For rebuilding the limiter's state: the youngest end of each provider.
CREATE INDEX attempts_by_provider_and_end ON attempts (provider, ended_at);

-- The outbox: written with the final state, published at least once.
CREATE TABLE outcome_events (
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id text NOT NULL REFERENCES jobs (id),
    provider text NOT NULL,
    state text NOT NULL
        CONSTRAINT event_state_is_final
            CHECK (state IN ('succeeded', 'declined', 'dead', 'expired', 'review', 'cancelled')),
    provider_reference text,
    reason text,
    attempts bigint NOT NULL,
    at timestamptz NOT NULL,
    -- A worker is publishing it; others take it after this instant.
    taken_until timestamptz,
    published_at timestamptz
);
CREATE INDEX outcome_events_unpublished ON outcome_events (sequence) WHERE published_at IS NULL;
CREATE INDEX outcome_events_by_job ON outcome_events (job_id);

CREATE TABLE rejected_messages (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    lane text NOT NULL CONSTRAINT lane_is_a_provider_name CHECK (lane ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    -- The id in the message, if it could be read.
    job_id text CONSTRAINT rejected_job_id_is_at_most_255_characters CHECK (char_length(job_id) <= 255),
    reason text NOT NULL CONSTRAINT rejected_reason_is_a_short_word CHECK (reason ~ '^[a-z_]{1,32}$'),
    detail text NOT NULL,
    body_sha256 bytea NOT NULL CONSTRAINT body_sha256_is_32_bytes CHECK (octet_length(body_sha256) = 32),
    body_bytes bigint NOT NULL CONSTRAINT body_bytes_is_0_or_more CHECK (body_bytes >= 0)
);
