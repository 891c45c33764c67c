//! The web page in a real browser: flows on a running `sluicegate run`, and views of prepared data with every state at
//! once.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails its test")]

#[path = "../support/mod.rs"]
mod support;

mod account_rules;
mod appearance;
mod audit;
mod axe;
mod batches;
mod browser;
mod canned;
mod canned_batches;
mod canned_history;
mod canned_jobs;
mod displayed_estimates;
mod flows;
mod foreign_pages;
mod headlines;
mod keyboard;
mod limits;
mod liveness;
mod overview;
mod recorded_history;
mod stand;
mod times;
mod waiting_accounts;
mod webdriver;
mod weight;
