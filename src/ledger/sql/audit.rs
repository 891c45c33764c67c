//! The audit of settings: author and reason for the triggers that write it, and reading it.
//!
//! Triggers write the audit rows, for plain SQL and commands alike.

use std::sync::Arc;

use super::dialect::Dialect;
use super::engine::{Args, Sql, Step};
use super::row::{SqlRow, corrupt, read_or_log};
use super::storable;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::provider_row::Object;
use crate::ledger::settings_audit::{AuditRow, AuditedChange};

pub struct AuditStatements {
    name: Sql,
    /// Clears author and reason on SQLite; PostgreSQL clears them at the transaction's end.
    forget: Option<Sql>,
    read: Sql,
}

impl AuditStatements {
    pub fn new(dialect: Dialect) -> Self {
        let (name, forget) = match dialect {
            Dialect::Postgres => (
                "SELECT set_config('sluicegate.os_user', $1, true) AS os_user, \
                     set_config('sluicegate.because', COALESCE($2, ''), true) AS because, \
                     set_config('application_name', COALESCE($3, current_setting('application_name')), true) AS program",
                None,
            ),
            Dialect::Sqlite => (
                "UPDATE settings_person SET os_user = $1, because = $2, program = COALESCE($3, 'sluicegate')",
                Some(dialect.render("UPDATE settings_person SET os_user = NULL, because = NULL, program = NULL")),
            ),
        };
        Self {
            name: dialect.render(name),
            forget,
            read: dialect.render(
                "SELECT {ms:at} AS at_ms, who, os_user, program, because, table_name, row_key, \
                     {text:old_row} AS old_row, {text:new_row} AS new_row FROM settings_audit \
                 WHERE $1 IS NULL OR (table_name <> 'settings_version' \
                     AND (row_key = $1 OR substr(row_key, 1, length($1) + 1) = $1 || '/')) \
                 ORDER BY id DESC LIMIT $2",
            ),
        }
    }

    /// The steps as one transaction with an author. Their rows begin at [`LEADING_STEPS`].
    pub fn with_actor(&self, by: &Actor, steps: Vec<Step>) -> Vec<Step> {
        let step = |sql: &Sql, args: Args| Step { sql: sql.clone(), args, must_affect: false };
        let because = by.reason.as_deref().map(storable);
        let name = step(&self.name, Arc::from([storable(&by.os_user).into(), because.into(), by.program.into()]));
        let forget = self.forget.iter().map(|forget| step(forget, Arc::from([])));
        std::iter::once(name).chain(steps).chain(forget).collect()
    }
}

impl Database {
    /// The last changes of a provider's rows (row, limits, account rules), or of all settings; newest first, at most
    /// `at_most`. Changes by SQL are listed like those by commands.
    pub async fn settings_audit(
        &self,
        provider: Option<&ProviderName>,
        at_most: u32,
    ) -> Result<Vec<AuditedChange>, LedgerError> {
        let args: Args = Arc::from([provider.map(ProviderName::as_str).into(), at_most.into()]);
        let rows = self.engine.query(&self.sql.settings.audit.read, args).await?;
        Ok(read_or_log(&rows, "settings_audit", "row_key", |row| audit_row(row).map(AuditedChange::from)))
    }
}

/// Number of steps before the steps of the change.
pub const LEADING_STEPS: usize = 1;

fn audit_row(row: &SqlRow) -> Result<AuditRow, LedgerError> {
    let object = |column: &str| -> Result<Option<Object>, LedgerError> {
        let Some(text) = row.opt_text(column)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|_| corrupt(column, "is not a JSON object"))
    };
    Ok(AuditRow {
        at: DatabaseTime(row.instant("at_ms")?.0),
        who: row.text("who")?,
        os_user: row.opt_text("os_user")?,
        program: row.opt_text("program")?,
        because: row.opt_text("because")?,
        table: row.text("table_name")?,
        key: row.text("row_key")?,
        old: object("old_row")?,
        new: object("new_row")?,
    })
}
