//! Upgrade from each released schema: it becomes the schema of a new database, and its rows stay as they are.
//!
//! Each release leaves a dump in `tests/contract/ledger/released/`, with rows in every table. It holds the checksums of the
//! release's migrations. So a change of a released file fails here: add a file instead.

use std::collections::BTreeMap;
use std::path::Path;

use sluicegate::domain::job::Identifier;
use sluicegate::ledger::database::SchemaState;
use sluicegate::ledger::operator::JobFilter;

use super::*;

on_every_database!(a_released_database_is_upgraded);

const RELEASES: [&str; 1] = ["0.1.0"];

async fn a_released_database_is_upgraded(kind: Kind) {
    for release in RELEASES {
        let fixture = Fixture::empty(kind);
        fixture.load(release).await;
        let tables = fixture.tables().await;
        let before = fixture.all_rows(&tables).await;
        let empty: Vec<_> = before.iter().filter(|(_, rows)| rows.is_empty()).map(|(table, _)| table).collect();
        assert!(empty.is_empty() && tables.len() > 15, "{release}: no rows of {empty:?} in {tables:?}");

        fixture.database.migrate().await.unwrap();
        assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Current, "{release}");
        let (upgraded, created) = (fixture.schema().await, Fixture::migrated(kind).await.schema().await);
        for (upgraded, created) in upgraded.iter().zip(&created) {
            assert_eq!(upgraded, created, "{release}");
        }
        assert_eq!(upgraded.len(), created.len(), "{release}");
        assert_eq!(fixture.all_rows(&tables).await, before, "{release}");
        fixture.is_readable().await;
    }
}

fn load_dump(database: &str, dump: &Path) {
    let loaded = Postgres::shared().psql(database).arg("-f").arg(dump).output().unwrap();
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
}

impl Fixture {
    /// Creates the database as this release left it.
    async fn load(&self, release: &str) {
        let database = if self.postgres.is_some() { "postgres" } else { "sqlite" };
        let dump = format!("tests/contract/ledger/released/{release}.{database}.sql");
        if database == "sqlite" {
            return self.sql(&std::fs::read_to_string(dump).unwrap()).await.unwrap();
        }
        load_dump(self.database_name(), Path::new(&dump));
    }

    fn database_name(&self) -> &str {
        self.url.rsplit('/').next().unwrap()
    }

    /// Every table that holds data, with its columns.
    async fn tables(&self) -> BTreeMap<String, Vec<String>> {
        let columns = match self.postgres {
            Some(_) => {
                "SELECT table_name || '.' || column_name FROM information_schema.columns \
                 WHERE table_schema = 'public' AND table_name <> '_sqlx_migrations' ORDER BY ordinal_position"
            }
            None => {
                "SELECT t.name || '.' || c.name FROM sqlite_schema AS t JOIN pragma_table_info(t.name) AS c \
                 WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite%' AND t.name <> '_sqlx_migrations' ORDER BY c.cid"
            }
        };
        let mut tables: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for column in self.column(columns).await.into_iter().flatten() {
            let (table, column) = column.split_once('.').unwrap();
            tables.entry(table.to_owned()).or_default().push(column.to_owned());
        }
        tables
    }

    /// The rows of these tables, as text.
    async fn all_rows(&self, tables: &BTreeMap<String, Vec<String>>) -> BTreeMap<String, Vec<Option<String>>> {
        let quote = if self.postgres.is_some() { "quote_nullable" } else { "quote" };
        let mut rows = BTreeMap::new();
        for (table, columns) in tables {
            let columns: Vec<_> = columns.iter().map(|column| format!("{quote}(\"{column}\")")).collect();
            let select = format!("SELECT {} FROM {table} ORDER BY 1", columns.join(" || ', ' || "));
            rows.insert(table.clone(), self.column(&select).await);
        }
        rows
    }

    /// Every object of the schema, as its database writes it.
    async fn schema(&self) -> Vec<String> {
        if self.postgres.is_some() {
            // PostgreSQL writes a condition that it read from a dump with fewer brackets. So each is read from one.
            let (server, copy) = (Postgres::shared(), next_database());
            server.create_database(&copy);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), server.dump_schema(self.database_name())).unwrap();
            load_dump(&copy, file.path());
            return server.dump_schema(&copy).split("\n\n").map(str::to_owned).collect();
        }
        let objects = "SELECT type || ' ' || tbl_name || ' ' || name || ' ' || COALESCE(sql, '') FROM sqlite_schema \
                       ORDER BY type, name";
        self.column(objects).await.into_iter().flatten().collect()
    }

    /// This program reads the payments and the settings.
    async fn is_readable(&self) {
        let operator = self.database.clone();
        let page = operator.list_jobs(&JobFilter::default(), None, 100).await.unwrap();
        assert_eq!((page.unreadable, page.jobs.is_empty()), (vec![], false));
        for line in page.jobs {
            let details = operator.job_details(&Identifier::new(&line.id).unwrap()).await.unwrap();
            assert!(details.is_some(), "{}", line.id);
        }
        let settings = self.database.load_settings().await.unwrap();
        assert!(!settings.providers.is_empty());
    }
}
