//! What commands need of the engines, as one face, and its wiring to the real ones.
//!
//! Refuses policy: it opens what the configuration names and passes results on.

use std::sync::Arc;

use async_trait::async_trait;
use secrecy::SecretString;
use tokio::sync::OnceCell;

use super::CommandError;
use super::check::Finding;
use crate::config::{CardNumbers, Config, QueueUrl};
use crate::domain::job::JobId;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::database::{Database, SchemaState};
use crate::ledger::provider_row::{ProviderRow, parse_provider_file};
use crate::ledger::settings::{BadRow, Settings};
use crate::queue::embedded::EmbeddedQueue;
use crate::queue::rabbitmq::{self, RabbitMq};
use crate::queue::{Queue, message};

/// A message that the worker would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedMessage {
    pub id: JobId,
    /// Names fields, holds no value.
    pub warnings: Vec<String>,
}

/// Looks at one dependency for `check`; never changes anything.
#[async_trait]
pub trait Probe: Send + Sync {
    /// Short name for the finding when the probe itself does not end in time.
    fn subject(&self) -> String;

    async fn look(&self) -> Vec<Finding>;
}

/// The engines behind a configuration. Each is opened with its first use, and shared by the uses of one command.
#[async_trait]
pub trait Engines: Send + Sync {
    /// Brings the schema up to date; returns whether it was not.
    async fn migrate(&self, config: &Config) -> Result<bool, CommandError>;

    async fn settings(&self, config: &Config) -> Result<Arc<dyn Settings>, CommandError>;

    async fn queue(&self, config: &Config) -> Result<Arc<dyn Queue>, CommandError>;

    /// Probes beyond those that `check` has for every engine.
    fn probes(&self, config: &Config) -> Vec<Box<dyn Probe>>;

    /// Reads a provider file; one line per problem, with its place in the file.
    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>>;

    /// What a row means.
    fn meant(&self, row: &ProviderRow) -> Result<Provider, BadRow>;

    /// Reads a message as the worker will; the error is for the terminal and holds no value of the message.
    fn check_message(
        &self,
        body: &[u8],
        lane: &ProviderName,
        card_numbers: CardNumbers,
    ) -> Result<CheckedMessage, String>;

    /// Finishes what is under way and closes what was opened.
    async fn close(&self);
}

/// The real engines.
#[derive(Default)]
pub struct Wired {
    /// One pool for ledger, settings and embedded queue: a database in memory exists once per connection pool.
    database: OnceCell<Database>,
}

impl Wired {
    async fn database(&self, config: &Config) -> Result<&Database, CommandError> {
        let open = async || Database::open(config.database.url.expose(), config.database.max_connections);
        Ok(self.database.get_or_try_init(open).await?)
    }

    /// The database, if it is at this program's schema or a later one.
    async fn migrated(&self, config: &Config) -> Result<&Database, CommandError> {
        let database = self.database(config).await?;
        match database.schema_state().await? {
            SchemaState::NotMigrated => Err(LedgerError::NotMigrated.into()),
            SchemaState::Current | SchemaState::Newer => Ok(database),
        }
    }
}

#[async_trait]
impl Engines for Wired {
    async fn migrate(&self, config: &Config) -> Result<bool, CommandError> {
        let database = self.database(config).await?;
        let before = database.schema_state().await?;
        database.migrate().await?;
        Ok(before == SchemaState::NotMigrated)
    }

    async fn settings(&self, config: &Config) -> Result<Arc<dyn Settings>, CommandError> {
        Ok(self.migrated(config).await?.settings())
    }

    async fn queue(&self, config: &Config) -> Result<Arc<dyn Queue>, CommandError> {
        match &config.queue.url {
            QueueUrl::Embedded => {
                let pool = self.migrated(config).await?.sqlite_pool();
                let pool = pool.ok_or_else(|| CommandError::Configuration("queue.url: needs SQLite".to_owned()))?;
                Ok(Arc::new(EmbeddedQueue::new(pool)))
            }
            QueueUrl::Amqp(url) => {
                let settings = rabbitmq::Settings::new(&SecretString::from(url.expose()), &config.queue.prefix)?;
                Ok(Arc::new(RabbitMq::connect(settings)))
            }
        }
    }

    fn probes(&self, _: &Config) -> Vec<Box<dyn Probe>> {
        Vec::new()
    }

    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
        parse_provider_file(text)
    }

    fn meant(&self, row: &ProviderRow) -> Result<Provider, BadRow> {
        row.meant(0)
    }

    fn check_message(
        &self,
        body: &[u8],
        lane: &ProviderName,
        card_numbers: CardNumbers,
    ) -> Result<CheckedMessage, String> {
        let card_numbers = match card_numbers {
            CardNumbers::Refuse => message::CardNumbers::Refuse,
            CardNumbers::Warn => message::CardNumbers::Warn,
            CardNumbers::Off => message::CardNumbers::Off,
        };
        let decoded = message::decode(body, lane, card_numbers).map_err(|error| error.to_string())?;
        let warnings = decoded.warnings.into_iter().map(str::to_owned).collect();
        Ok(CheckedMessage { id: decoded.job.id, warnings })
    }

    async fn close(&self) {
        if let Some(database) = self.database.get() {
            database.close().await;
        }
    }
}
