-- The embedded queue is in the ledger's own file. PostgreSQL has no such table, because RabbitMQ has the messages then.

CREATE TABLE queue_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL CONSTRAINT queue_is_named CHECK (queue <> ''),
    body BLOB NOT NULL,
    properties TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT properties_is_an_object CHECK (json_valid(properties) AND json_type(properties) = 'object'),
    visible_at_ms INTEGER NOT NULL,
    -- 0: free; otherwise the number of the lane that took it.
    taken INTEGER NOT NULL DEFAULT 0 CONSTRAINT taken_is_not_negative CHECK (taken >= 0),
    redelivered INTEGER NOT NULL DEFAULT 0 CONSTRAINT redelivered_is_0_or_1 CHECK (redelivered IN (0, 1)),
    -- For the delivery limit, as RabbitMQ has one: the number of deliveries, and the lane that a dead message came from.
    deliveries INTEGER NOT NULL DEFAULT 0 CONSTRAINT deliveries_is_not_negative CHECK (deliveries >= 0),
    dead_of TEXT
) STRICT;
CREATE INDEX queue_messages_next ON queue_messages (queue, taken, visible_at_ms, id);
