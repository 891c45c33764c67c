//! The ledger and the settings in SQL, written once for both databases.
//!
//! [`engine`] is the interface to a driver, and [`dialect`] has what the databases write differently. One file for each
//! task; each keeps its statements beside the code that reads their rows. See
//! `docs/decisions/0024-one-sql-for-two-databases.md`.

use super::FencedWrite;

mod apply;
mod attempt;
mod audit;
mod audit_context;
mod backlog;
mod batcher;
mod claim;
mod columns;
pub(super) mod connect_options;
pub(super) mod connection_limits;
pub(super) mod connections;
mod copies;
mod dialect;
pub(super) mod engine;
pub(super) mod error;
mod fleet;
pub(super) mod hints;
mod leader;
mod lease;
mod lookup;
mod new_job;
mod operator;
mod outbox;
pub(super) mod postgres;
mod recent;
mod reports;
mod row;
mod server_settings;
pub(super) mod session;
mod settings;
pub(super) mod slots;
pub(super) mod sqlite;
mod upkeep;
mod wait;

use dialect::Dialect;

/// The statements of all methods, rendered for one database.
pub(super) struct Statements {
    claim: claim::ClaimStatements,
    new_job: new_job::NewJobStatements,
    attempt: attempt::AttemptStatements,
    lookup: lookup::LookupStatements,
    lease: lease::LeaseStatements,
    outbox: outbox::OutboxStatements,
    recent: recent::RecentUseStatements,
    leaders: leader::LeaderStatements,
    fleet: fleet::FleetStatements,
    reports: reports::ReportStatements,
    upkeep: upkeep::UpkeepStatements,
    backlog: backlog::BacklogStatements,
    settings: settings::SettingsStatements,
    operator: operator::OperatorStatements,
}

impl Statements {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self {
            claim: claim::ClaimStatements::new(dialect),
            new_job: new_job::NewJobStatements::new(dialect),
            attempt: attempt::AttemptStatements::new(dialect),
            lookup: lookup::LookupStatements::new(dialect),
            lease: lease::LeaseStatements::new(dialect),
            outbox: outbox::OutboxStatements::new(dialect),
            recent: recent::RecentUseStatements::new(dialect),
            leaders: leader::LeaderStatements::new(dialect),
            fleet: fleet::FleetStatements::new(dialect),
            reports: reports::ReportStatements::new(dialect),
            upkeep: upkeep::UpkeepStatements::new(dialect),
            backlog: backlog::BacklogStatements::new(dialect),
            settings: settings::SettingsStatements::new(dialect),
            operator: operator::OperatorStatements::new(dialect),
        }
    }
}

/// Longest stored reason, detail or reference, in characters.
const TEXT_CHARS_MAX: usize = 1_000;

/// Text from outside, made storable: PostgreSQL cannot store U+0000, and a thousand characters are enough.
fn storable(text: &str) -> String {
    text.chars().filter(|c| *c != '\0').take(TEXT_CHARS_MAX).collect()
}

fn fenced_write(found: bool) -> FencedWrite {
    if found { FencedWrite::Applied } else { FencedWrite::Stale }
}
