-- Decisions of operators about many payments: each batch, its payments in their order, and the outcome of each.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

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
    -- user@host of the operator, as the program says, and the database's user, by a trigger.
    person text COLLATE "C" NOT NULL
        CONSTRAINT batch_author_is_1_to_1000_characters CHECK (char_length(person) BETWEEN 1 AND 1000),
    database_user text COLLATE "C" NOT NULL DEFAULT session_user,
    because text COLLATE "C" NOT NULL
        CONSTRAINT batch_reason_is_1_to_1000_characters CHECK (char_length(because) BETWEEN 1 AND 1000),
    -- NULL: it runs.
    finished_at timestamptz,
    stopped_by text COLLATE "C",
    stopped_database_user text COLLATE "C",
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

CREATE FUNCTION batches_record_author() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        NEW.database_user := session_user;
        NEW.stopped_database_user := NULL;
        RETURN NEW;
    END IF;
    NEW.person := OLD.person;
    NEW.database_user := OLD.database_user;
    NEW.stopped_database_user := CASE
        WHEN NEW.state = 'stopped' AND OLD.state <> 'stopped' THEN session_user
        ELSE OLD.stopped_database_user END;
    RETURN NEW;
END $$;
CREATE TRIGGER record_author BEFORE INSERT OR UPDATE ON decision_batches
    FOR EACH ROW EXECUTE FUNCTION batches_record_author();

-- Writes a batch with all of its payments, unless one of them has changed, or a batch of the same set runs. No role may
-- insert by itself: workers apply what these tables hold, so an insert under another name would be a decision.
CREATE FUNCTION batches_begin(of_batch text, of_decision text, members jsonb, of_rate text, of_digest text, of_sums jsonb,
                              of_person text, of_because text)
    RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT FROM decision_batches WHERE id = of_batch) THEN
        RETURN;
    END IF;
    -- `state || ''`: found by the id alone.
    INSERT INTO decision_batch_jobs (batch, number, job_id, seen_fence)
    SELECT of_batch, given.number, given.id, given.seen_fence
    FROM jsonb_to_recordset(members) AS given (number bigint, id text, seen_fence bigint)
        JOIN jobs ON jobs.id = given.id
    WHERE jobs.state || '' = CASE
            WHEN of_decision = 'cancel' THEN 'waiting'
            WHEN of_decision IN ('replay', 'discard') THEN 'dead'
            ELSE 'review' END
        AND coalesce(given.seen_fence, jobs.fence) = jobs.fence;
    INSERT INTO decision_batches
        (id, decision, jobs, rate, digest, sums, created_at, person, because, next_at)
    SELECT of_batch, of_decision, jsonb_array_length(members), of_rate, of_digest, of_sums, statement_timestamp(),
        of_person, of_because, statement_timestamp()
    WHERE (SELECT count(*) FROM decision_batch_jobs WHERE batch = of_batch) = jsonb_array_length(members)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN NEXT of_batch;
    ELSE
        DELETE FROM decision_batch_jobs WHERE batch = of_batch;
    END IF;
END $$;

CREATE FUNCTION batches_stop(of_batch text, by_person text) RETURNS SETOF text
    LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    UPDATE decision_batches SET state = 'stopped', finished_at = statement_timestamp(), stopped_by = by_person
    WHERE id = of_batch AND state = 'running' RETURNING id;
$$;

REVOKE ALL ON FUNCTION
    batches_record_author(), batches_begin(text, text, jsonb, text, text, jsonb, text, text), batches_stop(text, text)
FROM PUBLIC;
