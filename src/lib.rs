//! Sluicegate calls payment providers exactly as fast as they allow, and loses or doubles no payment doing it.
//!
//! Read in the order in which a job flows: [`queue`] → [`ledger`] → [`worker`] → [`limiter`] → [`provider`]. Rules live
//! in [`domain`], which knows nobody; [`app`] alone knows all and wires them. `docs/architecture.md` is the map.

pub mod app;
pub mod cli;
pub mod config;
pub mod domain;
pub mod faults;
pub mod files;
pub mod fleet;
pub mod ledger;
pub mod limiter;
pub mod ops;
pub mod provider;
pub mod queue;
pub mod simulation;
pub mod telemetry;
pub mod tls;
pub mod worker;
