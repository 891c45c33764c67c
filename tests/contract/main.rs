//! One conformance suite per face, run on every implementation.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod corpus;
mod ledger;
mod limiter;
mod provider;
mod queue;
