//! The interface between commands and backends: [`Services`], which `app` implements with the real backends.
//!
//! Commands depend on this trait alone, so each can be tested with fakes.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::CommandError;
use super::check::Finding;
use crate::config::{CardNumbers, Config};
use crate::domain::job::JobId;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::database::Database;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::InvalidRow;
use crate::limiter::Limiter;
use crate::provider::secret_grants::SecretUse;
use crate::queue::{Queue, QueueError};
use crate::worker;

/// A message that a worker would accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedMessage {
    pub id: JobId,
    /// Each names a field and never its value.
    pub warnings: Vec<String>,
}

/// What a command does when the file of an embedded database does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingDatabase {
    #[default]
    Create,
    /// Report it: the command probably runs in the wrong directory.
    Fail,
    /// Use an empty database in memory, for a dry run.
    InMemory,
}

/// Keeps out a second embedded `run`; `None` for backends that several processes can share.
pub type RunLock = Option<Box<dyn std::any::Any + Send + Sync>>;

/// Checks one backend for `check`, without changing it.
#[async_trait]
pub trait Probe: Send + Sync {
    /// Subject of the finding when the probe does not end in time.
    fn subject(&self) -> String;

    async fn run(&self) -> Vec<Finding>;
}

/// The backends of a configuration. Each is opened at its first use and shared within one command.
#[async_trait]
pub trait Services: Send + Sync {
    /// Brings the schema up to date; returns whether it was outdated.
    async fn migrate(&self, config: &Config) -> Result<bool, CommandError>;

    async fn ledger(&self, config: &Config) -> Result<Database, CommandError>;

    async fn queue(&self, config: &Config) -> Result<Arc<dyn Queue>, CommandError>;

    async fn limiter(&self, config: &Config) -> Result<Arc<dyn Limiter>, CommandError>;

    /// Fails when another `run` uses the same embedded limiter or queue. Connects to nothing but the database.
    async fn check_no_other_run(&self, config: &Config) -> Result<(), CommandError>;

    /// The backends of a worker, after every check for its start. The worker may run while the lock is held.
    async fn worker_backends(&self, config: &Config) -> Result<(worker::Backends, RunLock), CommandError>;

    /// Probes in addition to those that `check` has for every backend.
    fn probes(&self, config: &Config) -> Vec<Box<dyn Probe>>;

    /// Parses a provider file; each error names its place in the file.
    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>>;

    /// Validates a row.
    fn validate(&self, row: &ProviderRow) -> Result<Provider, InvalidRow>;

    /// Problems of a valid row that no worker could use, one line each; the outbound policy is not checked here.
    fn provider_problems(&self, provider: &Provider) -> Vec<String>;

    /// Whether a worker of this configuration could call the provider; the error holds no secret.
    fn check_callable(&self, provider: &Provider, config: &Config) -> Result<(), String>;

    /// Secrets that a provider would send, and their hosts, whether or not this configuration allows it.
    fn secret_uses(&self, provider: &Provider, config: &Config) -> Vec<SecretUse>;

    /// Secrets of a usable provider that this process cannot read; each names header and source, none holds a value.
    async fn unreadable_secrets(&self, provider: &Provider, config: &Config) -> Vec<String>;

    /// Decodes a message as the worker does; the error is for the terminal and holds no value of the message.
    fn check_message(
        &self,
        body: &[u8],
        lane: &ProviderName,
        card_numbers: CardNumbers,
    ) -> Result<CheckedMessage, String>;

    /// Finishes running work and closes the open backends.
    async fn close(&self);
}

/// Providers whose queues the broker refuses to declare, and why: most likely another program declared them
/// differently.
pub type UndeclaredLanes = BTreeMap<ProviderName, String>;

/// Declares the queues of all these providers. If the broker refuses, declares each `wanted` provider on its own, so
/// that a problem with one provider does not stop the others.
///
/// # Errors
/// When RabbitMQ is unreachable, or refuses the queues of every wanted provider.
pub async fn declare_lanes(
    queue: &dyn Queue,
    names: &[ProviderName],
    wanted: &[ProviderName],
) -> Result<UndeclaredLanes, QueueError> {
    match queue.declare(names).await {
        Ok(()) => return Ok(UndeclaredLanes::new()),
        Err(QueueError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    let mut undeclared = UndeclaredLanes::new();
    for name in wanted {
        match queue.declare(std::slice::from_ref(name)).await {
            Ok(()) => {}
            // All wanted providers are refused.
            Err(refusal @ QueueError::Refused(_)) if undeclared.len() + 1 == wanted.len() => return Err(refusal),
            Err(QueueError::Refused(why)) => {
                undeclared.insert(name.clone(), why);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(undeclared)
}
