-- Events: what happened to payments, the one order in which every reader gets them, and how far the broker has them.
-- See docs/decisions/0053-one-order-of-events.md.

-- As in 0001: functions with the owner's rights find all names in this schema.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- Written in the commit that changes the payment's state, and never changed: only an erasure empties its texts. No
-- foreign key: an event is written from its payment's row, in the same statement.
CREATE TABLE events (
    -- Drawn before the commit, so that a smaller number may appear after a larger one. An event is never the first write
    -- of its transaction: the transaction's own number is older than the event's.
    sequence bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Identifies the event for its consumers: a restored database repeats sequences.
    event_id uuid NOT NULL DEFAULT gen_random_uuid(),
    job_id text COLLATE "C" NOT NULL,
    -- The first, second, … event of its payment.
    n bigint NOT NULL CONSTRAINT n_is_1_or_more CHECK (n >= 1),
    provider text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL
        CONSTRAINT event_state_is_final
            CHECK (state IN ('succeeded', 'declined', 'dead', 'expired', 'review', 'cancelled')),
    provider_reference text COLLATE "C",
    charged_amount bigint,
    reason text COLLATE "C",
    attempts bigint NOT NULL,
    at timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
-- The events of a payment: `jobs show`, reconciliation, erasure, and the number of the next one.
CREATE INDEX events_by_job ON events (job_id);

-- The one order: each batch gives its events the places up to its position, and follows exactly one other.
CREATE TABLE event_batches (
    -- The place of its last event.
    position bigint NOT NULL PRIMARY KEY,
    -- The position of the batch before it, or 0. Two sequencers never give the same place.
    previous bigint NOT NULL CONSTRAINT batch_follows_one_batch UNIQUE,
    -- The sequences of its events, in their order.
    events bigint[] NOT NULL,
    -- The largest sequence that is placed here or before.
    highest bigint NOT NULL,
    -- Smaller sequences that are not placed yet, and may still appear.
    gaps int8multirange NOT NULL,
    at timestamptz NOT NULL DEFAULT statement_timestamp(),
    CONSTRAINT events_fill_the_places CHECK (previous >= 0 AND position = previous + cardinality(events)
        AND position > previous),
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);

-- The order as a whole. A position means the same event as long as the era lasts.
CREATE TABLE event_order (
    only_row boolean PRIMARY KEY DEFAULT true CONSTRAINT event_order_has_one_row CHECK (only_row),
    -- Grows when the database goes back, as by a restore: positions then have other events.
    era bigint NOT NULL CONSTRAINT era_is_1_or_more CHECK (era >= 1),
    -- Events up to this position may be deleted.
    kept_after bigint NOT NULL DEFAULT 0 CONSTRAINT kept_after_is_0_or_more CHECK (kept_after >= 0)
);
INSERT INTO event_order (era) VALUES (floor(extract(epoch FROM now()) * 1000)::bigint);

-- How far a reader is that reads on for all workers. One process at a time reads for it.
CREATE TABLE event_cursors (
    name text COLLATE "C" NOT NULL PRIMARY KEY CONSTRAINT cursor_name_is_a_short_word CHECK (name ~ '^[a-z_]{1,32}$'),
    position bigint NOT NULL DEFAULT 0 CONSTRAINT cursor_position_is_0_or_more CHECK (position >= 0),
    -- Grows with each write of the holder. If it stands still, the holder is dead or frozen, and another takes over.
    turn bigint NOT NULL DEFAULT 0,
    holder text COLLATE "C"
) WITH (fillfactor = 50);
INSERT INTO event_cursors (name) VALUES ('amqp');

-- Events that have left the order of publishing: a queue rejected them, or their confirm is late.
CREATE TABLE event_retries (
    sequence bigint NOT NULL PRIMARY KEY,
    -- How often a queue rejected it.
    tries bigint NOT NULL CONSTRAINT tries_is_0_or_more CHECK (tries >= 0),
    next_try_at timestamptz NOT NULL,
    CONSTRAINT instants_are_finite CHECK (
        least(next_try_at) >= '0001-01-01 00:00:00+00' AND greatest(next_try_at) < '9999-12-30 22:00:00+00')
);
CREATE INDEX event_retries_by_try ON event_retries (next_try_at, sequence);

-- Whether the broker has confirmed the event: the order has passed it, and it is not to be tried again.
CREATE FUNCTION event_is_published(number bigint) RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT 1 FROM event_batches AS batch
                   WHERE batch.position = (SELECT position FROM event_cursors WHERE name = 'amqp')
                       AND number <= batch.highest AND NOT batch.gaps @> number)
        AND NOT EXISTS (SELECT 1 FROM event_retries AS retry WHERE retry.sequence = number)
$$;
REVOKE ALL ON FUNCTION event_is_published(bigint) FROM PUBLIC;
