//! Third-party software: the rows of `config/providers` on both databases, localstripe read by the stripe SDK, nginx as
//! a limiter and as an authenticating proxy. Also special files that are given as secrets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../security/authority.rs"]
#[allow(dead_code, reason = "its other half is for the security tests")]
mod authority;
#[path = "../docs/page.rs"]
#[allow(dead_code, reason = "its other half is for other pages")]
mod page;
#[path = "../services/program.rs"]
#[allow(dead_code, reason = "its other half is for the services")]
mod program;
#[path = "../services/stand.rs"]
#[allow(dead_code, reason = "its other half is for the services")]
mod stand;
#[path = "../support/mod.rs"]
mod support;

mod embedded;
mod hung;
mod limit_req;
mod nginx;
mod people;
mod python;
mod recipes;
mod sender;
mod stray_responses;
mod stripe;
mod two_workers;
mod wiretap;
