//! Conformance suite of the ledger and the settings store, on SQLite and PostgreSQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sluicegate::domain::job::{ContentHash, Identifier, Job};
use sluicegate::domain::provider::{JobOrder, ProviderName};
use sluicegate::domain::sum::SentSum;
use sluicegate::domain::wait_reason::{Wait, WaitReason};
use sluicegate::ledger::database::Database;
use sluicegate::ledger::events::{EventPage, EventsAfter, OutcomeEvent, PublishResults};
use sluicegate::ledger::operator::{ResolutionError, ResolutionRefusal};
use sluicegate::ledger::{Claimed, LeaseToken, RequestTiming};
use sluicegate::provider::FrozenRequest;
use sqlx::{AssertSqlSafe, Row};
use tokio::sync::OnceCell;

use crate::support::claiming::{Claim, ClaimById as _};
use crate::support::postgres::Postgres;
use crate::support::without_constraints;

mod attempts;
mod backlog;
mod batches;
mod bounded;
mod change_hints;
mod claims;
mod events;
mod faults;
mod few_connections;
mod first_attempt;
mod fleet;
mod full_disk;
mod hand_changes;
mod held;
mod history;
mod immutability;
mod lane_holds;
mod leader_row;
mod lookups;
mod migrating;
mod missing_standby;
mod operator;
mod pairs;
mod pause_of_all;
mod plans;
mod poll_connections;
mod pooler;
mod reads;
mod recent;
mod refusals;
mod rejected;
mod schema;
mod settings;
mod settings_propagation;
mod silent_connections;
mod temporary_limits;
mod text_order;
mod timestamps;
mod upkeep;
mod wait_reasons;
mod waits;

const A_MINUTE: Duration = Duration::from_secs(60);
/// A request that is recorded at once, with a minute for its response.
const AT_ONCE: RequestTiming = RequestTiming { response_within: A_MINUTE, max_batch_delay: Duration::ZERO };
const SECOND: Duration = Duration::from_secs(1);

/// The result of an operator's decision. The ledger itself does not fail.
fn settled<T>(result: Result<T, ResolutionError>) -> Result<T, ResolutionRefusal> {
    result.map_err(|error| match error {
        ResolutionError::Refused(refusal) => refusal,
        ResolutionError::Ledger(error) => panic!("{error}"),
    })
}

/// The database of one test, with direct SQL access beside the ledger.
struct Fixture {
    database: Database,
    url: String,
    postgres: Option<sqlx::PgPool>,
    _dir: Option<tempfile::TempDir>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    SqliteFile,
    SqliteMemory,
    Postgres,
}

impl Fixture {
    /// A database with one living worker, `worker-a`.
    async fn migrated(kind: Kind) -> Self {
        if kind == Kind::Postgres {
            let url = Postgres::shared().copy_database(migrated_template().await, &next_database());
            let fixture = Self::at(kind, url, None);
            fixture.database.write_beat("worker-a", 0).await.unwrap();
            return fixture;
        }
        let fixture = Self::empty(kind);
        fixture.database.migrate().await.unwrap();
        fixture.database.write_beat("worker-a", 0).await.unwrap();
        fixture
    }

    fn empty(kind: Kind) -> Self {
        match kind {
            Kind::Postgres => Self::at(kind, Postgres::shared().create_database(&next_database()), None),
            Kind::SqliteMemory => Self::at(kind, "sqlite::memory:".to_owned(), None),
            Kind::SqliteFile => {
                let dir = tempfile::tempdir().unwrap();
                let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
                Self::at(kind, url, Some(dir))
            }
        }
    }

    fn at(kind: Kind, url: String, dir: Option<tempfile::TempDir>) -> Self {
        let postgres = (kind == Kind::Postgres).then(|| {
            let options = sqlx::postgres::PgPoolOptions::new().max_connections(2);
            options.connect_lazy(&url).unwrap()
        });
        Self { database: Database::open(&url, 16).unwrap(), url, postgres, _dir: dir }
    }

    /// Runs SQL as an operator would.
    async fn sql(&self, sql: &str) -> Result<(), String> {
        let sql = AssertSqlSafe(sql.to_owned());
        let done = match &self.postgres {
            Some(pool) => sqlx::raw_sql(sql).execute(pool).await.map(|_| ()),
            None => sqlx::raw_sql(sql).execute(&self.database.sqlite_pool().unwrap()).await.map(|_| ()),
        };
        done.map_err(|error| error.to_string())
    }

    /// Runs SQL with the database's own rules switched off.
    async fn without_constraints(&self, sql: &str) -> Result<(), String> {
        let done = match &self.postgres {
            Some(pool) => without_constraints::on_postgres(pool, sql).await,
            None => without_constraints::on_sqlite(&self.database.sqlite_pool().unwrap(), sql).await,
        };
        done.map_err(|error| error.to_string())
    }

    /// The first column of every row, as text.
    async fn column(&self, select: &str) -> Vec<Option<String>> {
        let sql = AssertSqlSafe(format!("SELECT CAST(x AS text) FROM ({select}) AS t (x)"));
        match &self.postgres {
            Some(pool) => sqlx::query(sql).fetch_all(pool).await.unwrap().iter().map(|row| row.get(0)).collect(),
            None => {
                let sql = AssertSqlSafe(format!("WITH t (x) AS ({select}) SELECT CAST(x AS text) FROM t"));
                let pool = self.database.sqlite_pool().unwrap();
                sqlx::query(sql).fetch_all(&pool).await.unwrap().iter().map(|row| row.get(0)).collect()
            }
        }
    }

    async fn one(&self, select: &str) -> String {
        let rows = self.column(select).await;
        assert_eq!(rows.len(), 1, "{select}");
        rows[0].clone().unwrap_or_else(|| "NULL".to_owned())
    }

    async fn state(&self, id: &str) -> String {
        self.one(&format!("SELECT state FROM jobs WHERE id = '{id}'")).await
    }

    /// Claims for the usual worker, and expects to get the lease.
    async fn take(&self, job: &Job) -> Claimed {
        match self.database.claim(job, hash(1), "worker-a").await.unwrap() {
            Claim::Claimed(claimed) => *claimed,
            other => panic!("{other:?}"),
        }
    }

    /// Gives all events that can be seen their places; returns the last one.
    async fn place_events(&self) -> i64 {
        let mut order = None;
        let mut end = 0;
        loop {
            let placed = self.database.place_events(&mut order).await.unwrap();
            if placed == end {
                return end;
            }
            end = placed;
        }
    }

    /// The page after a position.
    async fn page_after(&self, position: i64) -> EventPage {
        match self.database.events_after(position).await.unwrap() {
            EventsAfter::Page(page) => page,
            EventsAfter::End => EventPage { upto: position, ..EventPage::default() },
            EventsAfter::Deleted { kept_after } => panic!("deleted up to {kept_after}"),
        }
    }

    /// All events in their order, which are placed.
    async fn ordered_events(&self) -> Vec<OutcomeEvent> {
        self.place_events().await;
        let mut all = Vec::new();
        let mut position = 0;
        loop {
            let page = self.page_after(position).await;
            if page.upto == position {
                return all;
            }
            position = page.upto;
            all.extend(page.events);
        }
    }

    /// Passes all events, as if they were published.
    async fn pass_events(&self) {
        let end = self.place_events().await;
        let cursor = self.database.event_cursor().await.unwrap();
        let moved = self.database.move_event_cursor(cursor.turn, end, &PublishResults::default()).await.unwrap();
        assert_eq!(moved, Some(cursor.turn + 1));
    }

    /// Ends the lease of a job now, as if its worker had been silent for long, and its row was gone.
    async fn expire_lease(&self, hold: &LeaseToken) {
        self.sql(&format!("UPDATE jobs SET holder = 'lost' WHERE id = '{}'", hold.id)).await.unwrap();
    }
}

fn next_database() -> String {
    static DATABASES: AtomicU32 = AtomicU32::new(0);
    format!("test_{}", DATABASES.fetch_add(1, Ordering::Relaxed))
}

/// The PostgreSQL database that migrated ones are copies of: a copy is faster than a migration.
async fn migrated_template() -> &'static str {
    const NAME: &str = "migrated";
    static MIGRATED: OnceCell<()> = OnceCell::const_new();
    let migrate = || async {
        let database = Database::open(&Postgres::shared().create_database(NAME), 1).unwrap();
        database.migrate().await.unwrap();
        database.close().await;
        // A database with connections cannot be copied.
        let close = format!("ALTER DATABASE {NAME} WITH ALLOW_CONNECTIONS false");
        let closed = Postgres::shared().psql("postgres").args(["-c", &close]).status().unwrap();
        assert!(closed.success(), "{close}");
    };
    MIGRATED.get_or_init(migrate).await;
    NAME
}

fn name(text: &str) -> ProviderName {
    ProviderName::new(text).unwrap()
}

fn hash(byte: u8) -> ContentHash {
    ContentHash([byte; 32])
}

fn job(id: &str) -> Job {
    Job {
        id: Identifier::new(id).unwrap(),
        provider: name("stripe"),
        amount: 1_299,
        currency: "EUR".into(),
        account: Some(Identifier::new("acct_1").unwrap()),
        reference: Some("invoice 7".into()),
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: Some(r#"{"token": "tok_1"}"#.into()),
    }
}

fn request(id: &str) -> FrozenRequest {
    FrozenRequest {
        method: "POST".into(),
        url: "https://api.example.com/charges".into(),
        idempotency_key: id.into(),
        content_type: "application/json".into(),
        body: format!(r#"{{"id":"{id}"}}"#).into(),
        account: Some("acct_1".into()),
        sum: SentSum { units: 1_299, decimals: 2 },
        credential_fingerprint: "0123456789abcdef".into(),
    }
}

/// Runs each test function on both databases. In memory, SQLite has the same statements, and the scenario tests run on it.
macro_rules! on_every_database {
    ($($test:ident),+ $(,)?) => {
        mod sqlite_file {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(crate::ledger::Kind::SqliteFile).await })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test(crate::ledger::Kind::Postgres).await })+
        }
    };
}
use on_every_database;
