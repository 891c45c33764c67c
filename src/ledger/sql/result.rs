//! Results of database calls without their driver: rows, and errors by what they mean.
//!
//! A row has cells by column name, each read with the type that the schema promises.
//! A cell of another type, or out of range, is [`LedgerError::Corrupt`] with the column's name and never its value.
//!
//! Errors are classified: unavailable, refused, corrupt or not migrated, and certainly rolled back or not. Messages name
//! constraints and tables, never a row's values.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::operator::UnreadableRow;
use crate::tls;

#[derive(Clone, Debug, PartialEq)]
pub enum SqlValue {
    Null,
    Int(i64),
    Real(f64),
    Bool(bool),
    Text(String),
    Bytes(Vec<u8>),
}

/// The columns of a result, shared by all of its rows.
pub type Names = Arc<[String]>;

#[derive(Clone, Debug, PartialEq)]
pub struct SqlRow {
    names: Names,
    cells: Vec<SqlValue>,
}

impl SqlRow {
    pub fn new(names: Names, cells: Vec<SqlValue>) -> Self {
        Self { names, cells }
    }

    fn cell(&self, column: &str) -> Result<&SqlValue, LedgerError> {
        let at = self.names.iter().position(|name| name == column);
        at.and_then(|at| self.cells.get(at)).ok_or_else(|| corrupt(column, "is missing"))
    }

    pub fn opt_int(&self, column: &str) -> Result<Option<i64>, LedgerError> {
        match self.cell(column)? {
            SqlValue::Null => Ok(None),
            SqlValue::Int(value) => Ok(Some(*value)),
            _ => Err(corrupt(column, "is not an integer")),
        }
    }

    pub fn int(&self, column: &str) -> Result<i64, LedgerError> {
        self.opt_int(column)?.ok_or_else(|| corrupt(column, "is NULL"))
    }

    pub fn count(&self, column: &str) -> Result<u32, LedgerError> {
        u32::try_from(self.int(column)?).map_err(|_| corrupt(column, "is out of range"))
    }

    pub fn opt_real(&self, column: &str) -> Result<Option<f64>, LedgerError> {
        match self.cell(column)? {
            SqlValue::Null => Ok(None),
            SqlValue::Real(value) => Ok(Some(*value)),
            _ => Err(corrupt(column, "is not a number")),
        }
    }

    /// SQLite stores 0 and 1.
    pub fn bool(&self, column: &str) -> Result<bool, LedgerError> {
        match self.cell(column)? {
            SqlValue::Bool(value) => Ok(*value),
            SqlValue::Int(0) => Ok(false),
            SqlValue::Int(1) => Ok(true),
            _ => Err(corrupt(column, "is not a boolean")),
        }
    }

    pub fn opt_bool(&self, column: &str) -> Result<Option<bool>, LedgerError> {
        match self.cell(column)? {
            SqlValue::Null => Ok(None),
            _ => self.bool(column).map(Some),
        }
    }

    pub fn opt_text(&self, column: &str) -> Result<Option<String>, LedgerError> {
        match self.cell(column)? {
            SqlValue::Null => Ok(None),
            SqlValue::Text(value) => Ok(Some(value.clone())),
            _ => Err(corrupt(column, "is not text")),
        }
    }

    pub fn text(&self, column: &str) -> Result<String, LedgerError> {
        self.opt_text(column)?.ok_or_else(|| corrupt(column, "is NULL"))
    }

    /// The column's name in messages.
    fn name(&self, column: &str) -> String {
        match self.cell(column) {
            Ok(SqlValue::Text(text)) => text.clone(),
            Ok(SqlValue::Int(number)) => number.to_string(),
            _ => "?".to_owned(),
        }
    }

    pub fn bytes(&self, column: &str) -> Result<Vec<u8>, LedgerError> {
        match self.cell(column)? {
            SqlValue::Bytes(value) => Ok(value.clone()),
            _ => Err(corrupt(column, "is not a byte string")),
        }
    }

    /// Milliseconds since the epoch, from a column whose name ends in `_ms`.
    pub fn opt_instant(&self, column: &str) -> Result<Option<EpochMs>, LedgerError> {
        let at = self.opt_int(column)?.map(EpochMs);
        match at.is_none_or(EpochMs::is_writable) {
            true => Ok(at),
            false => Err(corrupt(column.trim_end_matches("_ms"), "is not an instant of the years 1 to 9999")),
        }
    }

    pub fn instant(&self, column: &str) -> Result<EpochMs, LedgerError> {
        self.opt_instant(column)?.ok_or_else(|| corrupt(column, "is NULL"))
    }

    /// Milliseconds as a duration; a negative number (the database's clock was set back) is zero.
    pub fn opt_ms(&self, column: &str) -> Result<Option<Duration>, LedgerError> {
        let Some(ms) = self.opt_int(column)? else { return Ok(None) };
        if ms.unsigned_abs() > SPAN_MAX_MS {
            return Err(corrupt(column, "is computed from an instant that is not finite"));
        }
        Ok(Some(Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
    }

    pub fn ms(&self, column: &str) -> Result<Duration, LedgerError> {
        self.opt_ms(column)?.ok_or_else(|| corrupt(column, "is NULL"))
    }
}

/// More than lies between any two instants.
const SPAN_MAX_MS: u64 = 1_000_000_000_000_000;

/// Rows of a list, read one by one.
#[derive(Debug)]
pub struct ReadRows<T> {
    pub rows: Vec<T>,
    pub unreadable: Vec<UnreadableRow>,
}

/// Reads each row separately: an unreadable row is named by its column `key`, and the others are read all the same.
pub fn read_each<T>(rows: &[SqlRow], key: &str, read: impl Fn(&SqlRow) -> Result<T, LedgerError>) -> ReadRows<T> {
    let mut all = ReadRows { rows: Vec::with_capacity(rows.len()), unreadable: Vec::new() };
    for row in rows {
        match read(row) {
            Ok(value) => all.rows.push(value),
            Err(error) => all.unreadable.push(UnreadableRow::new(row.name(key), &error)),
        }
    }
    all
}

/// Reads like [`read_each`]; unreadable rows are only logged.
pub fn read_or_log<T>(
    rows: &[SqlRow],
    table: &'static str,
    key: &str,
    read: impl Fn(&SqlRow) -> Result<T, LedgerError>,
) -> Vec<T> {
    let ReadRows { rows, unreadable } = read_each(rows, key, read);
    for UnreadableRow { id, problem } in unreadable {
        tracing::error!(table, row = id, problem, "a row cannot be read; skipping it. Repair it by SQL");
    }
    rows
}

pub fn corrupt(column: &str, problem: &str) -> LedgerError {
    LedgerError::Corrupt(format!("column `{column}` {problem}"))
}

/// The index that rejects a second payment with the same charge.
const ONE_PAYMENT_PER_CHARGE: &str = "jobs_one_payment_per_charge";
/// How to fix missing rights, for a command with a worker's URL as well as for a worker whose grants are missing.
const RIGHTS_MISSING: &str = "the user of database.url lacks the right. Only the operator's user may change limits, \
                              providers and pauses: give the command the operator's URL. Which user needs which GRANT \
                              after each migrate: docs/security.md, \"Least rights\"";

/// Why no connection could be opened, shared by all waiting callers.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectFailure(Arc<sqlx::Error>);

impl ConnectFailure {
    /// The server has no free connection: too many clients, or too many of this role or database.
    pub fn is_full(&self) -> bool {
        sqlstate(&self.0).is_some_and(|state| state.starts_with("53"))
    }
}

impl From<sqlx::Error> for ConnectFailure {
    fn from(error: sqlx::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl From<ConnectFailure> for sqlx::Error {
    fn from(failure: ConnectFailure) -> Self {
        Self::Io(io::Error::other(failure))
    }
}

/// The same connect may succeed soon: the server is starting, full or not reachable yet.
pub fn is_transient(error: &sqlx::Error) -> bool {
    let kinds = [io::ErrorKind::ConnectionRefused, io::ErrorKind::TimedOut];
    let is_passing = |state: String| ["53", "57P"].iter().any(|class| state.starts_with(class));
    matches!(error, sqlx::Error::Io(error) if kinds.contains(&error.kind())) || sqlstate(error).is_some_and(is_passing)
}

/// The error itself, or the connect failure inside it.
fn cause(error: &sqlx::Error) -> &sqlx::Error {
    let sqlx::Error::Io(io) = error else { return error };
    let failure = io.get_ref().and_then(|inner| inner.downcast_ref::<ConnectFailure>());
    failure.map_or(error, |failure| &failure.0)
}

/// The server rolled everything back, and a repetition may work. Either it says so, or two statements that look before
/// they write ran at the same moment.
pub fn rolled_back(error: &sqlx::Error) -> bool {
    match sqlstate(error).as_deref() {
        Some("40001" | "40P01") => true,
        Some("23505") => {
            let constraint = error.as_database_error().and_then(|error| error.constraint());
            constraint.is_some_and(|name| name == ONE_PAYMENT_PER_CHARGE)
        }
        _ => false,
    }
}

/// The server answered that the statement failed, and it is still up.
pub fn is_rolled_back_for_sure(error: &sqlx::Error) -> bool {
    // Connection exceptions, statement completion unknown, operator intervention, system errors.
    let doubtful = |state: &str| ["08", "40003", "57P", "58"].iter().any(|class| state.starts_with(class));
    sqlstate(error).is_some_and(|state| !doubtful(&state))
}

/// Another session has a lock on a row or a table, and kept it until the wait timed out.
pub fn lock_not_available(error: &sqlx::Error) -> bool {
    sqlstate(error).as_deref() == Some("55P03")
}

/// No later statement on this connection would succeed: the server does not answer, or was demoted.
pub fn is_connection_broken(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(_)) || sqlstate(error).as_deref() == Some("25006")
}

pub fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
}

/// The meaning of PostgreSQL's error. Messages name constraints and tables; details, which quote values, are left out.
pub fn from_postgres(error: &sqlx::Error) -> LedgerError {
    let error = cause(error);
    let Some(server) = error.as_database_error() else { return unavailable_or_corrupt(error) };
    let code = server.code().unwrap_or_default();
    let text = format!("{} (SQLSTATE {code})", server.message());
    match &*code {
        // undefined_table, undefined_column, undefined_function
        "42P01" | "42703" | "42883" => LedgerError::NotMigrated,
        // query_canceled by statement_timeout, lock_not_available, read_only_sql_transaction (a demoted primary),
        // in_failed_sql_transaction
        "57014" | "55P03" | "25006" | "25P02" | "25P03" => LedgerError::Unavailable(text),
        // connection exceptions, insufficient resources, operator intervention, system errors, rolled back
        _ if ["08", "53", "57", "58", "40"].iter().any(|class| code.starts_with(class)) => {
            LedgerError::Unavailable(text)
        }
        // invalid_catalog_name
        "3D000" => {
            LedgerError::StatementFailed(format!("{text}: create the database, or correct its name in database.url"))
        }
        // invalid_authorization_specification, invalid_password
        "28000" | "28P01" => {
            LedgerError::StatementFailed(format!("{text}: put the right user and password into database.url"))
        }
        // insufficient_privilege
        "42501" => LedgerError::StatementFailed(format!("{text}: {RIGHTS_MISSING}")),
        _ => LedgerError::StatementFailed(text),
    }
}

/// Errors of the driver or the network, the same for both databases.
pub fn unavailable_or_corrupt(error: &sqlx::Error) -> LedgerError {
    match error {
        sqlx::Error::ColumnDecode { index, .. } => LedgerError::Corrupt(format!("column {index} cannot be decoded")),
        sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) | sqlx::Error::TypeNotFound { .. } => {
            LedgerError::Corrupt(error.to_string())
        }
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) | sqlx::Error::Encode(_) => {
            LedgerError::StatementFailed(error.to_string())
        }
        // The server answered that it has no TLS; the driver reports that as text only.
        sqlx::Error::Tls(cause) if cause.to_string().contains("does not support TLS") => {
            LedgerError::Unavailable(format!("TLS: {cause}{}", tls::FIX_NO_TLS))
        }
        _ => LedgerError::Unavailable(tls::explain_tls_error(error).unwrap_or_else(|| match error {
            // Without the driver's own words before the cause.
            sqlx::Error::Io(cause) => cause.to_string(),
            error => error.to_string(),
        })),
    }
}
