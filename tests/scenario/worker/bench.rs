//! A test bench: a worker on backends in memory, with access to its ledger, queue, events and provider.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::wait_reason::{WaitReason, sentence};
use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::events::UnpublishedEvents;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::provider::ProviderFactory;
use sluicegate::queue::message::CardNumbers;
use sluicegate::queue::{Destination, OutgoingMessage, Properties, Queue};
use sluicegate::worker::meter::LaneMeter;
use sluicegate::worker::supervisor::{self, DrainReport, WorkerStatus};
use sluicegate::worker::{Backends, WorkerOptions};
use sqlx::{AssertSqlSafe, Row as _, SqlitePool};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::script::{Factory, Script};
use crate::memory_queue::MemoryQueue;

/// Longer than any condition of these tests takes on a working machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval at which conditions are polled.
const LOOK: Duration = Duration::from_millis(10);

pub struct Bench {
    pub database: Database,
    pool: SqlitePool,
    pub messages: MemoryQueue,
    pub script: Arc<Script>,
    drain_timeout: Duration,
    /// Takes effect with the next run.
    pub max_open_jobs: u32,
    runs: u32,
    running: Option<Running>,
    /// Kept when the worker ends, as a limiter store is.
    store: Option<Arc<EmbeddedLimiter>>,
    /// Replaces the scripted provider.
    pub providers: Option<Arc<dyn ProviderFactory>>,
    /// The next worker's rule for card numbers.
    pub card_numbers: CardNumbers,
    /// Replaces the queue of the next worker.
    pub broker: Option<Arc<dyn Queue>>,
    /// Whether the next worker has a queue at all.
    pub has_broker: bool,
}

struct Running {
    stop: CancellationToken,
    progress: watch::Receiver<WorkerStatus>,
    task: JoinHandle<Result<DrainReport, LedgerError>>,
}

/// A job's row in the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Ledgered {
    pub state: String,
    pub attempts: i64,
    pub reason: String,
    pub reference: Option<String>,
    /// A worker process holds its lease.
    pub held: bool,
}

/// An open rejected message as the ledger keeps it.
#[derive(Debug)]
pub struct Rejected {
    pub reason: String,
    pub detail: String,
    pub body: String,
    pub properties: Value,
}

/// A message outside the lanes: an outcome event or a rejected message.
#[derive(Clone, Debug)]
pub struct Published {
    pub body: Value,
    pub properties: Value,
}

/// A row whose defaults restrict no test; each test changes what it is about.
pub fn row(name: &str) -> ProviderRow {
    ProviderRow {
        name: name.to_owned(),
        url: format!("https://{name}.test/charges"),
        send_budget_ms: 200,
        timeout_ms: 60_000,
        max_wait_ms: 30_000,
        max_attempts: 3,
        backoff_base_ms: 20,
        backoff_max_ms: 40,
        idempotency_retention_s: Some(86_400),
        limits: vec![limit(1_000, 100)],
        ..ProviderRow::default()
    }
}

pub fn limit(max_requests: i64, window_ms: i64) -> LimitRow {
    LimitRow { name: "all".to_owned(), max_requests, window_ms, ..LimitRow::default() }
}

pub fn name(provider: &str) -> ProviderName {
    ProviderName::new(provider).unwrap()
}

impl Bench {
    /// A bench with a running worker on these rows.
    pub async fn open(rows: &[ProviderRow]) -> Self {
        let mut bench = Self::prepared(rows).await;
        bench.run();
        bench
    }

    /// A bench on these rows without a worker.
    pub async fn prepared(rows: &[ProviderRow]) -> Self {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let pool = database.sqlite_pool().unwrap();
        let bench = Self {
            messages: MemoryQueue::default(),
            database,
            pool,
            script: Script::new(),
            drain_timeout: Duration::from_secs(30),
            max_open_jobs: u32::MAX,
            runs: 0,
            running: None,
            store: None,
            providers: None,
            card_numbers: CardNumbers::Refuse,
            broker: None,
            has_broker: true,
        };
        bench.apply(rows).await;
        bench
    }

    pub fn drain_timeout(&mut self, drain_timeout: Duration) {
        self.drain_timeout = drain_timeout;
    }

    /// Shares one limiter between all later workers. It keeps its state when a worker ends.
    pub fn keep_limiter(&mut self) {
        self.store = Some(Arc::new(EmbeddedLimiter::new()));
    }

    /// Starts a worker with an empty limiter, like a new process.
    pub fn run(&mut self) {
        self.runs += 1;
        let engines = Backends {
            queue: self.has_broker.then(|| self.broker.clone().unwrap_or_else(|| self.queue())),
            ledger: self.database.clone(),
            limiter: self.store.clone().unwrap_or_default(),
            providers: self.providers.clone().unwrap_or_else(|| Arc::new(Factory(Arc::clone(&self.script)))),
        };
        let options = WorkerOptions {
            owner: format!("worker-{}", self.runs),
            card_numbers: self.card_numbers,
            drain_timeout: self.drain_timeout,
            max_open_jobs: self.max_open_jobs,
            settings_poll: Duration::from_millis(20),
            sweep_every: Duration::from_millis(100),
            scrub_after: Duration::from_secs(86_400),
            scrub_review_after: Some(Duration::from_secs(2 * 86_400)),
        };
        let stop = CancellationToken::new();
        let (progress, progress_rx) = watch::channel(WorkerStatus::default());
        let task = tokio::spawn(supervisor::run(engines, options, stop.clone(), progress));
        self.running = Some(Running { stop, progress: progress_rx, task });
    }

    /// Another worker on the same backends, not yet running.
    pub fn beside(&self) -> Self {
        Self {
            database: self.database.clone(),
            pool: self.pool.clone(),
            messages: self.messages.clone(),
            script: Arc::clone(&self.script),
            drain_timeout: self.drain_timeout,
            max_open_jobs: self.max_open_jobs,
            runs: 100,
            running: None,
            store: self.store.clone(),
            providers: self.providers.clone(),
            card_numbers: self.card_numbers,
            broker: None,
            has_broker: true,
        }
    }

    pub fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.messages.clone())
    }

    /// Asks the worker to stop, as SIGTERM does; [`Bench::stopped`] waits for its end.
    pub fn ask_to_stop(&self) {
        self.running.as_ref().unwrap().stop.cancel();
    }

    /// Payments that the running worker has finished, by final state.
    pub fn finished(&self, lane: &str) -> BTreeMap<&'static str, u64> {
        let meter = self.meter(lane);
        let finished =
            |state: FinalState| (state.name(), meter.as_ref().map_or(0, |meter| meter.finished(state.name()).get()));
        FinalState::ALL.map(finished).into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// The running worker's figures of unpublished events.
    pub fn unpublished(&self) -> Option<UnpublishedEvents> {
        self.running.as_ref().unwrap().progress.borrow().meter.unpublished()
    }

    /// Messages that the running worker has requeued for this reason.
    pub fn returned_permits(&self, lane: &str, reason: &str) -> u64 {
        self.meter(lane).map_or(0, |meter| meter.requeues(reason).get())
    }

    /// Reason of the running worker's last decision of this kind.
    pub fn last_decision(&self, lane: &str, kind: &str) -> String {
        let decisions = self.meter(lane).map(|meter| meter.figures().decisions).unwrap_or_default();
        let last = decisions.into_iter().filter(|line| line.kind == kind).max_by_key(|line| line.at_ms);
        last.unwrap_or_else(|| panic!("{lane} has made no decision of kind {kind}")).reason
    }

    fn meter(&self, lane: &str) -> Option<Arc<LaneMeter>> {
        self.running.as_ref().unwrap().progress.borrow().meter.find_lane(&name(lane))
    }

    /// Waits until the worker consumes no more messages.
    pub async fn until_draining(&self) {
        let mut progress = self.running.as_ref().unwrap().progress.clone();
        let draining = tokio::time::timeout(PATIENCE, progress.wait_for(|progress| progress.draining));
        draining.await.expect("the worker does not drain").unwrap();
    }

    pub async fn stopped(&mut self) -> DrainReport {
        let running = self.running.take().unwrap();
        tokio::time::timeout(PATIENCE, running.task).await.expect("the worker does not stop").unwrap().unwrap()
    }

    pub async fn stop(&mut self) -> DrainReport {
        self.ask_to_stop();
        self.stopped().await
    }

    pub async fn apply(&self, rows: &[ProviderRow]) {
        self.database.apply_settings(rows, false).await.unwrap();
    }

    /// Waits until the worker has loaded the current settings.
    pub async fn settings_known(&self) -> WorkerStatus {
        let version = self.database.settings_version().await.unwrap();
        let mut progress = self.running.as_ref().unwrap().progress.clone();
        let known = progress.wait_for(|progress| progress.ready && progress.settings.version >= version);
        tokio::time::timeout(PATIENCE, known).await.expect("settings not loaded").unwrap().clone()
    }

    /// Waits until the worker reports this many invalid rows, and returns their problems.
    pub async fn bad_rows(&self, count: usize) -> Vec<String> {
        let mut progress = self.running.as_ref().unwrap().progress.clone();
        let told =
            tokio::time::timeout(PATIENCE, progress.wait_for(|progress| progress.settings.invalid_rows.len() == count));
        let known = told.await.expect("the worker does not report invalid rows").unwrap().settings.clone();
        known.invalid_rows.iter().flat_map(|bad| bad.problems.clone()).collect()
    }

    /// Publishes a minimal job.
    pub async fn pay(&self, provider: &str, id: &str) {
        self.publish(provider, &json!({ "id": id, "amount": 1299, "currency": "EUR" }).to_string()).await;
    }

    pub async fn publish(&self, provider: &str, body: &str) {
        self.publish_with(provider, body, Properties::default()).await;
    }

    pub async fn publish_with(&self, provider: &str, body: &str, properties: Properties) {
        let destination = Destination::Lane(name(provider));
        let body = body.as_bytes().to_vec().into();
        self.messages.publish(OutgoingMessage { destination, body, properties }).await.unwrap();
    }

    pub async fn sql(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.unwrap();
    }

    /// Executes a statement without the database's constraints and triggers.
    pub async fn without_constraints(&self, sql: &str) {
        crate::without_constraints::on_sqlite(&self.pool, sql).await.unwrap();
    }

    pub async fn count(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    /// Events that the ledger says are not published. Positions have no gaps, and no test deletes events.
    pub async fn unpublished_events(&self) -> i64 {
        let sql = "SELECT (SELECT count(*) FROM events) - (SELECT position FROM event_cursors) \
                   + (SELECT count(*) FROM event_retries)";
        self.count(sql).await
    }

    /// The first column of every row.
    pub async fn texts(&self, sql: &str) -> Vec<String> {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(&self.pool).await.unwrap()
    }

    pub async fn job(&self, id: &str) -> Option<Ledgered> {
        let sql = "SELECT state, attempts, reason, provider_reference, holder, wait_reason, wait_limit, wait_detail \
             FROM jobs WHERE id = ?1";
        let row = sqlx::query(sql).bind(id).fetch_optional(&self.pool).await.unwrap()?;
        let (state, detail): (String, Option<String>) = (row.get(0), row.get(7));
        let waits = matches!(state.as_str(), "waiting" | "unknown");
        let wait = row.get::<Option<String>, _>(5).filter(|_| waits);
        let wait = wait.map(|code| WaitReason::from_columns(&code, row.get(6)).unwrap());
        let reason = wait.map(|reason| sentence(&reason, detail.as_deref())).or(row.get(2));
        Some(Ledgered {
            state,
            attempts: row.get(1),
            reason: reason.unwrap_or_default(),
            reference: row.get(3),
            held: row.get::<Option<String>, _>(4).is_some(),
        })
    }

    /// Attempts of a job: outcome, and whether the attempt counts.
    pub async fn attempts(&self, id: &str) -> Vec<(String, bool)> {
        let sql =
            "SELECT coalesce(outcome, 'open'), coalesce(counted, 0) FROM attempts WHERE job_id = ?1 ORDER BY number";
        let rows = sqlx::query(sql).bind(id).fetch_all(&self.pool).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get::<i64, _>(1) == 1)).collect()
    }

    pub async fn events(&self) -> Vec<Published> {
        self.published("payments.outcomes").await
    }

    pub async fn events_of(&self, id: &str) -> Vec<Published> {
        self.events().await.into_iter().filter(|event| event.body["id"] == id).collect()
    }

    pub async fn published(&self, queue: &str) -> Vec<Published> {
        let messages = self.messages.messages(queue).into_iter();
        let published = messages.map(|(body, properties)| Published {
            body: serde_json::from_slice(&body).unwrap(),
            properties: serde_json::to_value(properties).unwrap(),
        });
        published.collect()
    }

    /// Rejected messages that are open, as they are stored.
    pub async fn rejected(&self) -> Vec<Rejected> {
        let sql = "SELECT reason, detail, body, properties FROM rejected_messages WHERE decision IS NULL ORDER BY id";
        let rows = sqlx::query(sql).fetch_all(&self.pool).await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let json = |text: &str| serde_json::from_str(text).unwrap();
        let each = rows.iter().map(|row| Rejected {
            reason: row.get(0),
            detail: row.get(1),
            body: text(row.get(2)),
            properties: json(row.get(3)),
        });
        each.collect()
    }

    /// Messages of a lane that a worker has not acknowledged.
    pub fn unacknowledged(&self, provider: &str) -> usize {
        self.messages.count(&format!("payments.{provider}"))
    }

    /// Messages of a lane that no worker has consumed.
    pub fn queued(&self, provider: &str) -> usize {
        self.messages.ready(&format!("payments.{provider}"))
    }

    /// Jobs that a worker has leased and not begun to send.
    pub async fn active(&self) -> i64 {
        self.count("SELECT count(*) FROM jobs WHERE holder IS NOT NULL AND state <> 'sending'").await
    }

    /// Polls until the condition holds.
    pub async fn until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition().await {
            let running = self.running.as_ref().is_none_or(|running| !running.task.is_finished());
            assert!(running && Instant::now() < deadline, "not so: {what}\n{}", self.picture().await);
            sleep(LOOK).await;
        }
    }

    pub async fn until_state(&self, id: &str, state: &str) -> Ledgered {
        let there = async || self.job(id).await.is_some_and(|job| job.state == state && !job.held);
        self.until(&format!("{id} is {state}"), there).await;
        self.job(id).await.unwrap()
    }

    /// Waits until a job is delayed for this reason.
    pub async fn until_delayed(&self, id: &str, reason: &str) -> Ledgered {
        let there = async || self.job(id).await.is_some_and(|job| !job.held && job.reason.contains(reason));
        self.until(&format!("{id} is delayed: {reason}"), there).await;
        self.job(id).await.unwrap()
    }

    /// Waits until the provider has received this many requests.
    pub async fn until_sent(&self, provider: &str, requests: usize) {
        let there = async || self.script.sent_to(provider).len() >= requests;
        self.until(&format!("{requests} requests to {provider}"), there).await;
    }

    /// State of the whole bench, for the message of a failed test.
    async fn picture(&self) -> String {
        let mut lines = Vec::new();
        for (table, columns) in [
            ("jobs", "id, state, attempts, reason, holder, fence"),
            ("attempts", "job_id, number, outcome, counted, detail"),
        ] {
            let sql = format!("SELECT json_array({columns}) FROM {table} LIMIT 60");
            let rows: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&self.pool).await.unwrap();
            lines.extend(rows.into_iter().map(|row| format!("{table} {row}")));
        }
        lines.push(format!("messages {:?}", self.messages.bodies()));
        lines.push(format!("sent {:?}", self.script.order()));
        lines.join("\n")
    }
}
