//! The benchmarks as processes, on servers of their own: their reports are complete, and nothing is left behind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails its test")]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod backends;
mod limiter;
