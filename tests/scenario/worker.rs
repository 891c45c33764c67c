//! The whole worker on its embedded engines: SQLite in memory as ledger and queue, the limiter in process, and a
//! provider that does what each test's script says.
//!
//! The judges are what the provider was sent, what the ledger says and which events left. SQLite keeps its own time, so
//! nothing here is paused; waits are short, and instants are compared in one direction only.

mod backlog_of_events;
mod bench;
mod breaker;
mod copies;
mod drain;
mod expansion;
mod explain;
mod fast_path;
mod faults;
mod invalid_rows;
mod lanes;
mod late_answers;
mod lookups;
mod lookups_over_http;
mod messages;
mod outcomes;
mod pauses;
mod raised_limits;
mod rejected_events;
mod script;
mod simulation;
mod stricter_rules;
mod sweeps;
mod usage_history;
