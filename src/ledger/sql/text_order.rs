//! The order in which the database compares texts: byte by byte, as the migrations say and the program does.
//!
//! In the order of a language, an index does not find its rows any more once an upgrade of the operating system changes
//! that order. Then a payment that is published again would be a new one.

use super::dialect::{Dialect, Template};
use super::engine::args;
use super::result::from_row;
use super::texts;
use crate::ledger::LedgerError;
use crate::ledger::database::{ChangedCollation, Database, ForeignCollation, TextOrder};
use crate::ledger::migrations::{POSTGRES, SQLITE, created_names};

/// Columns, indexes and domains of the schema that compare texts in another way; $1 has the names of tables and domains.
static FOREIGN: Template = Template::by_dialect(
    "WITH ours AS MATERIALIZED (\
             SELECT value AS name, to_regclass(value) AS relation, to_regtype(value) AS domain FROM ({texts:$1}) AS names), \
         found (name, oid) AS (\
             SELECT 'column ' || ours.name || '.' || attname, attcollation \
             FROM ours JOIN pg_attribute ON attrelid = ours.relation WHERE attnum > 0 AND NOT attisdropped \
             UNION ALL \
             SELECT 'index ' || indexrelid::regclass::text, others.oid FROM ours \
                 JOIN pg_index ON indrelid = ours.relation, unnest(indcollation::oid[]) AS others (oid) \
             UNION ALL \
             SELECT 'domain ' || ours.name, typcollation FROM ours JOIN pg_type ON pg_type.oid = ours.domain \
             WHERE typtype = 'd') \
     SELECT DISTINCT found.name, collname::text AS collation FROM found \
         JOIN pg_collation ON pg_collation.oid = found.oid \
     WHERE found.oid <> 'pg_catalog.\"C\"'::regcollation ORDER BY 1, 2",
    // A column or an index says its collation only if it has one of its own.
    "SELECT type || ' ' || name AS name, \
         CASE WHEN sql LIKE '%COLLATE NOCASE%' THEN 'NOCASE' ELSE 'its own' END AS collation FROM sqlite_schema \
     WHERE tbl_name IN ({texts:$1}) AND type IN ('table', 'index') AND sql LIKE '%COLLATE%' ORDER BY 1",
);

/// Collations whose order may have changed since an index was built: of the database, and of its other tables.
static CHANGED: Template = Template::new(
    "WITH used AS MATERIALIZED (\
             SELECT oid, collname, collversion FROM pg_collation WHERE collversion IS NOT NULL AND oid IN (\
                 SELECT attcollation FROM pg_attribute UNION ALL \
                 SELECT unnest(indcollation::oid[]) FROM pg_index UNION ALL SELECT typcollation FROM pg_type)), \
         versions (name, built, present) AS (\
             SELECT 'the database', datcollversion, pg_database_collation_actual_version(oid) FROM pg_database \
             WHERE datname = current_database() \
             UNION ALL SELECT 'collation ' || collname, collversion, pg_collation_actual_version(oid) FROM used) \
     SELECT name, built, present FROM versions WHERE built <> present ORDER BY 1",
);

from_row!(row => ForeignCollation { name, collation });
from_row!(row => ChangedCollation { name, built, present });

impl Database {
    /// How the database compares texts.
    pub async fn text_order(&self) -> Result<TextOrder, LedgerError> {
        let migrator = match self.dialect() {
            Dialect::Postgres => &POSTGRES,
            Dialect::Sqlite => &SQLITE,
        };
        let names = texts(created_names(migrator));
        let foreign = self.query_as(&FOREIGN, args![names]).await?;
        let changed = match self.dialect() {
            Dialect::Postgres => self.query_as(&CHANGED, []).await?,
            Dialect::Sqlite => Vec::new(),
        };
        Ok(TextOrder { foreign, changed })
    }
}
