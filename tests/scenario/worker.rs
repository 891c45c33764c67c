//! The whole worker on its embedded engines: SQLite in memory as ledger and queue, the limiter in process, and a
//! provider that does what each test's script says.
//!
//! The judges are what the provider was sent, what the ledger says and which events left. SQLite keeps its own time, so
//! nothing here is paused; waits are short, and instants are compared in one direction only.

mod backlog_of_events;
mod bad_rows;
mod bench;
mod breaker;
mod copies;
mod drain;
mod expansion;
mod explain;
mod faults;
mod first;
mod histories;
mod lanes;
mod late_answers;
mod lookups;
mod lookups_over_http;
mod messages;
mod outcomes;
mod pauses;
mod raised;
mod rehearsed;
mod rejected_events;
mod script;
mod stricter;
mod sweeps;
