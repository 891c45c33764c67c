//! The commands, against engines in memory, and the program itself as a process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails its test")]

#[path = "../support/mod.rs"]
mod support;

mod apply;
mod asked;
mod bad_lines;
mod bench;
mod bench_engines;
mod check;
mod credentials;
mod enqueue;
mod erasing;
mod expansion;
mod explain;
mod fakes;
mod faultless;
mod jobs;
mod ops_port;
mod other_deployment;
mod process;
mod providers;
mod shown;
mod simulate;
mod walk;
