//! A result row without its driver: cells by column name, each read with the type that the schema promises.
//!
//! A cell of another type, or out of range, is [`LedgerError::Corrupt`] with the column's name and never its value.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::operator::UnreadableRow;

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
