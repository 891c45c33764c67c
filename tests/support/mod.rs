//! Real servers for tests: each on a private port in a temporary directory, and ended with the test binary.
//!
//! A server runs under a small shell that waits for its standard input to close. However this process ends, that pipe
//! closes. Then the shell kills the server's process group and removes its directory.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod claiming;
pub mod clock;
pub mod doubling;
pub mod hostile;
pub mod memory_queue;
pub mod pgbouncer;
pub mod postgres;
pub mod process;
pub mod rabbitmq;
pub mod redis;
pub mod roles;
pub mod without_constraints;

/// Counts the outcome events that are not published: positions have no gaps, and tests delete no events.
pub const UNPUBLISHED: &str = "SELECT (SELECT count(*) FROM events) - (SELECT position FROM event_cursors) \
     + (SELECT count(*) FROM event_retries)";
