//! Identity columns whose sequence is behind their table. A logical replica has the rows and not the sequences: after a
//! switch-over, each insert fails until its sequence has passed the table.

use super::dialect::Dialect;
use super::engine::{Args, Sql};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// A sequence compared with its column's largest value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceState {
    pub table: String,
    pub column: String,
    pub sequence: String,
    /// `None`: this role may not read the sequence.
    pub last: Option<i64>,
    /// 0 for an empty table.
    pub max: i64,
}

impl SequenceState {
    /// Whether the next insert fails.
    pub fn is_behind(&self) -> bool {
        self.last.is_some_and(|last| last < self.max)
    }
}

/// A sequence that was never used has no last value.
const SEQUENCES: &str = "SELECT owner.refobjid::regclass::text AS table_name, owned.attname::text AS column_name, \
         sequences.oid::regclass::text AS sequence, \
         CASE WHEN has_sequence_privilege(sequences.oid, 'SELECT') \
             THEN COALESCE(pg_sequence_last_value(sequences.oid), 0) END AS last \
     FROM pg_class AS sequences \
     JOIN pg_depend AS owner ON owner.objid = sequences.oid AND owner.classid = 'pg_class'::regclass \
         AND owner.refclassid = 'pg_class'::regclass AND owner.deptype IN ('a', 'i') \
     JOIN pg_attribute AS owned ON owned.attrelid = owner.refobjid AND owned.attnum = owner.refobjsubid \
     WHERE sequences.relkind = 'S' AND sequences.relnamespace = current_schema()::regnamespace ORDER BY 1, 2";

impl Database {
    /// The sequences of all identity columns; none for SQLite, whose keys follow their table.
    pub async fn sequences(&self) -> Result<Vec<SequenceState>, LedgerError> {
        if self.dialect() != Dialect::Postgres {
            return Ok(Vec::new());
        }
        let mut states = Vec::new();
        for row in self.engine.query(&Sql::from(SEQUENCES), Args::from([])).await? {
            let (table, column): (String, String) = (row.get("table_name")?, row.get("column_name")?);
            let max = format!("SELECT COALESCE(max(\"{column}\"), 0) AS max FROM {table}");
            let rows = self.engine.query(&Sql::from(max), Args::from([])).await?;
            let max = rows.first().map(|row| row.get("max")).transpose()?.unwrap_or_default();
            states.push(SequenceState { table, column, sequence: row.get("sequence")?, last: row.get("last")?, max });
        }
        Ok(states)
    }
}
