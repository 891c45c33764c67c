//! One conformance suite per face, run on every implementation.

#[path = "../support/mod.rs"]
mod support;

mod ledger;
mod queue;
