//! The ledger and the settings in SQL, written once for both databases.
//!
//! [`engine`] is the interface to a driver, and [`dialect`] has what the databases write differently. One file for each
//! task; each keeps its statements, as `static` templates, beside the methods of [`Database`] that run them. See
//! `docs/decisions/0024-one-sql-for-two-databases.md`.

use std::borrow::Cow;
use std::time::Duration;

use super::database::Database;
use super::{FencedWrite, LedgerError};

pub mod account_rules;
mod answered_requests;
mod apply;
pub mod apply_file;
mod attempt;
mod backlog;
pub mod batcher;
mod cells;
mod claim;
pub mod connect_options;
pub mod connections;
mod decision_batches;
mod dialect;
pub mod engine;
mod event_order;
mod events;
mod fleet;
mod held;
pub mod hints;
mod history;
mod io_error;
mod job_search;
mod jobs;
mod lane_holds;
mod lease;
pub mod limit_returns;
mod lost_commits;
mod pause_of_all;
pub mod postgres;
mod queue_position;
mod recent;
mod refusals;
mod rejected;
mod resolution;
pub mod result;
pub mod sequences;
pub mod session;
mod settings;
pub mod slots;
pub mod sqlite;
mod text_order;
mod throttled;
mod upkeep;

use dialect::{Dialect, Template, WriteTemplate};
use engine::{Args, Step, Value};
use result::{FromRow, SqlRow};

impl Database {
    fn dialect(&self) -> Dialect {
        self.engine.dialect()
    }

    /// Runs one statement, committed by itself.
    async fn query(&self, sql: &Template, args: impl Into<Args>) -> Result<Vec<SqlRow>, LedgerError> {
        self.engine.query(sql.sql(self.dialect()), args.into()).await
    }

    /// Runs a statement that must find its rows by an index, whatever the statistics say.
    async fn query_by_index(&self, sql: &Template, args: impl Into<Args>) -> Result<Vec<SqlRow>, LedgerError> {
        self.engine.query_by_index(sql.sql(self.dialect()), args.into()).await
    }

    /// Runs one statement, and reads its rows.
    async fn query_as<T: FromRow>(&self, sql: &Template, args: impl Into<Args>) -> Result<Vec<T>, LedgerError> {
        self.query(sql, args).await?.iter().map(T::from_row).collect()
    }

    /// Runs one statement that returns at most one row.
    async fn query_one(&self, sql: &Template, args: impl Into<Args>) -> Result<Option<SqlRow>, LedgerError> {
        Ok(self.query(sql, args).await?.into_iter().next())
    }

    /// Runs one statement that always returns a row.
    async fn query_row(&self, sql: &Template, args: impl Into<Args>) -> Result<SqlRow, LedgerError> {
        self.query_one(sql, args).await?.ok_or_else(no_row)
    }

    /// Runs one statement; returns the number of its rows.
    async fn query_count(&self, sql: &Template, args: impl Into<Args>) -> Result<u32, LedgerError> {
        Ok(u32::try_from(self.query(sql, args).await?.len()).unwrap_or(u32::MAX))
    }

    /// Runs a statement that every worker polls each second.
    async fn query_urgent(&self, sql: &Template, args: impl Into<Args>) -> Result<Vec<SqlRow>, LedgerError> {
        self.engine.query_urgent(sql.sql(self.dialect()), args.into()).await
    }

    /// One statement of a transaction.
    fn step(&self, sql: &Template, args: impl Into<Args>) -> Step {
        Step { sql: sql.sql(self.dialect()).clone(), args: args.into(), must_affect: false }
    }

    /// A statement that rolls its transaction back when it neither returns nor changes a row.
    fn must_affect(&self, sql: &Template, args: impl Into<Args>) -> Step {
        Step { must_affect: true, ..self.step(sql, args) }
    }

    /// The statements of a job write, for a transaction of its own.
    fn write_steps(&self, template: &WriteTemplate, args: impl Into<Args>) -> Vec<Step> {
        template.write(self.dialect()).steps(&args.into())
    }

    /// Runs a job write for one job, in a commit of its own.
    async fn execute(&self, template: &WriteTemplate, args: impl Into<Args>) -> Result<Option<SqlRow>, LedgerError> {
        let written = self.engine.execute_one(template.write(self.dialect()), &args.into()).await;
        self.writes.record(&written);
        written
    }

    /// Runs a job write together with those of other jobs ([`batcher::Batcher::write`]).
    async fn write(
        &self,
        template: &'static WriteTemplate,
        args: impl Into<Args>,
        max_batch_delay: Duration,
    ) -> Result<Option<SqlRow>, LedgerError> {
        let batcher = self.batchers.of(template, self.dialect());
        let written = batcher.write(&self.engine, args.into(), max_batch_delay).await;
        self.writes.record(&written);
        written
    }
}

fn no_row() -> LedgerError {
    LedgerError::Corrupt("a statement returned no row".to_owned())
}

/// A JSON array of texts, as placeholders `{texts:…}` read it.
fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    texts.into_iter().collect::<serde_json::Value>().to_string().into()
}

/// Longest stored reason, detail or reference, in characters.
const TEXT_CHARS_MAX: usize = 1_000;

/// Text from outside, made storable: PostgreSQL cannot store U+0000, and a thousand characters are enough.
fn storable(text: &str) -> Cow<'_, str> {
    if text.len() <= TEXT_CHARS_MAX && !text.contains('\0') {
        return Cow::Borrowed(text);
    }
    text.chars().filter(|c| *c != '\0').take(TEXT_CHARS_MAX).collect()
}

fn fenced_write(found: bool) -> FencedWrite {
    if found { FencedWrite::Applied } else { FencedWrite::Stale }
}
