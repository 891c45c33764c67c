//! What `/metrics` shows of a program that runs: its names, its numbers, and what alerts and dashboard make of them.
//! Read by tools that are not ours: `promtool` and a Prometheus server of Debian.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod alerts;
mod counters;
mod dashboard;
mod names;
mod rig;
mod scrape;
