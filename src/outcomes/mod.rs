//! Outcomes on their way out: the publisher of events, which brings them to the broker in the one order of the ledger.
//!
//! See `docs/decisions/0053-one-order-of-events.md`.

pub mod amqp;
mod timing;
