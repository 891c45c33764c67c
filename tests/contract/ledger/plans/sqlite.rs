//! Plans of SQLite, which explains only a given text: sqlx logs each statement as it runs, and the test explains it
//! afterwards.

use std::collections::HashSet;
use std::sync::Mutex;

use sqlx::{ConnectOptions, SqliteConnection};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::super::*;
use super::work::Working;
use super::{Access, Explained, LARGE, judge};

/// Tables that may be scanned in full: small ones, and rows that a statement made itself.
const SMALL: [&str; 50] = [
    "json_each",
    "held",
    "names",
    "e",
    "CONSTANT",
    "providers",
    "provider_limits",
    "account_overrides",
    "limiter_authority",
    "worker_reports",
    "workers",
    "sharing",
    "used",
    "longest",
    "lately",
    "lanes",
    "words",
    "finished_jobs",
    "finished_mark",
    "commit_checks",
    "counted",
    "page",
    "matched",
    "arm_1",
    "arm_2",
    "arm_3",
    "within",
    "own",
    "latest",
    "flow_picks",
    "flow",
    "served",
    "added",
    "both_sides",
    "front",
    "candidates",
    "quanta",
    "sums",
    "picked",
    "chosen",
    "history_runs",
    "history_marks",
    "given",
    "sampled",
    "decision_batches",
    "decision_batch_refusals",
    "payment_refusals",
    "batch",
    "turn",
    "old",
];

const LAST: &str = "SELECT 1";
/// Statements that read no table, and the test's own.
const PLAIN: [&str; 6] = ["BEGIN", "COMMIT", "ROLLBACK", "PRAGMA", "EXPLAIN", LAST];
/// Target under which sqlx logs statements.
const STATEMENTS: &str = "sqlx::query";

#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Texts {
    fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
        // Connections of other tests log theirs as `debug`.
        metadata.target() == STATEMENTS && *metadata.level() == tracing::Level::TRACE
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        self.0.lock().unwrap().push(if text.statement.is_empty() { text.summary } else { text.statement });
    }
}

impl Texts {
    /// Waits until every statement is logged. sqlx logs a statement when its thread is done with it: perhaps after the
    /// response, but before the next one.
    async fn settle(&self, fixture: &Fixture) {
        fixture.sql(LAST).await.unwrap();
    }
}

/// A short statement is its own summary.
#[derive(Default)]
struct Text {
    summary: String,
    statement: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "summary" => self.summary = value.to_owned(),
            "db.statement" => self.statement = value.trim().to_owned(),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

struct Asked {
    texts: Texts,
    known: HashSet<(&'static str, String)>,
}

impl Explained for Asked {
    async fn accesses(&mut self, fixture: &Fixture, during: &'static str) -> Vec<Access> {
        self.texts.settle(fixture).await;
        let texts: Vec<String> = std::mem::take(&mut *self.texts.0.lock().unwrap());
        let mut found = Vec::new();
        for sql in texts {
            let plain = PLAIN.iter().any(|word| sql.starts_with(word));
            if plain || !self.known.insert((during, sql.clone())) {
                continue;
            }
            let pool = fixture.database.sqlite_pool().unwrap();
            let mut connection = pool.acquire().await.unwrap();
            found.extend(plan(&mut connection, &sql).await.iter().filter_map(|line| access(line, during, &sql)));
        }
        found
    }
}

async fn plan(connection: &mut SqliteConnection, sql: &str) -> Vec<String> {
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
    let rows = sqlx::query(explain).fetch_all(connection).await.unwrap_or_else(|error| panic!("{error}: {sql}"));
    rows.iter().map(|row| row.get("detail")).collect()
}

/// Parses `SEARCH jobs USING INDEX x (id=?)`, `SCAN other USING COVERING INDEX x` and `SCAN jobs`; no other line reads
/// a table. A scan may name a table by its alias, so any name that is not known to be small counts as large.
fn access(line: &str, during: &'static str, sql: &str) -> Option<Access> {
    let (verb, rest) = line.split_once(' ')?;
    let table = rest.split_whitespace().next()?;
    let sought = match verb {
        // An index without a condition is read from one end to the other.
        "SEARCH" => rest.contains('('),
        "SCAN" => false,
        _ => return None,
    };
    if SMALL.contains(&table) || table.starts_with("(subquery-") || (sought && !LARGE.contains(&table)) {
        return None;
    }
    let index = rest.split_once("INDEX ").and_then(|(_, rest)| rest.split_whitespace().next());
    Some(Access {
        during,
        sql: sql.to_owned(),
        table: table.to_owned(),
        index: index.map(str::to_owned),
        sought,
        rows: None,
    })
}

async fn worked_on(texts: Texts, analysed: bool, run: &'static str) -> Vec<Access> {
    let fixture = Fixture::empty(Kind::SqliteFile);
    let pool = fixture.database.sqlite_pool().unwrap();
    let options = (*pool.connect_options()).clone();
    let trace = "trace".parse().unwrap();
    pool.set_connect_options(options.log_statements(trace).log_slow_statements(trace, Duration::from_secs(3_600)));
    fixture.database.migrate().await.unwrap();
    fixture.database.write_beat("worker-a", 0).await.unwrap();
    fixture.fill(Kind::SqliteFile).await;
    fixture.fill_backlog(Kind::SqliteFile).await;
    if analysed {
        fixture.sql("ANALYZE").await.unwrap();
    }
    let mut asked = Asked { texts, known: HashSet::new() };
    asked.texts.settle(&fixture).await;
    asked.texts.0.lock().unwrap().clear();
    let mut working = Working { fixture: &fixture, explained: &mut asked, run, accesses: Vec::new() };
    working.all().await;
    working.backlog().await;
    working.accesses
}

/// Runs without ANALYZE, as the program leaves the database, and with it. This is one test because SQLite runs on a
/// thread of sqlx, where a subscriber listens for the whole process. No other test lets sqlx log its statements.
#[tokio::test]
async fn every_statement_uses_an_index() {
    let texts = Texts::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(texts.clone())).unwrap();
    for (analysed, run) in [(false, "plain"), (true, "analysed")] {
        judge(run, &worked_on(texts.clone(), analysed, run).await);
    }
}
