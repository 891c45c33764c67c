//! The web page in a real browser: clicked through on a running `sluicegate run`, and looked at with data in which
//! everything happens at once.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails its test")]

#[path = "../support/mod.rs"]
mod support;

mod appearance;
mod audit;
mod browser;
mod canned;
mod displayed_estimates;
mod flows;
mod keyboard;
mod liveness;
mod stand;
mod webdriver;
