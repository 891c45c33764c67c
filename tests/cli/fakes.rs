//! The embedded backends in memory, with a queue that records what is published and fails as a test tells it.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use clap::Parser as _;
use sluicegate::app::{MissingDatabase, Services};
use sluicegate::cli::console::TableShape;
use sluicegate::cli::{Cli, CommandError, Console, Exit};
use sluicegate::config::{self, Config};
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::queue::{DeadLetter, LaneConsumer, OutgoingMessage, Queue, QueueError, TopologyProblem};
use sqlx::AssertSqlSafe;

/// The services of commands that run one after the other.
pub struct Engine {
    services: Services,
    queue: FakeQueue,
    /// In memory.
    pub database: Database,
}

#[derive(Clone, Default)]
struct FakeQueue(Arc<Mutex<State>>);

#[derive(Default)]
pub struct State {
    pub declared: Vec<ProviderName>,
    pub published: Vec<OutgoingMessage>,
    pub in_flight: usize,
    pub in_flight_most: usize,
    /// Ids whose publish the broker does not confirm.
    pub unconfirmed: Vec<String>,
    pub broker_unavailable: bool,
    /// Lanes that have no queue.
    pub lanes_missing: Vec<String>,
    /// Other faults of the topology that a message passes.
    pub unfit: Vec<TopologyProblem>,
    /// Lanes whose queues exist with other arguments.
    pub lanes_different: Vec<String>,
    /// Lanes whose queues the broker does not let us check.
    pub lanes_refused: Vec<String>,
}

/// A row without any finding.
pub fn row(name: &str) -> ProviderRow {
    let second = LimitRow { name: "second".into(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    ProviderRow {
        name: name.to_owned(),
        url: "https://pay.example.com".to_owned(),
        idempotency_retention_s: Some(86_400),
        reuse_connections: Some(false),
        statuses: serde_json::from_str(STATUSES).unwrap(),
        limits: vec![second],
        ..ProviderRow::default()
    }
}

/// Cases without which a row has warnings.
const STATUSES: &str =
    r#"{"200": [{"code": "succeeded", "at": "/status", "means": "accepted"}], "202": "in_progress"}"#;

/// A provider file with one row such as [`row`] for each name.
pub fn provider_text(names: &[&str]) -> String {
    let table = |name: &&str| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"https://pay.example.com\"\nidempotency_retention_s = 86400\nreuse_connections = false\n\
             statuses = {{ 200 = [{{ code = \"succeeded\", at = \"/status\", means = \"accepted\" }}], 202 = \"in_progress\" }}\n\n\
             [[provider.limit]]\nname = \"second\"\nmax_requests = 100\nwindow_ms = 1000\n\n"
        )
    };
    names.iter().map(table).collect()
}

pub fn write_provider_file(dir: &tempfile::TempDir, text: &str) -> String {
    let path: PathBuf = dir.path().join("providers.toml");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn configuration(variables: &[(&str, &str)], sets: &[String]) -> Config {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    config::load(None, variables, sets).unwrap()
}

/// Runs a command line, without the program's name, on these services.
pub async fn run_on(services: &Services, variables: &[(&str, &str)], line: &[&str]) -> Ran {
    let cli = Cli::try_parse_from(["sluicegate"].iter().chain(line)).unwrap();
    let config = configuration(variables, &cli.set);
    let (out, err) = (Page::default(), Page::default());
    let mut console = Console::new(Box::new(out.clone()), Box::new(err.clone()), TableShape::Plain);
    let result = sluicegate::cli::execute(&cli.command, &config, services, &mut console).await;
    Ran { result, out: out.text(), err: err.text() }
}

/// Runs a command line where the database exists and was never migrated.
pub async fn run_unmigrated(line: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.db");
    std::fs::write(&path, "").unwrap();
    let set = format!("database.url=sqlite://{}", path.display());
    let line = [&["--set", &set], line].concat();
    run_on(&Services::new(MissingDatabase::Fail), &[], &line).await
}

pub struct Ran {
    pub result: Result<Exit, CommandError>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap()
    }

    /// Text and exit code of the error.
    pub fn failure(&self) -> (String, Exit) {
        let error = self.result.as_ref().err().unwrap();
        (error.to_string(), error.exit())
    }
}

#[derive(Clone, Default)]
pub struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Engine {
    /// With a migrated database without providers. The limiter is embedded, whatever a command line configures.
    pub async fn new() -> Self {
        let queue = FakeQueue::default();
        let services = Services::new(MissingDatabase::Create).with_queue(Arc::new(queue.clone()));
        let in_memory = configuration(&[], &["database.url=sqlite::memory:".to_owned()]);
        let database = services.ledger(&in_memory).await.unwrap();
        services.limiter(&in_memory).await.unwrap();
        Self { services, queue, database }
    }

    pub async fn with_providers(names: &[&str]) -> Self {
        let engine = Self::new().await;
        engine.set_rows(&names.iter().map(|name| row(name)).collect::<Vec<_>>()).await;
        engine
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.queue.state()
    }

    /// Replaces all provider rows of the database.
    pub async fn set_rows(&self, rows: &[ProviderRow]) {
        self.sql("DELETE FROM account_overrides; DELETE FROM provider_limits; DELETE FROM providers").await;
        self.database.apply_settings(rows, false).await.unwrap();
    }

    /// The provider rows of the database, by name.
    pub async fn rows(&self) -> Vec<ProviderRow> {
        self.database.readable_rows(None).await.unwrap()
    }

    /// Runs SQL as an operator would, without the schema's checks.
    pub async fn sql(&self, sql: &str) {
        let sql = format!("PRAGMA ignore_check_constraints = 1; {sql}; PRAGMA ignore_check_constraints = 0");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.database.sqlite_pool().unwrap()).await.unwrap();
    }

    /// Runs a command line, without the program's name, under the default configuration.
    pub async fn run(&self, line: &[&str]) -> Ran {
        self.run_with(&[], line).await
    }

    /// Runs a command line with variables in its environment.
    pub async fn run_with(&self, variables: &[(&str, &str)], line: &[&str]) -> Ran {
        run_on(&self.services, variables, line).await
    }
}

impl FakeQueue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

#[async_trait]
impl Queue for FakeQueue {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        let mut state = self.state();
        if state.broker_unavailable {
            return Err(QueueError::Unavailable("refused".to_owned()));
        }
        let different = providers.iter().find(|name| state.lanes_different.iter().any(|lane| lane == name.as_str()));
        if let Some(name) = different {
            return Err(QueueError::Refused(format!("queue `payments.{name}` exists with other arguments")));
        }
        state.declared.extend_from_slice(providers);
        Ok(())
    }

    async fn open_lane(&self, _: &ProviderName, _: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        Err(QueueError::Refused("no lanes in these tests".to_owned()))
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        {
            let mut state = self.state();
            state.in_flight += 1;
            state.in_flight_most = state.in_flight_most.max(state.in_flight);
        }
        // Lets other publishes begin before this one is confirmed.
        tokio::task::yield_now().await;
        let mut state = self.state();
        state.in_flight -= 1;
        if message.properties.message_id.as_ref().is_some_and(|id| state.unconfirmed.contains(id)) {
            return Err(QueueError::NotConfirmed("nack".to_owned()));
        }
        state.published.push(message);
        Ok(())
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        Ok(None)
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        let state = self.state();
        match provider.as_str() {
            name if state.lanes_refused.iter().any(|refused| refused == name) => {
                Err(QueueError::Refused("ACCESS_REFUSED".to_owned()))
            }
            name => Ok((!state.lanes_missing.iter().any(|missing| missing == name)).then_some(0)),
        }
    }

    async fn topology_problems(&self, _: &[ProviderName]) -> Result<Vec<TopologyProblem>, QueueError> {
        Ok(self.state().unfit.clone())
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        match self.state().broker_unavailable {
            true => Err(QueueError::Unavailable("refused".to_owned())),
            false => Ok(None),
        }
    }
}
