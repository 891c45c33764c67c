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
        "0003_limiter_authority",
        "0004_unknown_outcomes",
        "0005_sweeper",
        "0006_operators",
        "0007_worker_reports",
        "0008_settings_hint",
        "0009_jobs_by_account",
        "0010_clock_witness",
        "0011_job_words",
        "0012_one_payment_per_charge",
        "0013_last_wait",
        "0014_words_judged_cheaply",
        "0015_charge_found_by_reference_and_provider",
        "0016_finished_jobs",
        "0017_credential_of_what_may_be_charged",
        "0018_sql_on_jobs_in_hand",
        "0019_rejected_messages_by_job",
        "0020_wait_begun",
        "0021_jobs_parked_for_limits",
        "0022_raised_version_audited",
        "0023_audit_of_a_raised_version_in_its_own_schema",
        "0024_attempts_of_accounts_and_references",
        "0025_require_resume_and_burst",
        "0026_jobs_parked_for_named_waits",
        "0027_connections",
        "0028_placeholders_of_url",
        "0031_copies_and_stuck_events",
        "0032_outcome_events_by_try",
        "0034_deployment_id",
        "0035_bounded_requests",
        "0036_rights",
        "0037_final_states",
        "0038_jobs_unknown_by_wake",
        "0039_jobs_with_a_message_left",
        "0040_references_are_emptied",
        "0041_attempts_with_a_reference",
        "0042_finite_instants_of_jobs",
        "0043_finite_instants_of_attempts",
        "0044_finite_instants_of_outcome_events",
        "0045_finite_instants_of_other_tables",
        "0046_infinite_instants_are_repaired",
        "0047_erasure",
        "0048_infinite_instants_of_jobs_are_repaired",
        "0049_wait_columns",
        "0050_wait_reasons_of_jobs",
        "0051_wait_reasons_are_codes",
        "0052_jobs_waiting_for_limits",
        "0053_jobs_waiting_for_providers",
        "0054_indexes_of_sentences",
        "0055_concurrency_limits",
        "0056_flows",
        "0057_jobs_in_backlog",
        "0058_account_weights",
        "0059_order_of_accounts",
        "0060_jobs_in_order",
    ])
});

pub static SQLITE: LazyLock<Migrator> = LazyLock::new(|| {
    migrator(files!["sqlite":
        "0001_settings",
        "0002_ledger",
        "0003_embedded_queue",
        "0004_limiter_authority",
        "0005_unknown_outcomes",
        "0006_sweeper",
        "0007_operators",
        "0008_worker_reports",
        "0009_settings_person",
        "0010_jobs_by_account",
        "0011_clock_witness",
        "0012_one_payment_per_charge",
        "0013_clock_of_any_sqlite",
        "0014_last_wait",
        "0015_charge_found_by_reference_and_provider",
        "0016_finished_jobs",
        "0017_credential_of_what_may_be_charged",
        "0018_providers_by_any_sqlite",
        "0019_sql_on_jobs_in_hand",
        "0020_rejected_messages_by_job",
        "0021_wait_begun",
        "0022_jobs_parked_for_limits",
        "0023_attempts_of_accounts_and_references",
        "0024_require_resume_and_burst",
        "0025_jobs_parked_for_named_waits",
        "0026_connections",
        "0027_placeholders_of_url",
        "0030_copies_and_stuck_events",
        "0033_deployment_id",
        "0034_bounded_requests",
        "0035_final_states",
        "0036_jobs_unknown_by_wake",
        "0037_jobs_with_a_message_left",
        "0038_references_are_emptied",
        "0039_finite_instants",
        "0040_erasure",
        "0041_wait_reasons",
        "0042_concurrency_limits",
        "0043_flows",
        "0044_account_weights",
        "0045_order_of_accounts",
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
pub fn built_concurrently() -> impl Iterator<Item = (i64, &'static str)> {
    let built = |migration: &'static Migration| {
        let (_, after) = migration.sql.as_str().split_once(CONCURRENTLY)?;
        Some((migration.version, after.split_whitespace().next()?))
    };
    POSTGRES.iter().filter(|migration| migration.no_tx).filter_map(built)
}

/// Whether this file builds an index concurrently.
pub fn is_built_concurrently(version: i64) -> bool {
    built_concurrently().any(|(built, _)| built == version)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// PostgreSQL runs several statements in one transaction, and no index can be built concurrently inside one.
    #[test]
    fn concurrent_index_is_alone_in_its_file() {
        let alone: Vec<i64> = built_concurrently().map(|(version, _)| version).collect();
        let beside: Vec<i64> =
            POSTGRES.iter().filter(|migration| migration.no_tx).map(|migration| migration.version).collect();
        assert_eq!((alone, beside.is_empty()), (beside, false));
        for migration in POSTGRES.iter().filter(|migration| migration.no_tx) {
            assert_eq!(migration.sql.as_str().matches(';').count(), 1, "{}", migration.description);
        }
    }

    /// Or payments wait while other tables are read from end to end.
    #[test]
    fn disabling_a_jobs_trigger_touches_only_jobs() {
        let mut checked = 0;
        for migration in POSTGRES.iter().filter(|it| it.sql.as_str().contains("ALTER TABLE jobs DISABLE TRIGGER")) {
            let written = migration.sql.as_str().split("UPDATE ").skip(1).map(|rest| rest.split_whitespace().next());
            let others: Vec<_> = written.filter(|table| *table != Some("jobs")).collect();
            assert_eq!(others, [], "{}", migration.description);
            checked += 1;
        }
        assert_eq!(checked, 1);
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
