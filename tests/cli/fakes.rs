//! Backends in memory that record the effects of commands and return prepared failures: an SQLite database and a fake
//! queue.

use std::io::Write;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use clap::Parser as _;
use sluicegate::cli::connect::{CheckedMessage, Probe, RunLock, Services};
use sluicegate::cli::console::TableShape;
use sluicegate::cli::{Cli, CommandError, Console, Exit};
use sluicegate::config::{self, CardNumbers, Config};
use sluicegate::domain::job::Identifier;
use sluicegate::domain::provider::{Provider, ProviderName};
use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ledger::settings::InvalidRow;
use sluicegate::limiter::Limiter;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::provider::secret_grants::{SecretReference, SecretUse};
use sluicegate::queue::{DeadLetter, LaneConsumer, OutgoingMessage, Queue, QueueError, TopologyProblem};
use sqlx::AssertSqlSafe;

#[derive(Clone)]
pub struct Engine {
    state: Arc<Mutex<State>>,
    /// In memory.
    pub database: Database,
}

#[derive(Default)]
pub struct State {
    pub declared: Vec<ProviderName>,
    pub published: Vec<OutgoingMessage>,
    pub in_flight: usize,
    pub in_flight_most: usize,
    /// Ids whose publish the broker does not confirm.
    pub unconfirmed: Vec<String>,
    pub migrated: bool,
    pub broker_unavailable: bool,
    pub database_unavailable: bool,
    /// Variables that every provider needs and that are not set.
    pub secrets_missing: Vec<String>,
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
        limits: vec![second],
        ..ProviderRow::default()
    }
}

/// The row that a file describes by one word; `broken` names an invalid one.
fn file_row(name: &str) -> ProviderRow {
    let timeout_ms = if name == "broken" { 0 } else { row(name).timeout_ms };
    ProviderRow { timeout_ms, ..row(name) }
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
    /// With a migrated database without providers.
    pub async fn new() -> Self {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        Self { state: Arc::default(), database }
    }

    pub async fn with_providers(names: &[&str]) -> Self {
        let engine = Self::new().await;
        engine.set_rows(&names.iter().map(|name| row(name)).collect::<Vec<_>>()).await;
        engine
    }

    pub fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
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
        let cli = Cli::try_parse_from(["sluicegate"].iter().chain(line)).unwrap();
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let config = config::load(None, variables, &cli.set).unwrap();
        let (out, err) = (Page::default(), Page::default());
        let mut console = Console::new(Box::new(out.clone()), Box::new(err.clone()), TableShape::Plain);
        let result = sluicegate::cli::execute(&cli.command, &config, self, &mut console).await;
        Ran { result, out: out.text(), err: err.text() }
    }
}

#[async_trait]
impl Services for Engine {
    async fn migrate(&self, _: &Config) -> Result<bool, CommandError> {
        Ok(!std::mem::replace(&mut self.state().migrated, true))
    }

    async fn ledger(&self, _: &Config) -> Result<Database, CommandError> {
        if self.state().database_unavailable {
            return Err(LedgerError::NotMigrated.into());
        }
        Ok(self.database.clone())
    }

    async fn queue(&self, _: &Config) -> Result<Arc<dyn Queue>, CommandError> {
        if self.state().broker_unavailable {
            return Err(QueueError::Unavailable("refused".to_owned()).into());
        }
        Ok(Arc::new(self.clone()))
    }

    async fn limiter(&self, _: &Config) -> Result<Arc<dyn Limiter>, CommandError> {
        Ok(Arc::new(EmbeddedLimiter::new()))
    }

    async fn check_no_other_run(&self, _: &Config) -> Result<(), CommandError> {
        Ok(())
    }

    async fn worker_backends(&self, _: &Config) -> Result<(sluicegate::worker::Backends, RunLock), CommandError> {
        Err(CommandError::Failed("these engines carry no worker".to_owned()))
    }

    fn probes(&self, _: &Config) -> Vec<Box<dyn Probe>> {
        Vec::new()
    }

    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
        match text.split_once("bad line") {
            Some((before, _)) => Err(vec![format!("line {}: is bad", before.matches('\n').count() + 1)]),
            None => Ok(text.split_whitespace().map(file_row).collect()),
        }
    }

    fn provider_problems(&self, _: &Provider) -> Vec<String> {
        Vec::new()
    }

    fn check_callable(&self, _: &Provider, _: &Config) -> Result<(), String> {
        Ok(())
    }

    fn secret_uses(&self, provider: &Provider, _: &Config) -> Vec<SecretUse> {
        let reference = |value: &String| SecretReference::parse(value.strip_prefix("${")?.strip_suffix('}')?).ok();
        let to_its_host = |reference| SecretUse { reference, host: "pay.example.com".to_owned() };
        provider.headers.values().filter_map(reference).map(to_its_host).collect()
    }

    async fn unreadable_secrets(&self, provider: &Provider, _: &Config) -> Vec<String> {
        let missing = &self.state().secrets_missing;
        missing.iter().filter(|_| provider.enabled).map(|name| format!("header `x`: `{name}` is not set")).collect()
    }

    fn validate(&self, row: &ProviderRow) -> Result<Provider, InvalidRow> {
        row.validate(0)
    }

    fn check_message(&self, body: &[u8], lane: &ProviderName, _: CardNumbers) -> Result<CheckedMessage, String> {
        let message: serde_json::Value = serde_json::from_slice(body).map_err(|_| "malformed: not JSON".to_owned())?;
        if message["amount"].as_i64().is_none_or(|amount| amount <= 0) {
            return Err("bad_amount: amount must be a whole number above 0".to_owned());
        }
        if message["provider"].as_str().is_some_and(|provider| provider != lane.as_str()) {
            return Err("wrong_provider: provider must agree with the lane".to_owned());
        }
        let id = Identifier::new(message["id"].as_str().unwrap_or_default()).map_err(|why| format!("bad_id: {why}"))?;
        let warnings = message.get("payload").map(|_| "payload was seen".to_owned());
        Ok(CheckedMessage { id, warnings: warnings.into_iter().collect() })
    }

    async fn close(&self) {}
}

#[async_trait]
impl Queue for Engine {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        let mut state = self.state();
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
        Ok(None)
    }
}
