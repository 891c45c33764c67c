//! A cell: one small deployment with a provider, its lane and its ledger, whose workers can be made to crash.
//!
//! Its verdict compares the provider's records and the broker's queues with the ledger.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::engines::{Broker, Engines};
use super::trap::Trap;
use crate::support::UNPUBLISHED;
use crate::support::process::{Server, private_dir};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
/// Prefix of the exchange and delay queues that cells share, except those that break them.
pub const SHARED_PREFIX: &str = "crash";

/// The provider's guarantee for two requests of one payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It charges once per idempotency key.
    Deduplicates,
    /// A look-up tells whether it has charged a payment.
    LooksUp,
    /// No guarantee.
    Neither,
}

pub struct Setup {
    pub kind: Kind,
    pub fake: FakeOptions,
    /// TOML lines of the provider row, besides those of the kind.
    pub row: &'static str,
    pub prefix: String,
    /// A proxy between the workers and the provider.
    pub before_provider: Option<Trap>,
    /// A virtual host on a separate broker, for faults that would affect all cells.
    pub broker: Option<String>,
}

impl Setup {
    /// Ten calls a second, one at a time, each answered after 60 ms.
    pub fn of(kind: Kind) -> Self {
        let fake = FakeOptions {
            limits: vec!["10/1s".parse().unwrap()],
            latency: (Duration::from_millis(60), Duration::from_millis(60)),
            deduplicate: kind == Kind::Deduplicates,
            lookup: kind == Kind::LooksUp,
            ..FakeOptions::default()
        };
        Self { kind, fake, row: "workers = 1", prefix: SHARED_PREFIX.to_owned(), before_provider: None, broker: None }
    }
}

pub struct Cell {
    /// Name of the provider, its lane and its database.
    pub name: String,
    prefix: String,
    pub broker: Broker,
    broker_url: String,
    pub fake: FakeHandle,
    pub ledger: PgPool,
    pub(super) outcomes: String,
    database: String,
    redis: String,
    dir: PathBuf,
    pub(super) published: BTreeSet<String>,
    _serving: DropGuard,
}

impl Kind {
    /// The provider row's lines for this guarantee.
    fn row(self) -> &'static str {
        match self {
            Self::Deduplicates => "idempotency_retention_s = 86400",
            Self::LooksUp => concat!(
                "lookup = { url = \"{origin}/charges?id=${job:id}\", amount = \"/amount\", currency = \"/currency\", ",
                "give_up_after_s = {give_up_s} }"
            ),
            Self::Neither => "",
        }
    }
}

impl Cell {
    pub async fn open(what: &str, setup: Setup) -> Self {
        // A look-up with a lost response is repeated. On a slow machine, eight seconds pass before the first response
        // arrives.
        let give_up_s = if setup.fake.lost_answer_rate > 0.0 { "60" } else { "8" };
        static CELLS: AtomicU32 = AtomicU32::new(0);
        let name = format!("c{}-{}", CELLS.fetch_add(1, Ordering::Relaxed), what.replace('_', "-"));
        let engines = Engines::shared().await;
        let database = engines.database(&name).await;
        let ledger = PgPoolOptions::new().max_connections(1).connect(&database).await.unwrap();
        // Leader of a deployment that has run for an hour. In a new deployment the limiter waits until no other leader can
        // exist.
        let sql = "INSERT INTO limiter_authority VALUES ($1, $2, 1, now() - interval '1 hour')";
        sqlx::query(sql).bind(&name).bind(&engines.holder).execute(&ledger).await.unwrap();
        let limit = setup.fake.limits[0];
        let fake = FakeProvider::new(setup.fake);
        let handle = fake.handle();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        tokio::spawn(fake.serve(listener, stop.clone()));
        if let Some(trap) = setup.before_provider {
            port = trap.guard(port).await;
        }
        let broker_url = setup.broker.unwrap_or_else(|| engines.broker.clone());
        let broker = Broker::connect(&broker_url).await;
        let cell = Self {
            outcomes: broker.keep_outcomes(&setup.prefix, &name).await,
            name,
            prefix: setup.prefix,
            broker,
            broker_url,
            fake: handle,
            ledger,
            database,
            redis: engines.redis.clone(),
            dir: private_dir("cell"),
            published: BTreeSet::new(),
            _serving: stop.drop_guard(),
        };
        let row = format!("{}\n{}", setup.kind.row(), setup.row)
            .replace("{origin}", &format!("http://127.0.0.1:{port}"))
            .replace("{give_up_s}", give_up_s);
        let file = format!(
            "[[provider]]\nname = \"{}\"\nurl = \"http://127.0.0.1:{port}/charges\"\ntimeout_ms = 2000\n\
             backoff_base_ms = 50\n{row}\n[[provider.limit]]\nname = \"all\"\nmax_requests = {}\nwindow_ms = {}\n",
            cell.name,
            limit.max_requests(),
            limit.window().as_millis(),
        );
        let path = cell.dir.join("providers.toml");
        std::fs::write(&path, file).unwrap();
        cell.sluicegate(&["provider", "apply", path.to_str().unwrap()]).await;
        cell
    }

    fn environment(&self) -> Vec<(String, String)> {
        [
            ("DATABASE__URL", self.database.as_str()),
            ("QUEUE__URL", &self.broker_url),
            ("QUEUE__PREFIX", &self.prefix),
            ("LIMITER__URL", &self.redis),
            ("LIMITER__PREFIX", &self.name),
            ("OPS__LISTEN", "none"),
            ("LOG__LEVEL", "trace"),
        ]
        .map(|(name, value)| (format!("SLUICEGATE_{name}"), value.to_owned()))
        .to_vec()
    }

    async fn sluicegate(&self, arguments: &[&str]) {
        let mut command = tokio::process::Command::new(PROGRAM);
        let output = command.args(arguments).envs(self.environment()).output().await.unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Starts a worker, which dies at a crash point, `POINT:PASS`, if one is named.
    pub async fn worker(&self, crash_at: Option<&str>) -> Worker {
        self.worker_at(crash_at, &self.database).await
    }

    /// Starts a worker that connects to the database at another URL.
    pub async fn worker_at(&self, crash_at: Option<&str>, database: &str) -> Worker {
        static WORKERS: AtomicU32 = AtomicU32::new(0);
        let number = WORKERS.fetch_add(1, Ordering::Relaxed);
        let log = self.dir.join(format!("worker-{number}.log"));
        let mut environment = self.environment();
        environment[0].1 = database.to_owned();
        environment.extend(crash_at.map(|place| ("SLUICEGATE_CRASH_AT".to_owned(), place.to_owned())));
        let started = tokio::task::spawn_blocking(move || {
            let environment: Vec<(&str, &str)> =
                environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            Server::start(&[PROGRAM, "run"], &environment, &log, None, "")
        });
        Worker(started.await.unwrap())
    }

    /// The name of a queue of this cell's topology.
    pub fn queue(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub fn database(&self) -> &str {
        &self.database
    }

    /// Publishes payments `NAME-0` and so on.
    pub async fn publish(&mut self, jobs: u64) {
        for number in 0..jobs {
            let id = format!("{}-{number}", self.name);
            self.publish_again(number).await;
            self.published.insert(id);
        }
    }

    /// Publishes one of the payments again, as a producer may at any time.
    pub async fn publish_again(&self, number: u64) {
        let id = format!("{}-{number}", self.name);
        let job = json!({ "id": id, "account": "merchant", "amount": 100 + number, "currency": "EUR" });
        self.publish_body(&job.to_string()).await;
    }

    pub async fn publish_body(&self, body: &str) {
        self.broker.publish(&self.prefix, &self.name, body).await;
    }

    /// Waits until the worker has crashed at this place, `POINT:PASS`. A request that stays unanswered has arrived once
    /// the provider has charged it: then the worker is killed.
    pub async fn crashes(&self, doomed: &Worker, place: &str) {
        if let Some(pass) = place.strip_prefix("request_unanswered:") {
            let charges: u64 = pass.parse().unwrap();
            until(place, PATIENCE, doomed, async || self.fake.report().charges >= charges).await;
            doomed.signal("KILL");
            doomed.is_gone().await;
        } else {
            doomed.dies().await;
        }
    }

    /// Ends all leases once no worker is connected, so that another worker can claim the jobs of a crashed one.
    pub async fn leases_run_out(&self) {
        // PostgreSQL still executes the last statement of a crashed worker, such as a claim.
        let deadline = Instant::now() + PATIENCE;
        while self.count(OTHERS).await > 0 {
            assert!(Instant::now() < deadline, "another session is still connected to the database");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.end_leases().await;
    }

    /// Ends all leases while workers run.
    pub async fn end_leases(&self) {
        let sql =
            "UPDATE jobs SET holder = 'lost', response_by = least(response_by, updated_at) WHERE holder IS NOT NULL";
        sqlx::query(sql).execute(&self.ledger).await.unwrap();
    }

    pub async fn count(&self, sql: &'static str) -> u64 {
        let count: i64 = sqlx::query_scalar(sql).fetch_one(&self.ledger).await.unwrap();
        u64::try_from(count).unwrap()
    }

    /// Waits until every published payment has finished and every event is published.
    pub async fn until_finished(&self, worker: &Worker) {
        let published = self.published.len() as u64;
        until("every job has finished and its event is published", PATIENCE, worker, async || {
            self.count(ENDED).await >= published && self.count(UNPUBLISHED).await == 0
        })
        .await;
    }
}

pub const PATIENCE: Duration = Duration::from_secs(60);
const ENDED: &str = "SELECT count(*) FROM jobs WHERE state NOT IN ('waiting', 'sending', 'unknown')";
const OTHERS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";

impl Drop for Cell {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A worker process; it is killed when the test ends.
pub struct Worker(Server);

impl Worker {
    pub fn log(&self) -> String {
        self.0.log_text()
    }

    /// Waits until its log contains this text.
    pub async fn until_logged(&self, words: &str) {
        until(words, PATIENCE, self, async || self.log().contains(words)).await;
    }

    /// Waits until it has crashed at its crash point.
    pub async fn dies(&self) {
        self.until_logged("dies on purpose").await;
        self.is_gone().await;
    }

    async fn is_gone(&self) {
        let of_process = PathBuf::from(format!("/proc/{}/exe", self.0.pid));
        // A zombie process has no executable any more.
        until("the worker is gone", PATIENCE, self, async || std::fs::read_link(&of_process).is_err()).await;
    }

    pub fn signal(&self, name: &str) {
        self.0.signal(name);
    }

    /// Sends SIGSTOP and waits until all its threads have stopped.
    pub async fn freezes(&self) {
        self.signal("STOP");
        let threads = format!("/proc/{}/task", self.0.pid);
        let stands = |thread: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
        };
        until("all threads of the worker are stopped", PATIENCE, self, async || {
            std::fs::read_dir(&threads).unwrap().all(stands)
        })
        .await;
    }

    /// Sends SIGTERM and waits until all requests are finished or requeued. Returns the log.
    pub async fn stop(self) -> String {
        self.0.signal("TERM");
        self.until_logged("all requests finished, unsent jobs returned to the backlog").await;
        self.log()
    }
}

/// Polls until the condition holds. Panics with the end of the worker's log if it does not.
pub async fn until(what: &str, within: Duration, worker: &Worker, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + within;
    while !condition().await {
        if Instant::now() > deadline {
            let log = worker.log();
            let lines: Vec<&str> = log.lines().collect();
            panic!("not so after {within:?}: {what}\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
