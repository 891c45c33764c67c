//! SQLite tells the plan of a text, so the texts are taken from sqlx as it runs them, and asked about afterwards.

use std::collections::HashSet;
use std::sync::Mutex;

use sqlx::{ConnectOptions, SqliteConnection};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::super::*;
use super::work::Working;
use super::{Access, Explained, LARGE, judge};

/// What a full scan may be of: small tables, and rows that a statement made itself.
const SMALL: [&str; 8] =
    ["json_each", "held", "names", "e", "CONSTANT", "providers", "limiter_authority", "worker_reports"];

#[derive(Clone, Default)]
struct Texts(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Texts {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "sqlx::query" {
            let mut text = Text::default();
            event.record(&mut text);
            self.0.lock().unwrap().push(if text.statement.is_empty() { text.summary } else { text.statement });
        }
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
        let texts: Vec<String> = std::mem::take(&mut *self.texts.0.lock().unwrap());
        let mut found = Vec::new();
        for sql in texts {
            let plain = ["BEGIN", "COMMIT", "ROLLBACK", "PRAGMA"].iter().any(|word| sql.starts_with(word));
            if plain || !self.known.insert((during, sql.clone())) {
                continue;
            }
            let pool = fixture.database.sqlite_pool().unwrap();
            let mut connection = pool.acquire().await.unwrap();
            found.extend(plan(&mut connection, &sql).await.iter().filter_map(|line| access(line, during, &sql)));
        }
        // The questions themselves.
        self.texts.0.lock().unwrap().clear();
        found
    }
}

async fn plan(connection: &mut SqliteConnection, sql: &str) -> Vec<String> {
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
    let rows = sqlx::query(explain).fetch_all(connection).await.unwrap_or_else(|error| panic!("{error}: {sql}"));
    rows.iter().map(|row| row.get("detail")).collect()
}

/// `SEARCH jobs USING INDEX x (id=?)`, `SCAN other USING COVERING INDEX x`, `SCAN jobs`; nothing else reads a table.
/// A scan's table may be named by its alias, so any that is not known to be small is taken for a large one.
fn access(line: &str, during: &'static str, sql: &str) -> Option<Access> {
    let (verb, rest) = line.split_once(' ')?;
    let table = rest.split_whitespace().next()?;
    let sought = match verb {
        // An index without its condition is read from one end to the other.
        "SEARCH" => rest.contains('('),
        "SCAN" => false,
        _ => return None,
    };
    if SMALL.contains(&table) || (sought && !LARGE.contains(&table)) {
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

async fn worked_on(analysed: bool, run: &'static str) -> Vec<Access> {
    let texts = Texts::default();
    let _seen = tracing::subscriber::set_default(tracing_subscriber::registry().with(texts.clone()));
    let fixture = Fixture::empty(Kind::SqliteFile);
    let pool = fixture.database.sqlite_pool().unwrap();
    let options = (*pool.connect_options()).clone();
    pool.set_connect_options(options.log_statements("trace".parse().unwrap()));
    fixture.database.migrate().await.unwrap();
    fixture.fill(Kind::SqliteFile).await;
    if analysed {
        fixture.sql("ANALYZE").await.unwrap();
    }
    let mut asked = Asked { texts, known: HashSet::new() };
    asked.texts.0.lock().unwrap().clear();
    let mut working = Working { fixture: &fixture, explained: &mut asked, run, accesses: Vec::new() };
    working.all().await;
    working.accesses
}

// One thread each: what listens to sqlx listens on this thread alone.

/// As the program leaves it: nothing of ours runs ANALYZE.
#[tokio::test]
async fn every_statement_goes_by_an_index() {
    judge("SQLite", &worked_on(false, "plain").await);
}

#[tokio::test]
async fn so_it_does_when_the_tables_were_analysed() {
    judge("SQLite, analysed", &worked_on(true, "analysed").await);
}
