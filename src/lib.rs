//! Sluicegate: a worker that calls payment providers at their full rate limit without losing or duplicating a payment.
//!
//! Read the modules in the order in which a job passes them: [`queue`], [`ledger`], [`worker`], [`limiter`],
//! [`provider`]. The rules are in [`domain`], which depends on no other module. [`app`] wires everything.
//! `docs/architecture.md` is the map.

pub mod app;
pub mod batcher;
#[cfg(test)]
#[path = "../tests/support/captured_log.rs"]
mod captured_log;
pub mod cli;
pub mod config;
pub mod domain;
pub mod faults;
pub mod files;
pub mod fleet;
pub mod ledger;
pub mod limiter;
pub mod ops;
pub mod outcomes;
pub mod provider;
pub mod queue;
pub mod simulation;
pub mod telemetry;
pub mod tls;
pub mod worker;
