//! The composition root: it opens the backend behind each interface, by the URLs of the configuration.
//!
//! It has no business logic: it opens, wires and closes. No other module knows all parts.

use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use secrecy::SecretString;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use uuid::Uuid;

use crate::cli::CommandError;
use crate::cli::connect::{CheckedMessage, MissingDatabase, Probe, RunLock, Services};
use crate::config::{Config, DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::database::{AdvisoryRunLock, Database, SchemaState};
use crate::ledger::provider_row::{ParsedProviderFile, ProviderRow, mark_unmentioned_pauses, read_provider_file};
use crate::ledger::settings::InvalidRow;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::limiter::leader_election::LeadershipTiming;
use crate::limiter::leadership::LeaderGuardedLimiter;
use crate::limiter::redis::client::RedisLimiter;
use crate::limiter::single_process::{SessionLock, SingleProcessLimiter};
use crate::limiter::{Limiter, LimiterError, RemoteLimiter};
use crate::provider::http::{HttpProvider, OutboundPolicy};
use crate::provider::secret_grants::SecretUse;
use crate::provider::{FreezeError, PaymentProvider, ProviderFactory};
use crate::queue::Queue;
use crate::queue::embedded::EmbeddedQueue;
use crate::queue::message::{CardNumbers, DecodeError, decode};
use crate::queue::rabbitmq::{RabbitMq, RabbitSettings as BrokerSettings};
use crate::worker;
use crate::worker::settings_sync::POLL_INTERVAL;

mod probes;

/// Longest time to close the backends. A backend that does not answer must not delay the exit.
const CLOSE_MAX: Duration = Duration::from_secs(3);

const ANOTHER_RUN: &str = "another `sluicegate run` uses this database with an embedded limiter or queue: stop it, or set \
                           limiter.url to Redis and queue.url to RabbitMQ for more than one worker";

/// The backends of one process, each opened at its first use.
#[derive(Default)]
pub struct App {
    /// What to do if the database's file is missing. An existing SQLite file is migrated only with
    /// [`MissingDatabase::Create`].
    missing_database: MissingDatabase,
    database: OnceCell<Database>,
    queue: OnceCell<OpenQueue>,
    limiter: OnceCell<Arc<dyn Limiter>>,
}

#[derive(Clone)]
enum OpenQueue {
    Embedded(Arc<EmbeddedQueue>),
    Rabbit(Arc<RabbitMq>),
}

impl OpenQueue {
    fn as_queue(&self) -> Arc<dyn Queue> {
        match self {
            Self::Embedded(queue) => queue.clone(),
            Self::Rabbit(queue) => queue.clone(),
        }
    }
}

impl App {
    /// The backends of a command.
    pub fn new(missing_database: MissingDatabase) -> Self {
        Self { missing_database, ..Self::default() }
    }

    /// The database. An embedded one is migrated by the commands that may create it.
    pub async fn database(&self, config: &Config) -> Result<&Database, CommandError> {
        let open = || async {
            let is_missing = missing_file(&config.database.url);
            if let (Some(path), MissingDatabase::Fail) = (is_missing, self.missing_database) {
                return Err(CommandError::DatabaseMissing { path: path.to_owned() });
            }
            if is_missing.is_some() && self.missing_database == MissingDatabase::InMemory {
                let in_memory = Database::open("sqlite::memory:", 1)?;
                in_memory.migrate().await?;
                return Ok(in_memory);
            }
            let database = open_database_in_thread(config).await?;
            // Commands that only open a file do not migrate it. A database in memory is always new.
            let migrates = match config.database.url {
                DatabaseUrl::Sqlite { path: Some(_), .. } => self.missing_database == MissingDatabase::Create,
                DatabaseUrl::Sqlite { path: None, .. } => true,
                DatabaseUrl::Postgres(_) => false,
            };
            if migrates {
                database.migrate().await?;
            }
            if database.schema_state().await? == SchemaState::NotMigrated {
                return Err(LedgerError::NotMigrated.into());
            }
            Ok::<_, CommandError>(database)
        };
        self.database.get_or_try_init(open).await
    }

    /// The limiter of a worker. With Redis or PostgreSQL, the leader row in the database names the limiter leader.
    async fn worker_limiter(
        &self,
        config: &Config,
        database: &Database,
        session: Option<&Arc<DatabaseSessionLock>>,
    ) -> Result<Arc<dyn Limiter>, CommandError> {
        let store: Arc<dyn RemoteLimiter> = match (&config.limiter.url, session) {
            (LimiterUrl::Embedded, None) => return self.limiter(config).await,
            (LimiterUrl::Embedded, Some(session)) => {
                let run_id = format!("embedded-{}", Uuid::now_v7().simple());
                Arc::new(SingleProcessLimiter::new(run_id, Arc::<DatabaseSessionLock>::clone(session)))
            }
            _ => Arc::new(redis_limiter(config).map_err(|error| CommandError::Configuration(error.to_string()))?),
        };
        let rows = Arc::new(database.clone());
        Ok(Arc::new(LeaderGuardedLimiter::new(store, rows, LeadershipTiming::with_poll_interval(POLL_INTERVAL))))
    }

    async fn open_queue(&self, config: &Config) -> Result<&OpenQueue, CommandError> {
        let open = || async {
            match &config.queue.url {
                QueueUrl::Amqp(url) => {
                    let (url, prefix) = (SecretString::from(url.expose()), config.queue.prefix.clone());
                    let settings = run_blocking(move || BrokerSettings::new(&url, &prefix)).await?;
                    let settings = settings.with_authorities(&config.authorities);
                    Ok(OpenQueue::Rabbit(Arc::new(RabbitMq::connect(settings))))
                }
                QueueUrl::Embedded => {
                    let pool = self.database(config).await?.sqlite_pool().ok_or_else(|| {
                        CommandError::Configuration("queue.url: the embedded queue needs a SQLite database".to_owned())
                    })?;
                    Ok(OpenQueue::Embedded(Arc::new(EmbeddedQueue::new(pool))))
                }
            }
        };
        self.queue.get_or_try_init(open).await
    }
}

/// The lock of an embedded limiter or queue, which serve one process: two limiters would each grant the whole limit.
enum ProcessLock {
    /// No other process can reach the database.
    InMemory,
    File(File),
    Session(Arc<DatabaseSessionLock>),
}

/// Whether the limiter or the queue is embedded.
fn is_embedded(config: &Config) -> bool {
    matches!(config.limiter.url, LimiterUrl::Embedded) || matches!(config.queue.url, QueueUrl::Embedded)
}

async fn acquire_process_lock(config: &Config, database: &Database) -> Result<ProcessLock, CommandError> {
    let taken = || CommandError::Configuration(ANOTHER_RUN.to_owned());
    match &config.database.url {
        DatabaseUrl::Postgres(_) => {
            let run = database.try_run_lock().await?.ok_or_else(taken)?;
            Ok(ProcessLock::Session(Arc::new(DatabaseSessionLock(run))))
        }
        DatabaseUrl::Sqlite { path: None, .. } => Ok(ProcessLock::InMemory),
        DatabaseUrl::Sqlite { path: Some(path), .. } => {
            // The resolved path: through a link, a second worker would lock another file.
            let mut name = path.canonicalize()?.into_os_string();
            name.push(".lock");
            let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&name)?;
            match file.try_lock() {
                Ok(()) => Ok(ProcessLock::File(file)),
                Err(TryLockError::WouldBlock) => Err(taken()),
                Err(TryLockError::Error(error)) => Err(error.into()),
            }
        }
    }
}

impl ProcessLock {
    fn session(&self) -> Option<&Arc<DatabaseSessionLock>> {
        match self {
            Self::Session(session) => Some(session),
            Self::InMemory | Self::File(_) => None,
        }
    }

    fn into_run_lock(self) -> RunLock {
        match self {
            Self::InMemory => None,
            Self::File(file) => Some(Box::new(file)),
            Self::Session(session) => Some(Box::new(session)),
        }
    }
}

/// The run lock, held by a session of the database.
struct DatabaseSessionLock(AdvisoryRunLock);

#[async_trait]
impl SessionLock for DatabaseSessionLock {
    async fn check_held(&self) -> Result<(), String> {
        match self.0.is_held().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(ANOTHER_RUN.to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The file of an embedded database, if it is missing.
fn missing_file(url: &DatabaseUrl) -> Option<&Path> {
    match url {
        DatabaseUrl::Sqlite { path: Some(path), .. } if !path.exists() => Some(path),
        _ => None,
    }
}

/// Runs blocking work on another thread: a hanging mount must not block the tasks of this thread.
async fn run_blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, CommandError>
where
    T: Send + 'static,
    E: Send + 'static,
    CommandError: From<E>,
{
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|error| CommandError::Failed(error.to_string()))??)
}

async fn open_database_in_thread(config: &Config) -> Result<Database, CommandError> {
    let config = config.clone();
    run_blocking(move || open_database(&config)).await
}

fn open_database(config: &Config) -> Result<Database, LedgerError> {
    let Config { database, authorities, .. } = config;
    Database::open_with_authorities(database.url.expose(), database.max_connections, authorities)
}

/// A limiter on the Redis or Redis Cluster that `limiter.url` names.
fn redis_limiter(config: &Config) -> Result<RedisLimiter, LimiterError> {
    let prefix = &config.limiter.prefix;
    let limiter = match &config.limiter.url {
        LimiterUrl::Redis(url) => RedisLimiter::new(url.expose(), prefix),
        cluster => RedisLimiter::cluster(cluster.nodes().iter().map(SecretUrl::expose), prefix),
    };
    limiter?.with_plaintext_hosts(&config.plaintext_hosts).with_authorities(&config.authorities)
}

fn outbound_policy(config: &Config) -> Result<OutboundPolicy, String> {
    let policy = OutboundPolicy::parse(&config.outbound_allow)
        .map_err(|problems| format!("outbound.allow: {}", problems.join("; ")))?;
    Ok(policy.with_authorities(&config.authorities).with_secret_grants(&config.outbound_secrets, &config.config_files))
}

/// Provider rows over HTTP, within the outbound policy.
struct HttpProviders(OutboundPolicy);

impl ProviderFactory for HttpProviders {
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError> {
        Ok(Arc::new(HttpProvider::new(provider, &self.0)?))
    }
}

#[async_trait]
impl Services for App {
    async fn migrate(&self, config: &Config) -> Result<bool, CommandError> {
        let database = open_database_in_thread(config).await?;
        let behind = database.schema_state().await? == SchemaState::NotMigrated;
        database.migrate().await?;
        database.close().await;
        Ok(behind)
    }

    async fn ledger(&self, config: &Config) -> Result<Database, CommandError> {
        Ok(self.database(config).await?.clone())
    }

    async fn queue(&self, config: &Config) -> Result<Arc<dyn Queue>, CommandError> {
        Ok(self.open_queue(config).await?.as_queue())
    }

    async fn limiter(&self, config: &Config) -> Result<Arc<dyn Limiter>, CommandError> {
        let open = || async {
            match &config.limiter.url {
                LimiterUrl::Embedded => Ok(Arc::new(EmbeddedLimiter::new()) as Arc<dyn Limiter>),
                LimiterUrl::Redis(_) | LimiterUrl::RedisCluster(_) => redis_limiter(config)
                    .map(|limiter| Arc::new(limiter) as Arc<dyn Limiter>)
                    .map_err(|error| CommandError::Configuration(error.to_string())),
            }
        };
        Ok(Arc::clone(self.limiter.get_or_try_init(open).await?))
    }

    async fn check_no_other_run(&self, config: &Config) -> Result<(), CommandError> {
        if is_embedded(config) {
            acquire_process_lock(config, self.database(config).await?).await?;
        }
        Ok(())
    }

    async fn worker_backends(&self, config: &Config) -> Result<(worker::Backends, RunLock), CommandError> {
        let database = self.database(config).await?;
        let lock =
            if is_embedded(config) { acquire_process_lock(config, database).await? } else { ProcessLock::InMemory };
        let queue = self.open_queue(config).await?;
        if let OpenQueue::Embedded(queue) = queue {
            let messages = queue.recover().await?;
            tracing::debug!(messages, "messages of an earlier run are available again");
        }
        let outbound = outbound_policy(config).map_err(CommandError::Configuration)?;
        let backends = worker::Backends {
            queue: queue.as_queue(),
            ledger: database.clone(),
            limiter: self.worker_limiter(config, database, lock.session()).await?,
            providers: Arc::new(HttpProviders(outbound)),
        };
        Ok((backends, lock.into_run_lock()))
    }

    fn probes(&self, config: &Config) -> Vec<Box<dyn Probe>> {
        probes::all_probes(config)
    }

    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
        let ParsedProviderFile { mut rows, mut problems } = read_provider_file(text);
        if !problems.is_empty() {
            // The problems of the readable rows are reported in the same run.
            for provider in rows.iter().filter_map(|row| row.validate(0).ok()) {
                let found = self.provider_problems(&provider).into_iter();
                problems.extend(found.map(|problem| format!("provider `{}`: {problem}", provider.name)));
            }
            return Err(problems);
        }
        mark_unmentioned_pauses(text, &mut rows);
        Ok(rows)
    }

    fn validate(&self, row: &ProviderRow) -> Result<Provider, InvalidRow> {
        row.validate(0)
    }

    fn provider_problems(&self, provider: &Provider) -> Vec<String> {
        HttpProvider::problems(provider).iter().map(ToString::to_string).collect()
    }

    fn check_callable(&self, provider: &Provider, config: &Config) -> Result<(), String> {
        HttpProvider::new(provider, &outbound_policy(config)?).map(drop).map_err(|error| error.to_string())
    }

    fn secret_uses(&self, provider: &Provider, config: &Config) -> Vec<SecretUse> {
        outbound_policy(config).map(|outbound| HttpProvider::secret_uses(provider, &outbound)).unwrap_or_default()
    }

    async fn unreadable_secrets(&self, provider: &Provider, config: &Config) -> Vec<String> {
        let Some(outbound) = outbound_policy(config).ok() else { return Vec::new() };
        let Ok(usable) = HttpProvider::new(provider, &outbound) else { return Vec::new() };
        usable.unreadable_secrets().await.iter().map(ToString::to_string).collect()
    }

    fn check_message(
        &self,
        body: &[u8],
        lane: &ProviderName,
        card_numbers: CardNumbers,
    ) -> Result<CheckedMessage, String> {
        match decode(body, lane, card_numbers) {
            Ok(decoded) => Ok(CheckedMessage { id: decoded.job.id, warnings: decoded.warnings }),
            Err(DecodeError::Invalid { invalid, .. }) => Err(invalid.to_string()),
            Err(DecodeError::NewerVersion(version)) => {
                Err(format!("v is {version}: this program supports version 1; leave the field out"))
            }
        }
    }

    async fn close(&self) {
        let close = async {
            if let Some(OpenQueue::Embedded(queue)) = self.queue.get() {
                queue.close().await;
            }
            if let Some(database) = self.database.get() {
                database.close().await;
            }
        };
        if timeout(CLOSE_MAX, close).await.is_err() {
            tracing::debug!("a backend could not be closed in time; its leases expire");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stuck_backend_does_not_block_exit() {
        let config = crate::config::load(None, [], &["database.url=sqlite::memory:".to_owned()]).unwrap();
        let app = App::default();
        let pool = app.database(&config).await.unwrap().sqlite_pool().unwrap();
        let busy = pool.acquire().await.unwrap();
        // Without the timeout it would wait for the connection, which is never returned.
        timeout(Duration::from_secs(60), app.close()).await.unwrap();
        assert!(pool.is_closed(), "it was tried");
        drop(busy);
    }
}
