//! Conversion of many writes' arguments to columns, and of the returned rows back to writes.
//!
//! All writes of a batch need the same arguments in the same order, with the job's id first. Other writes cannot be
//! batched.

use std::collections::HashMap;

use super::engine::{Args, Value};
use super::row::SqlRow;
use crate::ledger::LedgerError;

/// One argument of all writes.
#[derive(Debug, PartialEq)]
pub enum Array {
    Ints(Vec<Option<i64>>),
    Reals(Vec<Option<f64>>),
    Bools(Vec<Option<bool>>),
    Texts(Vec<Option<String>>),
    Bytes(Vec<Vec<u8>>),
}

impl Array {
    fn starting_with(value: &Value, room: usize) -> Self {
        match value {
            Value::Int(_) => Self::Ints(Vec::with_capacity(room)),
            Value::Real(_) => Self::Reals(Vec::with_capacity(room)),
            Value::Bool(_) => Self::Bools(Vec::with_capacity(room)),
            Value::Text(_) => Self::Texts(Vec::with_capacity(room)),
            Value::Bytes(_) => Self::Bytes(Vec::with_capacity(room)),
        }
    }

    /// `None` for a value of another type: a shorter column would be filled up with NULLs.
    fn push(&mut self, value: &Value) -> Option<()> {
        match (self, value) {
            (Self::Ints(column), Value::Int(value)) => column.push(*value),
            (Self::Reals(column), Value::Real(value)) => column.push(*value),
            (Self::Bools(column), Value::Bool(value)) => column.push(*value),
            (Self::Texts(column), Value::Text(value)) => column.push(value.clone()),
            (Self::Bytes(column), Value::Bytes(value)) => column.push(value.clone()),
            _ => return None,
        }
        Some(())
    }
}

/// The columns; `None` when the writes differ in their arguments.
pub fn columns(units: &[Args]) -> Option<Vec<Array>> {
    let like = units.first()?;
    let mut columns: Vec<Array> = like.iter().map(|value| Array::starting_with(value, units.len())).collect();
    for unit in units {
        if unit.len() != columns.len() {
            return None;
        }
        for (column, value) in columns.iter_mut().zip(&**unit) {
            column.push(value)?;
        }
    }
    Some(columns)
}

/// The job's id: the first argument of its write.
pub fn job_of(args: &Args) -> Option<&str> {
    match args.first() {
        Some(Value::Text(id)) => id.as_deref(),
        _ => None,
    }
}

/// The row of each write, by its column `id`; `None` for a write without a row.
///
/// # Errors
/// [`LedgerError::Corrupt`] when a row has no `id`.
pub fn rows_in_order(units: &[Args], rows: Vec<SqlRow>) -> Result<Vec<Option<SqlRow>>, LedgerError> {
    let mut by_job = HashMap::with_capacity(rows.len());
    for row in rows {
        by_job.insert(row.text("id")?, row);
    }
    Ok(units.iter().map(|unit| by_job.remove(job_of(unit)?)).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ledger::sql::row::SqlValue;

    #[test]
    fn requests_become_column_arrays() {
        let units: [Args; 2] = [
            Arc::from(["a".into(), 1_i64.into(), true.into()]),
            Arc::from(["b".into(), Value::Int(None), false.into()]),
        ];
        let expected = vec![
            Array::Texts(vec![Some("a".to_owned()), Some("b".to_owned())]),
            Array::Ints(vec![Some(1), None]),
            Array::Bools(vec![Some(true), Some(false)]),
        ];
        assert_eq!(columns(&units), Some(expected));
    }

    #[test]
    fn unlike_requests_are_not_batched() {
        let alike: Args = Arc::from(["a".into(), 1_i64.into()]);
        let other: [Args; 2] = [Arc::from(["b".into()]), Arc::from(["b".into(), "1".into()])];
        for other in other {
            assert_eq!(columns(&[alike.clone(), other]), None);
        }
        assert_eq!(columns(&[]), None);
    }

    #[test]
    fn each_request_gets_its_own_row() {
        let row = |id: &str| SqlRow::new(Arc::from(["id".to_owned()]), vec![SqlValue::Text(id.to_owned())]);
        let units: [Args; 3] = [Arc::from(["a".into()]), Arc::from(["b".into()]), Arc::from(["c".into()])];
        let rows = rows_in_order(&units, vec![row("c"), row("a")]).unwrap();
        assert_eq!(rows, [Some(row("a")), None, Some(row("c"))]);
        assert!(rows_in_order(&units, vec![SqlRow::new(Arc::from([]), Vec::new())]).is_err());
    }
}
