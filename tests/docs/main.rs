//! The documentation against the code: commands parse, keys exist, tables match the functions, snippets run.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../support/mod.rs"]
mod support;

mod architecture;
mod bad_input;
mod commands;
mod configuration;
mod decision_tables;
mod decisions;
mod deploy;
mod explain;
mod faults;
mod glossary;
mod images;
mod index;
mod limiter;
mod lua;
mod message;
mod mutations;
mod page;
mod producers;
mod readme;
mod review;
mod runbook;
mod settings;
