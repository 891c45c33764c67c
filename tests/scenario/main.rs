//! Scenario tests: the gate on paused time, where every instant is exact, and the worker on its embedded backends.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod gate;
#[path = "../support/without_constraints.rs"]
#[allow(dead_code, reason = "its other half is for other tests")]
mod without_constraints;
mod worker;
