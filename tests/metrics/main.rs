//! `/metrics` of a running program: names, values, and their use in alerts and dashboard. External tools read them:
//! Debian's `promtool` and Prometheus server.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

#[path = "../services/program.rs"]
#[allow(dead_code, reason = "another target uses all of it")]
mod program;
#[path = "../services/stand.rs"]
#[allow(dead_code, reason = "another target uses all of it")]
mod stand;

mod alerts;
mod counters;
mod cutoff;
mod dashboard;
mod expected;
mod names;
mod prometheus;
mod readouts;
mod rig;
mod scrape;
mod without_field;
