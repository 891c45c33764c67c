//! Spans of a real run, as a collector receives them: `cargo test --features otlp --test otlp`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod address;
mod collector;
mod rig;
mod spans;
