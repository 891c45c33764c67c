//! Whole parts at work on paused time: nothing waits for real, every instant is exact, a seed tells the same story twice.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod gate;
