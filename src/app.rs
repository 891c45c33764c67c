//! The composition root: it builds ledger, queue, limiter and providers from the configuration, each at its first use.
//!
//! It has no business logic: it opens, wires and closes. Commands and `main` use it; it knows nothing of them.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use secrecy::SecretString;
use tokio::sync::OnceCell;
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::timeout;
use uuid::Uuid;

use crate::config::{Config, DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
use crate::domain::provider::Provider;
use crate::ledger::LedgerError;
use crate::ledger::database::{AdvisoryRunLock, Database, SchemaState};
use crate::limiter::embedded::{EmbeddedLimiter, SessionLock, SingleProcessLimiter};
use crate::limiter::leader_election::LeadershipTiming;
use crate::limiter::leadership::LeaderGuardedLimiter;
use crate::limiter::redis::client::RedisLimiter;
use crate::limiter::{Limiter, LimiterError, RemoteLimiter};
use crate::provider::http::{HttpProvider, OutboundPolicy};
use crate::provider::{FreezeError, PaymentProvider, ProviderFactory};
use crate::queue::rabbitmq::{RabbitMq, RabbitSettings as BrokerSettings};
use crate::queue::{Queue, QueueError};
use crate::worker;
use crate::worker::settings_sync::POLL_INTERVAL;

/// Longest time to close the backends. A backend that does not answer must not delay the exit.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// What to do when the file of an embedded database does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingDatabase {
    #[default]
    Create,
    /// Report it: the command probably runs in the wrong directory.
    Fail,
    /// Use an empty database in memory, for a dry run.
    InMemory,
}

/// Why a backend was not opened.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The file of an embedded database does not exist.
    #[error("there is no database {}", .path.display())]
    DatabaseMissing { path: PathBuf },
    #[error(
        "another `sluicegate run` uses this database with an embedded limiter: stop it, or set limiter.url to Redis for \
         more than one worker"
    )]
    AnotherRun,
    #[error("outbound.allow: {}", .0.join("; "))]
    OutboundAllow(Vec<String>),
    #[error("the lock of the embedded limiter, {}: {source}", .path.display())]
    Lock { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Limiter(#[from] LimiterError),
    #[error(transparent)]
    Thread(#[from] JoinError),
}

/// Keeps out a second `run` with an embedded limiter: two limiters would each grant the whole limit. It is empty with
/// Redis, and for a database that no other process can reach.
#[derive(Default)]
pub struct RunLock {
    _file: Option<File>,
    session: Option<Arc<DatabaseSessionLock>>,
}

/// The backends of one process, each opened at its first use and shared within the process.
#[derive(Default)]
pub struct Services {
    /// What to do if the database's file is missing. An existing SQLite file is migrated only with
    /// [`MissingDatabase::Create`].
    missing_database: MissingDatabase,
    database: OnceCell<Database>,
    queue: OnceCell<Arc<dyn Queue>>,
    limiter: OnceCell<Arc<dyn Limiter>>,
}

impl Services {
    pub fn new(missing_database: MissingDatabase) -> Self {
        Self { missing_database, ..Self::default() }
    }

    /// Uses this queue instead of the configured one.
    pub fn with_queue(self, queue: Arc<dyn Queue>) -> Self {
        Self { queue: OnceCell::new_with(Some(queue)), ..self }
    }

    /// Brings the schema up to date; returns whether it was outdated.
    pub async fn migrate(&self, config: &Config) -> Result<bool, ServiceError> {
        let database = open_database(config).await?;
        let behind = database.schema_state().await? == SchemaState::NotMigrated;
        database.migrate().await?;
        database.close().await;
        Ok(behind)
    }

    /// The ledger's database. An embedded one is migrated by the commands that may create it.
    pub async fn ledger(&self, config: &Config) -> Result<Database, ServiceError> {
        let open = || async {
            let is_missing = missing_file(&config.database.url);
            if let (Some(path), MissingDatabase::Fail) = (is_missing, self.missing_database) {
                return Err(ServiceError::DatabaseMissing { path: path.to_owned() });
            }
            if is_missing.is_some() && self.missing_database == MissingDatabase::InMemory {
                let in_memory = Database::open("sqlite::memory:", 1)?;
                in_memory.migrate().await?;
                return Ok(in_memory);
            }
            let database = open_database(config).await?;
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
            Ok(database)
        };
        Ok(self.database.get_or_try_init(open).await?.clone())
    }

    /// The broker; `None` if `queue.url` names none, because `enqueue` records payments in the database.
    pub async fn queue(&self, config: &Config) -> Result<Option<Arc<dyn Queue>>, ServiceError> {
        let QueueUrl::Amqp(url) = &config.queue.url else { return Ok(self.queue.get().cloned()) };
        let open = || async {
            let url = SecretString::from(url.expose());
            let prefix = config.queue.prefix.clone();
            let settings = spawn_blocking(move || BrokerSettings::new(&url, &prefix)).await??;
            let queue: Arc<dyn Queue> = Arc::new(RabbitMq::connect(settings.with_authorities(&config.authorities)));
            Ok::<_, ServiceError>(queue)
        };
        self.queue.get_or_try_init(open).await.cloned().map(Some)
    }

    pub async fn limiter(&self, config: &Config) -> Result<Arc<dyn Limiter>, ServiceError> {
        let open = || async {
            let limiter: Arc<dyn Limiter> = match &config.limiter.url {
                LimiterUrl::Embedded => Arc::new(EmbeddedLimiter::new()),
                LimiterUrl::Redis(_) | LimiterUrl::RedisCluster(_) => Arc::new(redis_limiter(config)?),
            };
            Ok::<_, ServiceError>(limiter)
        };
        Ok(Arc::clone(self.limiter.get_or_try_init(open).await?))
    }

    /// Fails when another `run` uses the same embedded limiter. Connects to nothing but the database.
    pub async fn check_no_other_run(&self, config: &Config) -> Result<(), ServiceError> {
        acquire_run_lock(config, &self.ledger(config).await?).await.map(drop)
    }

    /// The backends of a worker, after every check for its start. The worker may run while the lock is held.
    pub async fn worker_backends(&self, config: &Config) -> Result<(worker::Backends, RunLock), ServiceError> {
        let ledger = self.ledger(config).await?;
        let lock = acquire_run_lock(config, &ledger).await?;
        let queue = self.queue(config).await?;
        let providers = Arc::new(providers(config)?);
        let limiter = self.worker_limiter(config, &ledger, lock.session.clone()).await?;
        Ok((worker::Backends { queue, ledger, limiter, providers }, lock))
    }

    /// The limiter of a worker. With Redis or PostgreSQL, the leader row in the database names the limiter leader.
    async fn worker_limiter(
        &self,
        config: &Config,
        database: &Database,
        session: Option<Arc<DatabaseSessionLock>>,
    ) -> Result<Arc<dyn Limiter>, ServiceError> {
        let store: Arc<dyn RemoteLimiter> = match (&config.limiter.url, session) {
            (LimiterUrl::Embedded, None) => return self.limiter(config).await,
            (LimiterUrl::Embedded, Some(session)) => {
                let run_id = format!("embedded-{}", Uuid::now_v7().simple());
                Arc::new(SingleProcessLimiter::new(run_id, session))
            }
            _ => Arc::new(redis_limiter(config)?),
        };
        let rows = Arc::new(database.clone());
        Ok(Arc::new(LeaderGuardedLimiter::new(store, rows, LeadershipTiming::with_poll_interval(POLL_INTERVAL))))
    }

    /// Finishes running work and closes the open backends.
    pub async fn close(&self) {
        let Some(database) = self.database.get() else { return };
        if timeout(CLOSE_MAX, database.close()).await.is_err() {
            tracing::debug!("the database could not be closed in time; other workers take its jobs");
        }
    }
}

async fn acquire_run_lock(config: &Config, database: &Database) -> Result<RunLock, ServiceError> {
    if config.limiter.url != LimiterUrl::Embedded {
        return Ok(RunLock::default());
    }
    match &config.database.url {
        DatabaseUrl::Postgres(_) => {
            let run = database.try_run_lock().await?.ok_or(ServiceError::AnotherRun)?;
            Ok(RunLock { session: Some(Arc::new(DatabaseSessionLock(run))), ..RunLock::default() })
        }
        DatabaseUrl::Sqlite { path: None, .. } => Ok(RunLock::default()),
        DatabaseUrl::Sqlite { path: Some(path), .. } => {
            let failed = |source| ServiceError::Lock { path: path.clone(), source };
            // The resolved path: through a link, a second worker would lock another file.
            let mut name = path.canonicalize().map_err(failed)?.into_os_string();
            name.push(".lock");
            let file =
                File::options().create(true).truncate(false).write(true).mode(0o600).open(&name).map_err(failed)?;
            match file.try_lock() {
                Ok(()) => Ok(RunLock { _file: Some(file), ..RunLock::default() }),
                Err(TryLockError::WouldBlock) => Err(ServiceError::AnotherRun),
                Err(TryLockError::Error(error)) => Err(failed(error)),
            }
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
            Ok(false) => Err(ServiceError::AnotherRun.to_string()),
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

/// Opens the configured database on another thread: a hanging mount must not block the tasks of this thread.
pub async fn open_database(config: &Config) -> Result<Database, ServiceError> {
    let Config { database, authorities, .. } = config.clone();
    let open = move || Database::open_with_authorities(database.url.expose(), database.max_connections, &authorities);
    Ok(spawn_blocking(open).await??)
}

/// A limiter on the Redis or Redis Cluster that `limiter.url` names.
pub fn redis_limiter(config: &Config) -> Result<RedisLimiter, LimiterError> {
    let prefix = &config.limiter.prefix;
    let limiter = match &config.limiter.url {
        LimiterUrl::Redis(url) => RedisLimiter::new(url.expose(), prefix),
        cluster => RedisLimiter::cluster(cluster.nodes().iter().map(SecretUrl::expose), prefix),
    };
    limiter?.with_plaintext_hosts(&config.plaintext_hosts).with_authorities(&config.authorities)
}

/// The hosts and secrets that provider rows may use.
pub fn outbound_policy(config: &Config) -> Result<OutboundPolicy, ServiceError> {
    let policy = OutboundPolicy::parse(&config.outbound_allow).map_err(ServiceError::OutboundAllow)?;
    Ok(policy.with_authorities(&config.authorities).with_secret_grants(&config.outbound_secrets, &config.config_files))
}

/// Provider rows over HTTP, within the outbound policy of the configuration.
pub fn providers(config: &Config) -> Result<HttpProviders, ServiceError> {
    Ok(HttpProviders(outbound_policy(config)?))
}

/// Provider rows over HTTP, within the outbound policy.
pub struct HttpProviders(OutboundPolicy);

impl ProviderFactory for HttpProviders {
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError> {
        Ok(Arc::new(HttpProvider::new(provider, &self.0)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stuck_backend_does_not_block_exit() {
        let config = crate::config::load(None, [], &["database.url=sqlite::memory:".to_owned()]).unwrap();
        let services = Services::default();
        let pool = services.ledger(&config).await.unwrap().sqlite_pool().unwrap();
        let busy = pool.acquire().await.unwrap();
        // Without the timeout it would wait for the connection, which is never returned.
        timeout(Duration::from_secs(60), services.close()).await.unwrap();
        assert!(pool.is_closed(), "it was tried");
        drop(busy);
    }
}
