//! Contract tests: one conformance suite per interface, run on every implementation, and the fuzzing corpus.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/captured_log.rs"]
mod captured_log;
#[path = "../support/mod.rs"]
mod support;

mod corpus;
mod ledger;
mod limiter;
mod provider;
mod queue;
