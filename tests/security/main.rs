//! Security tests: the promises of docs/security.md on real backends, with canaries, TLS, and the minimal rights of the
//! page.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../docs/page.rs"]
#[allow(dead_code, reason = "its other half is for other pages")]
mod page;
#[path = "../support/mod.rs"]
mod support;

mod authority;
mod canaries;
mod deployment;
mod getting_started;
mod https;
mod presses;
mod recipes;
mod rights;
mod search;
mod tls;
