//! Command tests: the commands with fake and embedded backends, and the program itself as a process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails its test")]

#[path = "../support/mod.rs"]
mod support;

mod apply;
mod bulk_decisions;
mod check;
mod confirmations;
mod credentials;
mod demo_page;
mod enqueue;
mod enqueue_recorded;
mod erasing;
mod every_command;
mod expansion;
mod explain;
mod fakes;
mod flows;
mod hostile_text;
mod jobs;
mod limits;
mod lists;
mod next_page;
mod one_step;
mod ops_port;
mod other_deployment;
mod process;
mod providers;
mod service_manager;
mod simulate;
mod usage_errors;
