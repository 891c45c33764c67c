//! Scenario tests: the gate on paused time, where every instant is exact, and the worker on backends in memory.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/captured_log.rs"]
mod captured_log;
mod gate;
#[path = "../support/memory_queue.rs"]
mod memory_queue;
#[path = "../support/without_constraints.rs"]
#[allow(dead_code, reason = "its other half is for other tests")]
mod without_constraints;
mod worker;
