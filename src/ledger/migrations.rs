//! The schema's migrations, compiled into the program, as one `Migrator` for each database.
//!
//! sqlx's macro is not used: with it, every build would compile sqlx and both of its drivers a second time, for the
//! compiler.

use std::borrow::Cow;
use std::sync::LazyLock;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// The names and texts of one directory's files.
macro_rules! files {
    ($directory:literal: $($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../migrations/", $directory, "/", $name, ".sql")))),+]
    };
}

pub static POSTGRES: LazyLock<Migrator> = LazyLock::new(|| {
    migrator(files!["postgres":
        "0001_settings",
        "0002_ledger",
        "0003_limiter",
        "0004_operators",
        "0005_workers",
    ])
});

pub static SQLITE: LazyLock<Migrator> = LazyLock::new(|| {
    migrator(files!["sqlite":
        "0001_settings",
        "0002_ledger",
        "0003_limiter",
        "0004_operators",
        "0005_workers",
        "0006_queue",
    ])
});

/// Builds the migrator as sqlx does from a directory: number, description and text of each file.
fn migrator(files: &[(&'static str, &'static str)]) -> Migrator {
    let migration = |(name, sql): &(&'static str, &'static str)| {
        let (number, words) = name.split_once('_').unwrap_or((name, ""));
        Migration::new(
            number.parse().unwrap_or(0),
            Cow::Owned(words.replace('_', " ")),
            MigrationType::Simple,
            sql.into_sql_str(),
            sql.starts_with("-- no-transaction"),
        )
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// If an earlier run built the index but did not record the migration, the index exists already.
const CONCURRENTLY: &str = "CREATE INDEX CONCURRENTLY IF NOT EXISTS ";

/// The indexes that PostgreSQL builds concurrently with payments, with the numbers of their files.
pub fn built_concurrently(migrator: &Migrator) -> impl Iterator<Item = (i64, &str)> {
    migrator.iter().filter(|migration| migration.no_tx).filter_map(|migration| {
        let (_, after) = migration.sql.as_str().split_once(CONCURRENTLY)?;
        Some((migration.version, after.split_whitespace().next()?))
    })
}

/// Whether this file builds an index concurrently.
pub fn is_built_concurrently(migrator: &Migrator, version: i64) -> bool {
    built_concurrently(migrator).any(|(built, _)| built == version)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Rules of `migrations/README.md` that these migrations break.
    fn broken_rules(migrator: &Migrator) -> Vec<String> {
        let mut broken = Vec::new();
        for migration in migrator.iter() {
            let (number, sql) = (migration.version, migration.sql.as_str());
            // PostgreSQL runs several statements in one transaction, and no index can be built concurrently inside one.
            let is_alone = is_built_concurrently(migrator, number) && sql.matches(';').count() == 1;
            if migration.no_tx && !is_alone {
                broken.push(format!("{number}: a file without transaction builds one index and does nothing else"));
            }
            // Or payments wait while other tables are read from end to end.
            let mut written = sql.split("UPDATE ").skip(1).filter_map(|rest| rest.split_whitespace().next());
            if sql.contains("ALTER TABLE jobs DISABLE TRIGGER") && written.any(|table| table != "jobs") {
                broken.push(format!("{number}: a file that disables a trigger of jobs writes no other table"));
            }
        }
        broken
    }

    #[test]
    fn long_locks_are_avoided() {
        assert_eq!(broken_rules(&POSTGRES), Vec::<String>::new());
        assert!(SQLITE.iter().all(|migration| !migration.no_tx), "SQLite's run is one transaction");
        let index = "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON jobs (state);";
        let good = "ALTER TABLE jobs DISABLE TRIGGER a; UPDATE jobs SET cost = 1; ALTER TABLE jobs ENABLE TRIGGER a;";
        let good = migrator(&[("0006_index", index), ("0007_trigger", good)]);
        assert_eq!(broken_rules(&good), Vec::<String>::new());
        assert_eq!(built_concurrently(&good).collect::<Vec<_>>(), [(6, "i")]);
        for bad in [
            "-- no-transaction\nCREATE INDEX CONCURRENTLY i ON jobs (state);",
            "-- no-transaction\nUPDATE jobs SET cost = 1;",
            "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS i ON jobs (state); SELECT 1;",
            "ALTER TABLE jobs DISABLE TRIGGER a; UPDATE attempts SET detail = '';",
        ] {
            assert_eq!(broken_rules(&migrator(&[("0006_bad", bad)])).len(), 1, "{bad}");
        }
    }

    #[tokio::test]
    async fn embedded_migrations_match_the_files() {
        for (kind, ours) in [("postgres", &POSTGRES), ("sqlite", &SQLITE)] {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(kind);
            let read = Migrator::new(directory).await.unwrap();
            let summaries = |migrator: &Migrator| -> Vec<(i64, String, bool, Vec<u8>)> {
                let summary = |migration: &Migration| {
                    (migration.version, migration.description.to_string(), migration.no_tx, migration.checksum.to_vec())
                };
                migrator.iter().map(summary).collect()
            };
            assert_eq!(summaries(ours), summaries(&read), "{kind}");
        }
    }
}
