//! Migrations, and the rules that the database itself enforces by constraints, triggers and its schema state.

use std::path::Path;

use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::database::SchemaState;
use sqlx::migrate::Migrator;

use super::*;

on_every_database!(
    four_migrators_at_once_make_one_schema,
    four_migrators_finish_a_partial_migration,
    schema_state_is_reported,
    every_rule_is_a_check,
    a_rejected_row_leaves_no_trace,
    settings_are_changed_with_an_older_sqlite_too,
);

/// Debian's Python, whose SQLite is older than ours.
const PYTHON: &str = "/usr/bin/python3";
const CHANGE_BY_PYTHON: &str = "
import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.execute('UPDATE provider_limits SET max_requests = 9')
    database.execute('UPDATE providers SET paused = 1')
    database.execute(\"UPDATE jobs SET state = 'cancelled', holder = NULL, response_by = NULL\")
    database.execute('DELETE FROM provider_limits')
    database.execute(\"INSERT INTO providers (name, url) VALUES ('bolt', 'https://x.example/')\")
    database.execute(\"UPDATE providers SET lookup = '{}' WHERE name = 'bolt'\")
    database.execute(\"UPDATE providers SET lookup = NULL, statuses = NULL WHERE name = 'bolt'\")
    limit = 'INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES (?, ?, 3, 1000)'
    database.executemany(limit, [('bolt', 's'), ('bolt', 'm')])
    rule = 'INSERT INTO account_overrides (provider, account, limit_name, rule) VALUES (?, ?, ?, ?)'
    database.execute(rule, ('bolt', 'a', 's', 'blocked'))
    database.execute(\"DELETE FROM providers WHERE name = 'bolt'\")
    for bad in ['[]', 'no', '1']:
        try:
            database.execute('UPDATE providers SET request = ?', (bad,))
        except sqlite3.IntegrityError as refused:
            assert 'request_is_an_object' in str(refused), refused
        else:
            raise AssertionError(bad)
";

async fn settings_are_changed_with_an_older_sqlite_too(kind: Kind) {
    if kind != Kind::SqliteFile {
        return;
    }
    let fixture = Fixture::migrated(kind).await;
    // SQLite before 3.42 does not know `subsec` and yields NULL for it.
    let younger = "SELECT count(*) FROM sqlite_schema WHERE type = 'trigger' AND sql LIKE '%subsec%'";
    assert_eq!(fixture.one(younger).await, "0");
    fixture.sql("INSERT INTO providers (name, url) VALUES ('acme', 'https://x.example/')").await.unwrap();
    let limit = "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('acme', 's', 3, 1000)";
    fixture.sql(limit).await.unwrap();
    fixture.take(&job("p1")).await;
    fixture.sql("UPDATE providers SET updated_at = 0").await.unwrap();
    let file = fixture.url.strip_prefix("sqlite://").unwrap();
    let output = std::process::Command::new(PYTHON).args(["-c", CHANGE_BY_PYTHON, file]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let now = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";
    for (what, wanted) in [
        (format!("SELECT count(*) FROM providers WHERE {now} - updated_at BETWEEN 0 AND 60000"), "1"),
        (format!("SELECT count(*) FROM settings_audit WHERE {now} - at BETWEEN 0 AND 60000"), "15"),
        ("SELECT count(*) FROM provider_limits".to_owned(), "0"),
        ("SELECT count(*) FROM account_overrides".to_owned(), "0"),
        (format!("SELECT count(*) FROM job_audit WHERE {now} - at BETWEEN 0 AND 60000"), "1"),
        (format!("SELECT count(*) FROM events WHERE {now} - at BETWEEN 0 AND 60000"), "1"),
        (format!("SELECT {now} - CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"), "0"),
    ] {
        assert_eq!(fixture.one(&what).await, wanted, "{what}");
    }
}

async fn four_migrators_at_once_make_one_schema(kind: Kind) {
    // The first migrator switches a new file to WAL. That race is short, so the test repeats it.
    let rounds = if kind == Kind::SqliteFile { 20 } else { 1 };
    for _ in 0..rounds {
        four_migrators(&Fixture::empty(kind), kind).await;
    }
}

async fn four_migrators_finish_a_partial_migration(kind: Kind) {
    let fixture = Fixture::empty(kind);
    let folder = if kind == Kind::Postgres { "migrations/postgres" } else { "migrations/sqlite" };
    let migrator = Migrator::new(Path::new(folder)).await.unwrap();
    match &fixture.postgres {
        Some(pool) => migrator.run_to(1, pool).await.unwrap(),
        None => migrator.run_to(1, &fixture.database.sqlite_pool().unwrap()).await.unwrap(),
    }
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::NotMigrated);
    four_migrators(&fixture, kind).await;
}

async fn four_migrators(fixture: &Fixture, kind: Kind) {
    let together = Arc::new(tokio::sync::Barrier::new(4));
    let migrators = (0..4).map(|_| {
        // Four processes, as far as the database can tell; a database in memory has only one.
        let database = match kind {
            Kind::SqliteMemory => fixture.database.clone(),
            _ => Database::open(&fixture.url, 2).unwrap(),
        };
        let together = together.clone();
        tokio::spawn(async move {
            together.wait().await;
            database.migrate().await
        })
    });
    for result in futures_util::future::join_all(migrators).await {
        result.unwrap().unwrap();
    }
    fixture.database.migrate().await.unwrap();
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Current);
    assert_eq!(fixture.one("SELECT count(*) FROM settings_version").await, "1");
    fixture.take(&job("p1")).await;
}

async fn schema_state_is_reported(kind: Kind) {
    let fixture = Fixture::empty(kind);
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::NotMigrated);
    let error = fixture.database.claim(&job("p1"), hash(1), "a").await.unwrap_err();
    assert!(matches!(error, LedgerError::NotMigrated), "{error}");
    let error = fixture.database.load_settings().await.unwrap_err();
    assert!(matches!(error, LedgerError::NotMigrated), "{error}");
    fixture.database.migrate().await.unwrap();
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Current);
    let checksum = if kind == Kind::Postgres { "'\\x00'" } else { "x'00'" };
    let newer = format!(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (9999, 'later', true, {checksum}, 0)"
    );
    fixture.sql(&newer).await.unwrap();
    assert_eq!(fixture.database.schema_state().await.unwrap(), SchemaState::Newer);
    let error = fixture.database.migrate().await.unwrap_err().to_string();
    assert!(error.contains("9999"), "{error}");
    fixture.sql(&format!("UPDATE _sqlx_migrations SET checksum = {checksum} WHERE version = 1")).await.unwrap();
    let error = fixture.database.schema_state().await.unwrap_err().to_string();
    assert!(error.contains("modified"), "{error}");
}

/// Column assignments that each break one rule of `providers`.
const BAD_PROVIDERS: [(&str, &str); 77] = [
    ("name", "''"),
    ("name", "'Stripe'"),
    ("name", "'-stripe'"),
    ("name", "'stri pe'"),
    ("name", "'a234567890123456789012345678901234567890123456789012345678901234'"),
    ("name", "NULL"),
    ("kind", "'grpc'"),
    ("quota", "'Acme'"),
    ("enabled", "NULL"),
    ("paused", "NULL"),
    ("url", "NULL"),
    ("url", "''"),
    ("url", "'ftp://x.example/'"),
    ("url", "'https://x.example/ '"),
    ("url", "'https://x.example/${amount}'"),
    ("url", "'https://x.example/${env:KEY}/${id}'"),
    ("url", "'https://x.example/${id'"),
    ("url", "'https://${job:account}.example/x'"),
    ("url", "'https:///${account}/x'"),
    ("url", "'https://x.example${id}?a=b'"),
    ("mode", "'drop'"),
    ("slot_release", "'never'"),
    ("transit_jitter_ms", "-1"),
    ("pacing", "'odd'"),
    ("reserve_percent", "-1"),
    ("reserve_percent", "100"),
    ("store_down", "'allow'"),
    ("store_down", "'share'"),
    ("share_of", "0"),
    ("timeout_ms", "0"),
    ("timeout_ms", "-5"),
    ("timeout_ms", "600001"),
    ("send_budget_ms", "0"),
    ("send_budget_ms", "60001"),
    ("connection_max_age_ms", "999"),
    ("connection_max_age_ms", "3600001"),
    ("workers", "0"),
    ("workers", "10001"),
    ("bucket_capacity", "0"),
    ("bucket_capacity", "65536"),
    ("leak_per_second", "0"),
    ("leak_per_second", "-1.5"),
    ("leak_per_second", "1000001"),
    ("max_wait_ms", "-1"),
    ("max_wait_ms", "60001"),
    ("max_attempts", "0"),
    ("max_attempts", "1001"),
    ("max_age_s", "0"),
    ("max_age_s", "315360001"),
    ("backoff_base_ms", "0"),
    ("backoff_base_ms", "60001"),
    ("backoff_max_ms", "499"),
    ("backoff_max_ms", "86400001"),
    ("idempotency_retention_s", "0"),
    ("idempotency_retention_s", "-1"),
    ("headers", "'[]'"),
    ("headers", "'{'"),
    ("request", "'\"POST\"'"),
    ("lookup", "'1'"),
    ("statuses", "'null'"),
    ("currencies", "'{}'"),
    ("decimals", "'[]'"),
    ("decimals", "'{'"),
    ("amount_step", "'[10]'"),
    ("require", "NULL"),
    ("require", "'{}'"),
    ("require", "'[\"amount\"]'"),
    ("require", "'[\"account\", \"x\"]'"),
    ("require", "'[1]'"),
    ("cutoff", "''"),
    ("cutoff", "'18:00'"),
    ("cutoff", "'24:00 UTC'"),
    ("cutoff", "'18:60 UTC'"),
    ("cutoff", "'6:00 UTC'"),
    ("cutoff", "'18:00 '"),
    ("cutoff", "'18:00 +02:00'"),
    ("cutoff", "'18:00 Europe/Berlin '"),
];

const BAD_LIMITS: [(&str, &str); 30] = [
    ("provider", "'nobody'"),
    ("name", "''"),
    ("name", "'Per Second'"),
    ("algorithm", "'guess'"),
    ("algorithm", "'concurrency'"),
    ("algorithm = 'concurrency', window_ms = NULL, burst", "5"),
    ("max_requests", "-1"),
    ("max_requests", "1000001"),
    ("max_requests", "NULL"),
    ("window_ms", "0"),
    ("window_ms", "2678400001"),
    ("window_ms", "NULL"),
    ("offset_ms", "-1"),
    ("burst", "0"),
    ("burst", "5"),
    ("algorithm = 'fixed_window', burst", "5"),
    ("algorithm = 'token_bucket', burst = 32, window_ms", "86400000"),
    ("algorithm = 'gcra', burst = 31, window_ms", "86400000"),
    ("offset_ms", "5"),
    ("algorithm = 'fixed_window', offset_ms", "1000"),
    ("algorithm = 'gcra', offset_ms", "5"),
    ("algorithm = 'sliding_window', window_ms", "999"),
    ("scope = 'account', max_requests", "10001"),
    ("scope = 'reference', max_requests", "10001"),
    ("scope", "'world'"),
    ("applies_to", "'refund'"),
    ("shadow", "NULL"),
    ("enabled", "NULL"),
    ("then_max_requests", "5"),
    ("then_window_ms", "1000"),
];

/// The largest values of each algorithm and scope, applied one after the other.
const GOOD_LIMITS: [&str; 8] = [
    "algorithm = 'token_bucket', burst = 31, max_requests = 1, window_ms = 86400000",
    "algorithm = 'gcra', burst = 30",
    "max_requests = 0, burst = 1000000",
    "algorithm = 'fixed_window', burst = NULL, max_requests = 1000000, window_ms = 1000, offset_ms = 999",
    "algorithm = 'sliding_window', offset_ms = 0, scope = 'account'",
    "algorithm = 'sliding_log', scope = 'reference', max_requests = 10000",
    "scope = 'provider', max_requests = 1000000",
    "algorithm = 'concurrency', window_ms = NULL, scope = 'account'",
];

const BAD_ACCOUNTS: [(&str, &str); 20] = [
    ("provider", "'nobody'"),
    ("account", "''"),
    ("account", "'a b'"),
    ("limit_name", "'no-such-limit'"),
    ("rule", "'allow'"),
    ("rule", "'blocked'"),
    ("rule = 'blocked', max_requests", "NULL"),
    ("max_requests", "NULL"),
    ("max_requests", "1000001"),
    ("window_ms", "0"),
    ("burst", "0"),
    ("burst", "1000001"),
    ("rule = 'blocked', max_requests = NULL, window_ms = NULL, burst", "5"),
    ("max_requests = 1, window_ms = 86400000, burst", "32"),
    ("limit_name = NULL, weight", "0"),
    ("limit_name = NULL, weight", "1001"),
    ("weight", "2"),
    ("limit_name = NULL, weight = 2, rule", "NULL"),
    ("limit_name = NULL, max_requests = NULL, window_ms = NULL, rule", "NULL"),
    ("max_requests = NULL, window_ms = NULL, rule", "'refuse'"),
];

const GOOD_BURST: &str = "UPDATE provider_limits SET algorithm = 'token_bucket', window_ms = 86400000; \
    UPDATE account_overrides SET max_requests = 1, window_ms = 86400000, burst = 31";
/// Of a limit as the last one makes it.
const GOOD_ACCOUNTS: [&str; 4] = [
    "max_requests = 0, burst = NULL, window_ms = NULL",
    "limit_name = NULL, weight = 1000",
    "rule = NULL, max_requests = NULL, weight = 2",
    "rule = 'refuse', weight = 1",
];

const BAD_JOBS: [(&str, &str); 34] = [
    ("id", "'with space'"),
    ("id", "''"),
    ("id", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("provider", "'Stripe'"),
    ("provider", "''"),
    ("provider", "'-stripe'"),
    ("provider", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("idempotency_key", "'a/b'"),
    ("idempotency_key", "''"),
    ("idempotency_key", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("content_hash", "'{short}'"),
    ("amount", "0"),
    ("amount", "-1"),
    ("currency", "'eur'"),
    ("currency", "'EURO'"),
    ("currency", "'EU'"),
    ("account", "''"),
    ("account", "'a b'"),
    ("account", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("cost", "0"),
    ("cost", "1001"),
    ("priority", "10"),
    ("priority", "-1"),
    ("state", "'done'"),
    ("state", "'unknown'"),
    ("state", "'sending'"),
    ("state", "'succeeded'"),
    ("attempts", "-1"),
    ("fence", "-1"),
    ("holder = NULL, response_by", "created_at"),
    ("frozen_url", "'https://x.example/'"),
    ("wait_reason", "'waits for limit all'"),
    ("wait_reason", "'limit'"),
    ("wait_limit", "'all'"),
];

/// The longest and the shortest values that the rules allow.
const GOOD_JOBS: [(&str, &str); 7] = [
    ("provider", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("provider", "'p'"),
    ("idempotency_key", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("idempotency_key", "'-'"),
    ("account", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
    ("account", "'_'"),
    ("id", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"),
];

async fn every_rule_is_a_check(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let limit = "INSERT INTO provider_limits (provider, name, max_requests, window_ms, scope) VALUES ('stripe', 'all', 1, 1000, 'account')";
    fixture.sql(limit).await.unwrap();
    let account = "INSERT INTO account_overrides (provider, account, limit_name, rule, max_requests, window_ms) \
                   VALUES ('stripe', 'acct_1', 'all', 'limit', 5, 1000)";
    fixture.sql(account).await.unwrap();
    assert!(fixture.sql(account).await.is_err(), "two rules for one account and limit");
    assert!(fixture.sql("DELETE FROM provider_limits").await.is_err(), "an account rule names the limit");
    fixture.take(&job("p1")).await;
    // A provider alone: a changed name breaks the rule instead of a foreign key.
    fixture.sql("INSERT INTO providers (name, url) VALUES ('alone', 'https://x.example/')").await.unwrap();
    let tables = [
        ("providers WHERE name = 'alone'", &BAD_PROVIDERS[..]),
        ("provider_limits WHERE name = 'all'", &BAD_LIMITS[..]),
        ("account_overrides WHERE account = 'acct_1'", &BAD_ACCOUNTS[..]),
        ("jobs WHERE id = 'p1'", &BAD_JOBS[..]),
    ];
    for (table, bad) in tables {
        let (name, condition) = table.split_once(" WHERE ").unwrap();
        for (column, value) in bad {
            let value = if kind == Kind::Postgres {
                value.replace("{short}", "\\x00")
            } else {
                value.replace("'{short}'", "x'00'")
            };
            let update = format!("UPDATE {name} SET {column} = {value} WHERE {condition}");
            // Without the rule that a payment's content never changes.
            let refused =
                if name == "jobs" { fixture.without_constraints(&update).await } else { fixture.sql(&update).await };
            let error = refused.expect_err(&update);
            let meant = ["constraint", "violates", "json", "mismatch"].iter().any(|word| error.contains(word));
            assert!(meant, "{update}: {error}");
        }
    }
    // Values that these rules allow.
    for url in [
        "https://x.example/p/${reference}/captures?a=${job:account}&b=$",
        "https://x.example?k=${idempotency_key}${id}",
    ] {
        fixture.sql(&format!("UPDATE providers SET url = '{url}' WHERE name = 'alone'")).await.unwrap();
        let copy = url.replace("x.example", "y.example");
        fixture
            .sql(&format!("INSERT INTO providers (name, url) VALUES ('with-{}', '{copy}')", copy.len()))
            .await
            .unwrap();
    }
    fixture.sql(GOOD_BURST).await.unwrap();
    for change in GOOD_LIMITS {
        let update = format!("UPDATE provider_limits SET {change} WHERE name = 'all'");
        fixture.sql(&update).await.unwrap_or_else(|error| panic!("{update}: {error}"));
    }
    for change in GOOD_ACCOUNTS {
        let update = format!("UPDATE account_overrides SET {change} WHERE account = 'acct_1'");
        fixture.sql(&update).await.unwrap_or_else(|error| panic!("{update}: {error}"));
    }
    for cutoff in ["00:00 UTC", "23:59 America/Argentina/Buenos_Aires", "08:30 Etc/GMT+12"] {
        let update = format!("UPDATE providers SET cutoff = '{cutoff}'");
        fixture.sql(&update).await.unwrap_or_else(|error| panic!("{update}: {error}"));
    }
    for require in ["[\"account\"]", "[\"reference\", \"account\"]", "[]"] {
        fixture
            .sql(&format!("UPDATE providers SET require = '{require}'"))
            .await
            .unwrap_or_else(|error| panic!("{error}"));
    }
    for (column, value) in GOOD_JOBS {
        let update = format!("UPDATE jobs SET {column} = {value}");
        fixture.without_constraints(&update).await.unwrap_or_else(|error| panic!("{update}: {error}"));
    }
    every_rule_of_the_dialect_is_a_check(&fixture, kind).await;
}

async fn every_rule_of_the_dialect_is_a_check(fixture: &Fixture, kind: Kind) {
    if kind == Kind::Postgres {
        for change in ["leak_per_second = 'NaN'", "leak_per_second = 'Infinity'", r#"headers = '{"a": 1}'"#] {
            let update = format!("UPDATE providers SET {change}");
            assert!(fixture.sql(&update).await.unwrap_err().contains("violates check constraint"), "{update}");
        }
        assert!(fixture.sql("TRUNCATE account_overrides").await.unwrap_err().contains("not be audited"));
    } else {
        for change in ["enabled = 2", "workers = 'many'", "workers = 1.5"] {
            assert!(fixture.sql(&format!("UPDATE providers SET {change}")).await.is_err(), "{change}");
        }
        let error = fixture.sql("UPDATE providers SET version = 7000").await.unwrap_err();
        assert!(error.contains("set by triggers"), "{error}");
    }
}

async fn a_rejected_row_leaves_no_trace(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let before = fixture.database.settings_version().await.unwrap();
    let bad = "INSERT INTO providers (name, url, workers) VALUES ('stripe', 'https://x.example/', 0)";
    fixture.sql(bad).await.unwrap_err();
    assert_eq!(fixture.database.settings_version().await.unwrap(), before);
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, "0");
}
