//! Fault tests: a deployment of real backends and worker processes is broken on purpose. Oracles then check the
//! providers' records.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../readouts/mod.rs"]
mod readout_oracle;
#[path = "../support/mod.rs"]
mod support;

// Twenty minutes: `BILLING_DAY_PAYMENTS=80000 cargo test --features faults --test faults billing_day::`
#[cfg(feature = "faults")]
mod billing_day;
mod broker;
mod coverage;
// Needs a build with crash points: `cargo test --features faults --test faults crash::`
mod connection_owner;
#[cfg(feature = "faults")]
mod crash;
mod inject;
mod oracle;
mod oracle_tests;
mod plan;
mod plan_tests;
mod provider;
mod proxy;
mod proxy_tests;
mod random;
mod readouts;
mod records;
mod stand;
mod watch;
mod writes;
