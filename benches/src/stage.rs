//! The environment of the benchmarks `path` and `fidelity`: backends with names of this run, strict providers in this
//! process, and their rows.
//!
//! It rejects a database with other providers, because a worker runs here and would call them. Afterwards it removes
//! what it created, except rows and jobs, which a ledger keeps.

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::progress::Phase;
use super::scratch::Scratch;
use super::workers::BenchWorkers;
use super::{broker, meter};
use sluicegate::app::Services;
use sluicegate::cli::enqueue::door::{self, Door, OpenDoor};
use sluicegate::cli::{CommandError, Console};
use sluicegate::config::{self, Config, LimiterUrl, QueueUrl};
use sluicegate::domain::job::{Identifier, Job, JobId};
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use sluicegate::queue::message::{CardNumbers, encode};

/// Prefix of our providers' names.
const NAME: &str = "bench-";
/// Prefix of everything in broker and limiter.
const PREFIX: &str = "sluicegate-bench";
/// Concurrent publishes.
const PUBLISHES_AT_ONCE: usize = 64;
/// Accounts whose jobs take turns.
const ACCOUNTS: u64 = 50;
const RETENTION_S: i64 = 86_400;
const TIMEOUT_MS: i64 = 10_000;

/// One strict provider of this run, and the lane of its jobs.
pub struct BenchProvider {
    pub name: ProviderName,
    pub fake: FakeHandle,
    row: ProviderRow,
    door: Door,
    _serving: DropGuard,
}

pub struct BenchEnvironment<'a> {
    pub config: Config,
    /// Eight hexadecimal digits that identify the run.
    pub run: String,
    services: &'a Services,
    rows: Vec<ProviderRow>,
    servers: JoinSet<std::io::Result<()>>,
    _scratch: Option<Scratch>,
}

impl<'a> BenchEnvironment<'a> {
    /// Uses the configured backends, or an embedded deployment in a temporary directory.
    ///
    /// # Errors
    /// When the database has other providers, or a backend is unreachable.
    pub async fn prepare(embedded: bool, config: &Config, services: &'a Services) -> Result<Self, CommandError> {
        let scratch = if embedded { Some(Scratch::make()?) } else { None };
        let mut config = match &scratch {
            None => config.clone(),
            Some(scratch) => in_directory(scratch)?,
        };
        let digits = uuid::Uuid::now_v7().simple().to_string();
        let run = digits.get(24..).unwrap_or(&digits).to_owned();
        config.queue.prefix = format!("{PREFIX}-{run}");
        config.limiter.prefix = format!("{PREFIX}-{run}");
        config.outbound_allow = vec!["loopback".to_owned()];
        let rows = services.ledger(&config).await?.readable_rows(None).await?;
        if let Some(row) = rows.iter().find(|row| !row.name.starts_with(NAME)) {
            let text = format!(
                "database.url: it has the provider `{}`, and a worker of this benchmark would send its jobs: use an \
                 empty database or --embedded",
                row.name
            );
            return Err(CommandError::Configuration(text));
        }
        Ok(Self { config, run, services, rows: Vec::new(), servers: JoinSet::new(), _scratch: scratch })
    }

    /// Starts a provider and writes its row; `columns` are those that differ from the defaults.
    pub async fn add(
        &mut self,
        suffix: &str,
        options: FakeOptions,
        columns: ProviderRow,
    ) -> Result<BenchProvider, CommandError> {
        let fake = FakeProvider::new(options);
        let handle = fake.handle();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/charges", listener.local_addr()?);
        let stop = CancellationToken::new();
        self.servers.spawn(fake.serve(listener, stop.clone()));
        let name = ProviderName::new(format!("{NAME}{}{suffix}", self.run))
            .map_err(|problem| CommandError::Failed(problem.to_string()))?;
        let row = ProviderRow {
            name: name.to_string(),
            url,
            timeout_ms: TIMEOUT_MS,
            idempotency_retention_s: Some(RETENTION_S),
            ..columns
        };
        row.validate(0).map_err(|invalid| CommandError::Configuration(invalid.problems.join("; ")))?;
        self.services.ledger(&self.config).await?.apply_settings(std::slice::from_ref(&row), false).await?;
        let names = std::slice::from_ref(&name);
        let OpenDoor { door, .. } = door::open(&self.config, self.services, names, names).await?;
        self.rows.push(row.clone());
        Ok(BenchProvider { name, fake: handle, row, door, _serving: stop.drop_guard() })
    }

    /// Starts workers in this process, each with its own limiter, gates and lanes.
    pub async fn start(&self, workers: u16) -> Result<BenchWorkers, CommandError> {
        let mut started = BenchWorkers::default();
        for number in 0..workers {
            let (backends, lock) = self.services.worker_backends(&self.config).await?;
            started.add(format!("{NAME}{}-{number}", self.run), backends, lock);
        }
        Ok(started)
    }

    /// Publishes jobs, or records them without a broker, until all are confirmed or the time runs out. Returns the number
    /// of confirmed ones.
    pub async fn publish(
        &self,
        provider: &BenchProvider,
        jobs: u64,
        within: Duration,
        console: &mut Console,
    ) -> Result<u64, CommandError> {
        let mut phase = Phase::begin("jobs published", jobs, console)?;
        let until = Instant::now() + within;
        // The time is checked before each publish; a started publish is always awaited.
        let due = stream::iter(1..=jobs).take_while(|_| std::future::ready(Instant::now() < until));
        let publishing = due.map(|number| self.publish_one(provider, number));
        let mut publishing = std::pin::pin!(publishing.buffer_unordered(PUBLISHES_AT_ONCE));
        let mut published = 0;
        while let Some(outcome) = publishing.next().await {
            outcome?;
            published += 1;
            if published % 64 == 0 {
                phase.show(published, console)?;
            }
        }
        Ok(published)
    }

    /// Publishes or records one job.
    pub async fn publish_one(&self, provider: &BenchProvider, number: u64) -> Result<(), CommandError> {
        let BenchProvider { name, door, .. } = provider;
        let checked = door.check(&message(provider, number)?, name, CardNumbers::Refuse).await;
        let payment = checked.map_err(|error| CommandError::Failed(error.to_string()))?;
        door.hand_over(payment).await?;
        Ok(())
    }

    /// Disables the rows, and removes everything with the run's prefix from broker and limiter.
    pub async fn tear_down(mut self) -> Result<(), CommandError> {
        self.rows.iter_mut().for_each(|row| row.enabled = false);
        let disabled = self.disable().await;
        // A worker declares the lanes of every row, also of earlier runs.
        let lanes =
            disabled.as_ref().map_or_else(|_| self.rows.iter().map(|row| row.name.clone()).collect(), Clone::clone);
        let mut removed = Ok(());
        if let QueueUrl::Amqp(url) = &self.config.queue.url {
            removed = broker::remove(url.expose(), &self.config.queue.prefix, lanes.into_iter()).await;
        }
        let mut keys_removed = Ok(());
        if let LimiterUrl::Redis(url) = &self.config.limiter.url {
            let prefix = &self.config.limiter.prefix;
            keys_removed = async { meter::RedisMeter::connect(url.expose()).await?.remove(prefix).await }.await;
        }
        disabled?;
        removed.map_err(|error| CommandError::Failed(format!("the queues of this run were not removed: {error}")))?;
        keys_removed
            .map_err(|error| CommandError::Failed(format!("the limiter keys of this run were not removed: {error}")))
    }
}

impl BenchEnvironment<'_> {
    /// Disables the rows of this run. Returns the names of all providers.
    async fn disable(&self) -> Result<Vec<String>, CommandError> {
        let ledger = self.services.ledger(&self.config).await?;
        ledger.apply_settings(&self.rows, false).await?;
        Ok(ledger.provider_names().await?)
    }
}

impl BenchProvider {
    /// Concurrent requests of one worker.
    pub fn in_flight(&self) -> i64 {
        self.row.workers
    }
}

/// An embedded configuration with a database file: a ledger in memory would not be durable.
fn in_directory(scratch: &Scratch) -> Result<Config, CommandError> {
    let file = scratch.directory.join("bench.db");
    let sets = [format!("database.url=sqlite://{}", file.display()), "ops.listen=none".to_owned()];
    config::load(None, [], &sets).map_err(|problems| CommandError::Failed(problems.to_string()))
}

fn message(provider: &BenchProvider, number: u64) -> Result<Vec<u8>, CommandError> {
    let id = format!("{}-{number:07}", provider.name);
    let account = format!("account-{}", number % ACCOUNTS);
    let job = Job {
        id: JobId::new(id).map_err(|problem| CommandError::Failed(problem.to_string()))?,
        provider: provider.name.clone(),
        amount: i64::try_from(100 + number % 900).unwrap_or(100),
        currency: "EUR".into(),
        account: Some(Identifier::new(account).map_err(|problem| CommandError::Failed(problem.to_string()))?),
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    };
    Ok(encode(&job))
}
