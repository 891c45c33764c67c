//! Where `path` and `fidelity` run: engines with names of the run's own, strict providers in this process, their rows.
//!
//! Refuses a database with anybody's providers in it: a worker runs here, and would call them. What it puts up it takes
//! down again, but for the rows and jobs of the run, which a ledger never forgets.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::progress::Phase;
use super::scratch::Scratch;
use super::workers::BenchWorkers;
use super::{broker, meter};
use crate::cli::connect::Services;
use crate::cli::{CommandError, Console};
use crate::config::{self, Config, LimiterUrl, QueueUrl};
use crate::domain::job::{Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::ProviderRow;
use crate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use crate::queue::message::encode;
use crate::queue::{Destination, OutgoingMessage, Properties, Queue};

/// Begins the names of our providers, and of everything on broker and limiter.
const NAME: &str = "bench-";
const PREFIX: &str = "sluicegate-bench";
/// Publishes under way at once.
const PUBLISHES_AT_ONCE: usize = 64;
const RETENTION_S: i64 = 86_400;
const TIMEOUT_MS: i64 = 10_000;

/// One strict provider of this run, and the lane of its jobs.
pub struct BenchProvider {
    pub name: ProviderName,
    pub fake: FakeHandle,
    row: ProviderRow,
    _serving: DropGuard,
}

pub struct BenchEnvironment<'a> {
    pub config: Config,
    /// Eight hexadecimal digits that no other run has.
    pub run: String,
    services: &'a dyn Services,
    rows: Vec<ProviderRow>,
    servers: JoinSet<std::io::Result<()>>,
    _scratch: Option<Scratch>,
}

impl<'a> BenchEnvironment<'a> {
    /// Takes the configured engines, or an embedded deployment in a directory of its own.
    ///
    /// # Errors
    /// When the database holds providers of somebody, or an engine is away.
    pub async fn prepare(embedded: bool, config: &Config, engines: &'a dyn Services) -> Result<Self, CommandError> {
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
        let rows = engines.settings(&config).await?.readable_rows(None).await?;
        if let Some(row) = rows.iter().find(|row| !row.name.starts_with(NAME)) {
            let text = format!(
                "database.url: it holds the provider `{}`, and a worker of this bench would send its jobs: give the \
                 bench an empty database, or use --embedded",
                row.name
            );
            return Err(CommandError::Configuration(text));
        }
        Ok(Self { config, run, services: engines, rows: Vec::new(), servers: JoinSet::new(), _scratch: scratch })
    }

    /// Starts a provider and writes its row; `columns` are what differs from the defaults.
    ///
    /// # Errors
    /// When the row cannot be written.
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
        let name = ProviderName::new(format!("{NAME}{}{suffix}", self.run)).map_err(CommandError::Failed)?;
        let row = ProviderRow {
            name: name.to_string(),
            url,
            timeout_ms: TIMEOUT_MS,
            idempotency_retention_s: Some(RETENTION_S),
            ..columns
        };
        self.services.validate(&row).map_err(|bad| CommandError::Configuration(bad.problems.join("; ")))?;
        self.services.settings(&self.config).await?.apply(std::slice::from_ref(&row), false).await?;
        self.services.queue(&self.config).await?.declare(std::slice::from_ref(&name)).await?;
        self.rows.push(row.clone());
        Ok(BenchProvider { name, fake: handle, row, _serving: stop.drop_guard() })
    }

    /// Starts so many workers, each with limiter, gates and lanes of its own, in this process.
    ///
    /// # Errors
    /// When an engine is away.
    pub async fn start(&self, workers: u16) -> Result<BenchWorkers, CommandError> {
        let mut crew = BenchWorkers::default();
        for number in 0..workers {
            let (engines, lock) = self.services.worker_backends(&self.config).await?;
            crew.add(format!("{NAME}{}-{number}", self.run), engines, lock);
        }
        Ok(crew)
    }

    /// Publishes jobs, and returns how many are confirmed when all are or the time is over.
    ///
    /// # Errors
    /// When the broker refuses one.
    pub async fn publish(
        &self,
        stand: &BenchProvider,
        jobs: u64,
        within: Duration,
        console: &mut Console,
    ) -> Result<u64, CommandError> {
        let queue = self.services.queue(&self.config).await?;
        let queue: &dyn Queue = queue.as_ref();
        let mut phase = Phase::begin("jobs published", jobs, console)?;
        let until = Instant::now() + within;
        // The time is looked at before each publish: one that is under way is always waited for.
        let due = stream::iter(1..=jobs).take_while(|_| std::future::ready(Instant::now() < until));
        let publishing =
            due.map(|number| async move { queue.publish(message(stand, number)?).await.map_err(to_command_error) });
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

    /// Publishes one job.
    ///
    /// # Errors
    /// When the broker refuses it.
    pub async fn publish_one(&self, stand: &BenchProvider, number: u64) -> Result<(), CommandError> {
        Ok(self.services.queue(&self.config).await?.publish(message(stand, number)?).await?)
    }

    /// Disables the rows, and removes what broker and limiter hold under the run's prefix.
    ///
    /// # Errors
    /// When an engine is away.
    pub async fn tear_down(mut self) -> Result<(), CommandError> {
        self.rows.iter_mut().for_each(|row| row.enabled = false);
        let disabled = self.disable().await;
        // A worker declares the lanes of every row: those of earlier runs as well.
        let lanes =
            disabled.as_ref().map_or_else(|_| self.rows.iter().map(|row| row.name.clone()).collect(), Clone::clone);
        let mut removed = Ok(());
        if let QueueUrl::Amqp(url) = &self.config.queue.url {
            removed = broker::remove(url.expose(), &self.config.queue.prefix, lanes.into_iter()).await;
        }
        let mut forgotten = Ok(());
        if let LimiterUrl::Redis(url) = &self.config.limiter.url {
            let prefix = &self.config.limiter.prefix;
            forgotten = async { meter::RedisMeter::connect(url.expose()).await?.remove(prefix).await }.await;
        }
        disabled?;
        removed.map_err(|error| CommandError::Failed(format!("queues of the run are left behind: {error}")))?;
        forgotten.map_err(|error| CommandError::Failed(format!("limiter keys of the run are left behind: {error}")))
    }
}

impl BenchEnvironment<'_> {
    /// Disables the rows of this run; the names of all that there are.
    async fn disable(&self) -> Result<Vec<String>, CommandError> {
        let settings = self.services.settings(&self.config).await?;
        settings.apply(&self.rows, false).await?;
        Ok(settings.provider_names().await?)
    }
}

impl BenchProvider {
    /// Requests at once that one worker makes.
    #[must_use]
    pub fn in_flight(&self) -> i64 {
        self.row.workers
    }
}

fn to_command_error(error: crate::queue::QueueError) -> CommandError {
    error.into()
}

/// Everything embedded, on a file: a ledger in memory would not be durable.
fn in_directory(scratch: &Scratch) -> Result<Config, CommandError> {
    let file = scratch.directory.join("bench.db");
    let sets = [format!("database.url=sqlite://{}", file.display()), "ops.listen=none".to_owned()];
    config::load(None, [], &sets).map_err(|problems| CommandError::Failed(problems.to_string()))
}

fn message(stand: &BenchProvider, number: u64) -> Result<OutgoingMessage, CommandError> {
    let job = Job {
        id: JobId::new(format!("{}-{number:07}", stand.name)).map_err(CommandError::Failed)?,
        provider: stand.name.clone(),
        amount: i64::try_from(100 + number % 900).unwrap_or(100),
        currency: "EUR".to_owned(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    };
    Ok(OutgoingMessage {
        destination: Destination::Lane(stand.name.clone()),
        body: Bytes::from(encode(&job)),
        properties: Properties { message_id: Some(job.id.as_str().to_owned()), ..Properties::default() },
    })
}
