//! The whole worker on backends in memory: a ledger in SQLite, the tests' broker, the limiter in process, and a scripted
//! provider.
//!
//! The tests check the provider's requests, the ledger and the published events. SQLite uses its own clock, so time is
//! not paused. Waits are short, and instants are compared in one direction only.

mod account_faults;
mod acknowledgements;
mod amounts;
mod backlog;
mod bench;
mod breaker;
mod concurrency;
mod costs;
mod decision_batches;
mod drain;
mod event_publisher;
mod expansion;
mod explain;
mod fast_path;
mod faults;
mod held_lanes;
mod invalid_rows;
mod lanes;
mod late_answers;
mod lookups;
mod lookups_over_http;
mod messages;
mod order;
mod outcomes;
mod pauses;
mod raised_limits;
mod refused_accounts;
mod refused_outcomes;
mod refused_payments;
mod rejected;
mod rejected_events;
mod script;
mod simulation;
mod stricter_rules;
mod sweeps;
mod temporary_limits;
mod unconfirmed;
mod usage_history;
mod without_broker;
