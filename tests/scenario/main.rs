//! Whole parts at work: the gate on paused time, where every instant is exact, and the worker on its embedded engines.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod gate;
mod worker;
