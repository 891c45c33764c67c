-- The ledger: one row for each job, one for each request sent, one event for each final state.

CREATE TABLE jobs (
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

    state TEXT NOT NULL
        CONSTRAINT state_is_known CHECK (state IN ('waiting', 'sending', 'unknown', 'succeeded', 'declined', 'dead',
                                                   'expired', 'review', 'cancelled')),
    wake_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0 CONSTRAINT attempts_is_0_or_more CHECK (attempts >= 0),
    last_attempt INTEGER NOT NULL DEFAULT 0 CONSTRAINT last_attempt_is_0_or_more CHECK (last_attempt >= 0),
    -- Some attempt's outcome was unknown. Only an operator's decision clears this.
    maybe_charged INTEGER NOT NULL DEFAULT 0 CONSTRAINT maybe_charged_is_0_or_1 CHECK (maybe_charged IN (0, 1)),
    fence INTEGER NOT NULL CONSTRAINT fence_is_0_or_more CHECK (fence >= 0),
    lease_owner TEXT,
    lease_until INTEGER,
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

    provider_reference TEXT,
    reason TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,

    CONSTRAINT lease_is_whole_or_absent CHECK ((lease_owner IS NULL) = (lease_until IS NULL)),
    CONSTRAINT final_states_have_no_lease CHECK (state IN ('waiting', 'sending', 'unknown') OR lease_until IS NULL),
    CONSTRAINT maybe_charged_is_never_waiting_dead_expired_or_cancelled
        CHECK (NOT (maybe_charged AND state IN ('waiting', 'dead', 'expired', 'cancelled'))),
    CONSTRAINT unknown_is_maybe_charged CHECK (state <> 'unknown' OR maybe_charged),
    CONSTRAINT sending_and_unknown_have_a_frozen_request
        CHECK (state NOT IN ('sending', 'unknown') OR (frozen_method IS NOT NULL AND first_sent_at IS NOT NULL)),
    CONSTRAINT first_sent_is_whole_or_absent CHECK ((first_sent_at IS NULL) = (first_sent_number IS NULL)),
    CONSTRAINT frozen_request_is_whole_or_absent
        CHECK ((frozen_method IS NULL) + (frozen_url IS NULL) + (frozen_key IS NULL) + (frozen_content_type IS NULL)
               + (frozen_body IS NULL) + (frozen_fingerprint IS NULL) IN (0, 6)
               AND (frozen_account IS NULL OR frozen_method IS NOT NULL)),
    CONSTRAINT jobs_one_payment_per_provider_and_key UNIQUE (provider, idempotency_key)
) STRICT;
-- For status, and to find requests in flight at a provider.
CREATE INDEX jobs_by_provider_and_state ON jobs (provider, state);
-- For the sweeper.
CREATE INDEX jobs_open_by_wake ON jobs (wake_at) WHERE state IN ('waiting', 'sending', 'unknown');

-- The body of a finished job may be emptied.
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method OR NEW.frozen_url IS NOT OLD.frozen_url
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR NEW.frozen_account IS NOT OLD.frozen_account OR NEW.frozen_fingerprint IS NOT OLD.frozen_fingerprint
             OR (NEW.frozen_body IS NOT OLD.frozen_body
                 AND NOT (length(NEW.frozen_body) = 0 AND NEW.state NOT IN ('waiting', 'sending', 'unknown'))))
BEGIN
    SELECT raise(ABORT, 'the frozen request of a job never changes');
END;

CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL CONSTRAINT attempt_number_is_1_or_more CHECK (number >= 1),
    provider TEXT NOT NULL,
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

-- The outbox: written with the final state, published at least once.
CREATE TABLE outcome_events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    provider TEXT NOT NULL,
    state TEXT NOT NULL
        CONSTRAINT event_state_is_final
            CHECK (state IN ('succeeded', 'declined', 'dead', 'expired', 'review', 'cancelled')),
    provider_reference TEXT,
    reason TEXT,
    attempts INTEGER NOT NULL,
    at INTEGER NOT NULL,
    -- A worker is publishing it; others take it after this instant.
    taken_until INTEGER,
    published_at INTEGER
) STRICT;
CREATE INDEX outcome_events_unpublished ON outcome_events (sequence) WHERE published_at IS NULL;
CREATE INDEX outcome_events_by_job ON outcome_events (job_id);

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
