//! Results of database calls without their driver: rows, and errors by what they mean.
//!
//! A row has cells by column name, each read with the type that the schema promises.
//! A cell of another type, or out of range, is [`LedgerError::Corrupt`] with the column's name and never its value.
//!
//! Errors are classified: unavailable, refused, corrupt or not migrated, and certainly rolled back or not. Messages name
//! constraints and tables, never a row's values.

use std::io;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgRow;
use sqlx::sqlite::{SqliteError, SqliteRow};
use sqlx::{Column as _, Row as _};

use super::cells::{FromCell, SqlValue, text};
use super::sqlite::{ACQUIRE_TIMEOUT, READ_MAX};
use super::{io_error, postgres, sqlite};
use crate::domain::backend_fault::BackendFault;
use crate::ledger::LedgerError;
use crate::ledger::operator::UnreadableRow;
use crate::tls;

/// A row as its driver has it. Its cells are read where they lie.
#[derive(Debug)]
pub enum SqlRow {
    Postgres(PgRow),
    Sqlite(SqliteRow),
}

impl From<PgRow> for SqlRow {
    fn from(row: PgRow) -> Self {
        Self::Postgres(row)
    }
}

impl From<SqliteRow> for SqlRow {
    fn from(row: SqliteRow) -> Self {
        Self::Sqlite(row)
    }
}

impl SqlRow {
    /// Reads the column `{field}`, for an instant or a duration `{field}_ms`.
    ///
    /// # Errors
    /// [`LedgerError::Corrupt`], with the field's name.
    pub fn get<T: FromCell>(&self, field: &str) -> Result<T, LedgerError> {
        T::from_cell(self.cell(field, T::SUFFIX)?).map_err(|fault| corrupt(field, &fault))
    }

    /// Reads the column `{field}` without a copy.
    ///
    /// # Errors
    /// [`LedgerError::Corrupt`], with the field's name.
    pub fn text(&self, field: &str) -> Result<&str, LedgerError> {
        text(self.cell(field, "")?).map_err(|fault| corrupt(field, &fault))
    }

    fn cell(&self, field: &str, suffix: &str) -> Result<SqlValue<'_>, LedgerError> {
        let is_named = |name: &str| name.strip_prefix(field) == Some(suffix);
        let cell = match self {
            Self::Postgres(row) => {
                let at = row.columns().iter().position(|column| is_named(column.name()));
                at.map(|at| postgres::cell(row, at))
            }
            Self::Sqlite(row) => {
                let at = row.columns().iter().position(|column| is_named(column.name()));
                at.map(|at| sqlite::cell(row, at))
            }
        };
        Ok(cell.ok_or_else(|| corrupt(field, "is missing"))??)
    }
}

/// A type that a row is read as.
pub trait FromRow: Sized {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError>;
}

/// A struct from a row: the fields of the first list by their names, the others as written.
macro_rules! read {
    ($row:ident => $type:ident { $($field:ident),* $(,)? $(; $($other:ident: $value:expr),+ $(,)?)? }) => {
        $type { $($field: $row.get(stringify!($field))?,)* $($($other: $value,)+)? }
    };
}
pub(crate) use read;

/// Implements [`FromRow`] by [`read`].
macro_rules! from_row {
    ($row:ident => $type:ident { $($fields:tt)* }) => {
        impl $crate::ledger::sql::result::FromRow for $type {
            fn from_row($row: &$crate::ledger::sql::result::SqlRow) -> Result<Self, $crate::ledger::LedgerError> {
                Ok($crate::ledger::sql::result::read!($row => $type { $($fields)* }))
            }
        }
    };
}
pub(crate) use from_row;

/// Rows of a list, read one by one.
#[derive(Debug)]
pub struct ReadRows<T> {
    pub rows: Vec<T>,
    pub unreadable: Vec<UnreadableRow>,
}

/// Reads each row separately: an unreadable row is named by its column `key`, and the others are read all the same.
pub fn read_each<T: FromRow>(rows: &[SqlRow], key: &str) -> ReadRows<T> {
    let mut all = ReadRows { rows: Vec::with_capacity(rows.len()), unreadable: Vec::new() };
    for row in rows {
        match T::from_row(row) {
            Ok(value) => all.rows.push(value),
            Err(error) => {
                let number = || row.get(key).map(|number: i64| number.to_string());
                let name = row.get(key).or_else(|_| number()).unwrap_or_else(|_| "?".to_owned());
                all.unreadable.push(UnreadableRow::new(name, &error));
            }
        }
    }
    all
}

/// Reads like [`read_each`]; unreadable rows are only logged.
pub fn read_or_log<T: FromRow>(rows: &[SqlRow], table: &'static str, key: &str) -> Vec<T> {
    let ReadRows { rows, unreadable } = read_each(rows, key);
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

    /// The server is down or starting. So the open connections are most likely broken, and the failure says nothing
    /// about how many it allows.
    pub fn is_down(&self) -> bool {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
            UnexpectedEof,
        };
        match &*self.0 {
            sqlx::Error::Io(error) => matches!(
                error.kind(),
                BrokenPipe
                    | ConnectionAborted
                    | ConnectionRefused
                    | ConnectionReset
                    | HostUnreachable
                    | NetworkUnreachable
                    | UnexpectedEof
            ),
            error => sqlstate(error).is_some_and(|state| state.starts_with("57P")),
        }
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

/// The server has not answered in time.
pub fn is_silent(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut)
}

pub fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
}

/// The meaning of a database's error. Messages name constraints and tables; details, which quote values, are left out.
impl From<&sqlx::Error> for LedgerError {
    fn from(error: &sqlx::Error) -> Self {
        let error = cause(error);
        match (error.as_database_error(), primary_code(error)) {
            (Some(database), code) if database.try_downcast_ref::<SqliteError>().is_some() => {
                from_sqlite(database, code)
            }
            (Some(server), _) => from_postgres(server),
            (None, _) => unavailable_or_corrupt(error),
        }
    }
}

impl From<sqlx::Error> for LedgerError {
    fn from(error: sqlx::Error) -> Self {
        Self::from(&error)
    }
}

fn from_postgres(server: &dyn DatabaseError) -> LedgerError {
    let code = server.code().unwrap_or_default();
    let text = format!("{} (SQLSTATE {code})", server.message());
    match &*code {
        // undefined_table, undefined_column, undefined_function
        "42P01" | "42703" | "42883" => LedgerError::NotMigrated,
        // disk_full; read_only_sql_transaction, as of a demoted primary
        "53100" => BackendFault::DiskFull.into(),
        "25006" => BackendFault::ReadOnly.into(),
        // query_canceled by statement_timeout, lock_not_available, in_failed_sql_transaction
        "57014" | "55P03" | "25P02" | "25P03" => LedgerError::Unavailable(text),
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
fn unavailable_or_corrupt(error: &sqlx::Error) -> LedgerError {
    if let sqlx::Error::Io(cause) = error
        && let Some(fault) = cause.get_ref().and_then(|inner| inner.downcast_ref::<BackendFault>())
    {
        return fault.clone().into();
    }
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
            sqlx::Error::Io(cause) => io_error::describe(cause),
            sqlx::Error::PoolTimedOut => {
                format!("the connection to SQLite was busy for {} s", ACQUIRE_TIMEOUT.as_secs())
            }
            error => error.to_string(),
        })),
    }
}

pub const SQLITE_BUSY: i64 = 5;
const SQLITE_READONLY: i64 = 8;
const SQLITE_INTERRUPT: i64 = 9;
const SQLITE_CORRUPT: i64 = 11;
const SQLITE_FULL: i64 = 13;
const SQLITE_CANTOPEN: i64 = 14;
const SQLITE_NOTADB: i64 = 26;

/// How to fix the errors that SQLite reports.
const CORRUPT: &str =
    "the file that database.url names is damaged. Stop every process that uses it and restore a back-up";
const CANTOPEN: &str = "the file that database.url names must be one that this user can read and write, in a folder that exists \
                        and where it may make files";
const NOTADB: &str = "the file that database.url names is not a SQLite database, or is encrypted. Set database.url to the \
                      database's own file, or to one that does not exist yet";

/// Classifies an error by SQLite's primary result code (<https://www.sqlite.org/rescode.html>).
fn from_sqlite(error: &dyn DatabaseError, code: Option<i64>) -> LedgerError {
    let message = error.message();
    let Some(code) = code else { return LedgerError::Unavailable(message.to_owned()) };
    let text = format!("{message} (SQLite {code})");
    match code {
        SQLITE_FULL => BackendFault::DiskFull.into(),
        SQLITE_READONLY => BackendFault::FileReadOnly.into(),
        SQLITE_INTERRUPT => {
            LedgerError::Unavailable(format!("the read was ended after {} s: ask for less", READ_MAX.as_secs()))
        }
        // BUSY, LOCKED, NOMEM, IOERR, PROTOCOL
        SQLITE_BUSY | 6 | 7 | 10 | 15 => LedgerError::Unavailable(text),
        SQLITE_CORRUPT => LedgerError::StatementFailed(format!("{text}: {CORRUPT}")),
        SQLITE_CANTOPEN => LedgerError::StatementFailed(format!("{text}: {CANTOPEN}")),
        SQLITE_NOTADB => LedgerError::StatementFailed(format!("{text}: {NOTADB}")),
        1 if message.starts_with("no such table") || message.contains("no such column") => LedgerError::NotMigrated,
        _ => LedgerError::StatementFailed(text),
    }
}

pub fn primary_code(error: &sqlx::Error) -> Option<i64> {
    let extended: i64 = error.as_database_error()?.code()?.parse().ok()?;
    Some(extended & 0xff)
}
