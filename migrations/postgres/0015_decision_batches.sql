-- Decisions of operators about many payments: each batch, its payments in their order, and the outcome of each.

-- A worker with the lease applies a batch. It writes each outcome in the transaction of the payment's own change.
CREATE TABLE decision_batches (
    -- A UUID of version 7: a later batch has a larger id.
    id text COLLATE "C" NOT NULL PRIMARY KEY
        CONSTRAINT batch_id_is_32_hex_digits CHECK (char_length(id) = 32 AND id ~ '^[0-9a-f]+$'),
    decision text COLLATE "C" NOT NULL CONSTRAINT batch_decision_is_known
        CHECK (decision IN ('succeeded', 'declined', 'resend', 'cancel', 'replay', 'discard')),
    state text COLLATE "C" NOT NULL DEFAULT 'running'
        CONSTRAINT batch_state_is_known CHECK (state IN ('running', 'stopped', 'finished')),
    -- Payments of the batch, and how many of them have each outcome.
    jobs bigint NOT NULL CONSTRAINT batch_has_a_job CHECK (jobs > 0),
    applied bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0,
    -- Payments per time, N/DURATION.
    rate text COLLATE "C" NOT NULL
        CONSTRAINT batch_rate_is_1_to_40_characters CHECK (char_length(rate) BETWEEN 1 AND 40),
    -- Of the decision, and of the ids and versions of its payments.
    digest text COLLATE "C" NOT NULL
        CONSTRAINT batch_digest_is_64_hex_digits CHECK (char_length(digest) = 64 AND digest ~ '^[0-9a-f]+$'),
    -- Number and sum of the payments by currency, a JSON array.
    sums jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    -- user@host of the operator.
    created_by text COLLATE "C" NOT NULL
        CONSTRAINT batch_author_is_1_to_1000_characters CHECK (char_length(created_by) BETWEEN 1 AND 1000),
    because text COLLATE "C" NOT NULL
        CONSTRAINT batch_reason_is_1_to_1000_characters CHECK (char_length(because) BETWEEN 1 AND 1000),
    -- NULL: it runs.
    finished_at timestamptz,
    stopped_by text COLLATE "C",
    -- The worker that applies it, and until when unless it renews.
    worker text COLLATE "C",
    leased_until timestamptz,
    -- Not before this instant comes the next payment.
    next_at timestamptz NOT NULL,
    CONSTRAINT batch_counts_fit_its_jobs CHECK (applied >= 0 AND refused >= 0 AND applied + refused <= jobs),
    CONSTRAINT instants_are_finite CHECK (
        least(created_at, finished_at, leased_until, next_at) >= '0001-01-01 00:00:00+00'
        AND greatest(created_at, finished_at, leased_until, next_at) < '9999-12-30 22:00:00+00')
);
-- The same set is decided once at a time.
CREATE UNIQUE INDEX decision_batches_running ON decision_batches (digest) WHERE state = 'running';
CREATE INDEX decision_batches_ended ON decision_batches (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE decision_batch_jobs (
    batch text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    job_id text COLLATE "C" NOT NULL,
    -- The payment's fencing token when the batch was confirmed. NULL: workers may change it meanwhile.
    seen_fence bigint,
    -- NULL: its turn has not come.
    outcome text COLLATE "C" CONSTRAINT batch_outcome_is_known CHECK (outcome IN ('applied', 'refused')),
    -- The code of the refusal, and the refusal in words.
    refusal text COLLATE "C" CONSTRAINT refusal_is_at_most_32_characters CHECK (char_length(refusal) <= 32),
    detail text COLLATE "C" CONSTRAINT refusal_detail_is_at_most_1000_characters CHECK (char_length(detail) <= 1000),
    at timestamptz,
    PRIMARY KEY (batch, number),
    CONSTRAINT refusal_is_named CHECK ((outcome IS NOT NULL AND outcome = 'refused') = (refusal IS NOT NULL)),
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
CREATE UNIQUE INDEX decision_batch_jobs_once ON decision_batch_jobs (batch, job_id);
CREATE INDEX decision_batch_jobs_pending ON decision_batch_jobs (batch, number) WHERE outcome IS NULL;
CREATE INDEX decision_batch_jobs_refused ON decision_batch_jobs (batch, number) WHERE outcome = 'refused';

-- How often each refusal occurred, with an example.
CREATE TABLE decision_batch_refusals (
    batch text COLLATE "C" NOT NULL,
    refusal text COLLATE "C" NOT NULL,
    jobs bigint NOT NULL CONSTRAINT refusal_has_a_job CHECK (jobs > 0),
    example text COLLATE "C" NOT NULL,
    detail text COLLATE "C" NOT NULL,
    PRIMARY KEY (batch, refusal)
);
