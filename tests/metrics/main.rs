//! What `/metrics` shows of a program that runs: its names, its numbers, and what alerts and dashboard make of them.
//! Read by tools that are not ours: `promtool` and a Prometheus server of Debian.
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
mod dashboard;
mod expected;
mod names;
mod prometheus;
mod readouts;
mod rig;
mod scrape;
mod without_field;
