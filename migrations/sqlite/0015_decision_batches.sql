-- Decisions of operators about many payments: each batch, its payments in their order, and the outcome of each.

-- A worker with the lease applies a batch. It writes each outcome in the transaction of the payment's own change.
CREATE TABLE decision_batches (
    -- A UUID of version 7: a later batch has a larger id.
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT batch_id_is_32_hex_digits CHECK (length(id) = 32 AND id NOT GLOB '*[^0-9a-f]*'),
    decision TEXT NOT NULL CONSTRAINT batch_decision_is_known
        CHECK (decision IN ('succeeded', 'declined', 'resend', 'cancel', 'replay', 'discard')),
    state TEXT NOT NULL DEFAULT 'running'
        CONSTRAINT batch_state_is_known CHECK (state IN ('running', 'stopped', 'finished')),
    -- Payments of the batch, and how many of them have each outcome.
    jobs INTEGER NOT NULL CONSTRAINT batch_has_a_job CHECK (jobs > 0),
    applied INTEGER NOT NULL DEFAULT 0,
    refused INTEGER NOT NULL DEFAULT 0,
    -- Payments per time, N/DURATION.
    rate TEXT NOT NULL CONSTRAINT batch_rate_is_1_to_40_characters CHECK (length(rate) BETWEEN 1 AND 40),
    -- Of the decision, and of the ids and versions of its payments.
    digest TEXT NOT NULL
        CONSTRAINT batch_digest_is_64_hex_digits CHECK (length(digest) = 64 AND digest NOT GLOB '*[^0-9a-f]*'),
    -- Number and sum of the payments by currency, a JSON array.
    sums TEXT NOT NULL CONSTRAINT batch_sums_are_json CHECK (json_valid(sums)),
    created_at INTEGER NOT NULL,
    -- user@host of the operator, as the program says, and the database's user, by a trigger: a file has none.
    person TEXT NOT NULL CONSTRAINT batch_author_is_1_to_1000_characters CHECK (length(person) BETWEEN 1 AND 1000),
    database_user TEXT NOT NULL DEFAULT 'database file',
    because TEXT NOT NULL CONSTRAINT batch_reason_is_1_to_1000_characters CHECK (length(because) BETWEEN 1 AND 1000),
    -- NULL: it runs.
    finished_at INTEGER,
    stopped_by TEXT,
    stopped_database_user TEXT,
    -- The worker that applies it, and until when unless it renews.
    worker TEXT,
    leased_until INTEGER,
    -- Not before this instant comes the next payment.
    next_at INTEGER NOT NULL,
    CONSTRAINT batch_counts_fit_its_jobs CHECK (applied >= 0 AND refused >= 0 AND applied + refused <= jobs)
) STRICT;
CREATE TRIGGER instants_are_finite_of_decision_batches_on_insert
    BEFORE INSERT ON decision_batches
    WHEN NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.finished_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.leased_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_decision_batches
    BEFORE UPDATE OF created_at, finished_at, leased_until, next_at ON decision_batches
    WHEN NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.finished_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.leased_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER decision_batches_record_author AFTER INSERT ON decision_batches
BEGIN
    UPDATE decision_batches SET database_user = 'database file', stopped_database_user = NULL WHERE id = NEW.id;
END;
CREATE TRIGGER decision_batches_record_stop AFTER UPDATE OF state ON decision_batches
    WHEN NEW.state = 'stopped' AND OLD.state <> 'stopped'
BEGIN
    UPDATE decision_batches SET stopped_database_user = 'database file' WHERE id = NEW.id;
END;
-- The same set is decided once at a time.
CREATE UNIQUE INDEX decision_batches_running ON decision_batches (digest) WHERE state = 'running';
CREATE INDEX decision_batches_ended ON decision_batches (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE decision_batch_jobs (
    batch TEXT NOT NULL,
    number INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    -- The payment's fencing token when the batch was confirmed. NULL: workers may change it meanwhile.
    seen_fence INTEGER,
    -- NULL: its turn has not come.
    outcome TEXT CONSTRAINT batch_outcome_is_known CHECK (outcome IN ('applied', 'refused')),
    -- The code of the refusal, and the refusal in words.
    refusal TEXT CONSTRAINT refusal_is_at_most_32_characters CHECK (length(refusal) <= 32),
    detail TEXT CONSTRAINT refusal_detail_is_at_most_1000_characters CHECK (length(detail) <= 1000),
    at INTEGER,
    PRIMARY KEY (batch, number),
    CONSTRAINT refusal_is_named CHECK ((outcome IS NOT NULL AND outcome = 'refused') = (refusal IS NOT NULL))
) STRICT;
CREATE TRIGGER instants_are_finite_of_decision_batch_jobs_on_insert
    BEFORE INSERT ON decision_batch_jobs
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_decision_batch_jobs
    BEFORE UPDATE OF at ON decision_batch_jobs
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE UNIQUE INDEX decision_batch_jobs_once ON decision_batch_jobs (batch, job_id);
CREATE INDEX decision_batch_jobs_pending ON decision_batch_jobs (batch, number) WHERE outcome IS NULL;
CREATE INDEX decision_batch_jobs_refused ON decision_batch_jobs (batch, number) WHERE outcome = 'refused';

-- How often each refusal occurred, with an example.
CREATE TABLE decision_batch_refusals (
    batch TEXT NOT NULL,
    refusal TEXT NOT NULL,
    jobs INTEGER NOT NULL CONSTRAINT refusal_has_a_job CHECK (jobs > 0),
    example TEXT NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (batch, refusal)
) STRICT;
