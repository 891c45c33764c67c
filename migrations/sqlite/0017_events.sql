-- Events: what happened to payments, the one order in which every reader gets them, and how far the broker has them.
-- See docs/decisions/0053-one-order-of-events.md.

-- Written in the commit that changes the payment's state, and never changed: only an erasure empties its texts. No
-- foreign key: an event is written from its payment's row, in the same transaction.
CREATE TABLE events (
    -- SQLite has one writer, so sequences appear in their order, and each is its event's place. None is used twice.
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    -- Identifies the event for its consumers: a restored database repeats sequences. A random UUID (version 4).
    event_id TEXT NOT NULL DEFAULT (
        lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
            || substr('89AB', 1 + abs(random() % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))),
    job_id TEXT NOT NULL,
    -- The first, second, … event of its payment.
    n INTEGER NOT NULL CONSTRAINT n_is_1_or_more CHECK (n >= 1),
    provider TEXT NOT NULL,
    state TEXT NOT NULL
        CONSTRAINT event_state_is_final
            CHECK (state IN ('succeeded', 'declined', 'dead', 'expired', 'review', 'cancelled')),
    provider_reference TEXT,
    charged_amount INTEGER,
    reason TEXT,
    attempts INTEGER NOT NULL,
    at INTEGER NOT NULL
) STRICT;
-- The events of a payment: `jobs show`, reconciliation, erasure, and the number of the next one.
CREATE INDEX events_by_job ON events (job_id);
CREATE TRIGGER instants_are_finite_of_events_on_insert
    BEFORE INSERT ON events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_events
    BEFORE UPDATE OF at ON events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- The order as a whole. A position means the same event as long as the era lasts.
CREATE TABLE event_order (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT event_order_has_one_row CHECK (only_row = 1),
    -- Grows when the database goes back, as by a restore: positions then have other events.
    era INTEGER NOT NULL CONSTRAINT era_is_1_or_more CHECK (era >= 1),
    -- Events up to this position may be deleted.
    kept_after INTEGER NOT NULL DEFAULT 0 CONSTRAINT kept_after_is_0_or_more CHECK (kept_after >= 0)
) STRICT;
INSERT INTO event_order (era) SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER);

-- How far a reader is that reads on for all workers. One process at a time reads for it.
CREATE TABLE event_cursors (
    name TEXT NOT NULL PRIMARY KEY CONSTRAINT cursor_name_is_a_short_word
        CHECK (length(name) BETWEEN 1 AND 32 AND name NOT GLOB '*[^a-z_]*'),
    position INTEGER NOT NULL DEFAULT 0 CONSTRAINT cursor_position_is_0_or_more CHECK (position >= 0),
    -- Grows with each write of the holder. If it stands still, the holder is dead or frozen, and another takes over.
    turn INTEGER NOT NULL DEFAULT 0,
    holder TEXT
) STRICT;
INSERT INTO event_cursors (name) VALUES ('amqp');

-- Events that have left the order of publishing: a queue rejected them, or their confirm is late.
CREATE TABLE event_retries (
    sequence INTEGER NOT NULL PRIMARY KEY,
    -- How often a queue rejected it.
    tries INTEGER NOT NULL CONSTRAINT tries_is_0_or_more CHECK (tries >= 0),
    next_try_at INTEGER NOT NULL
) STRICT;
CREATE INDEX event_retries_by_try ON event_retries (next_try_at, sequence);
CREATE TRIGGER instants_are_finite_of_event_retries_on_insert
    BEFORE INSERT ON event_retries
    WHEN NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_event_retries
    BEFORE UPDATE OF next_try_at ON event_retries
    WHEN NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
