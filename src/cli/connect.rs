//! What commands need of the engines, as one face; `app` puts the real ones behind it.
//!
//! Refuses to name an implementation, so that each command can be tested on its own.

use std::sync::Arc;

use async_trait::async_trait;

use super::CommandError;
use super::check::Finding;
use crate::config::{CardNumbers, Config};
use crate::domain::job::JobId;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::fleet::Fleet;
use crate::ledger::operator::Operator;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::{InvalidRow, Settings};
use crate::ledger::upkeep::Upkeep;
use crate::limiter::Limiter;
use crate::provider::secret_grants::SecretUse;
use crate::queue::Queue;
use crate::worker;

/// A message that the worker would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedMessage {
    pub id: JobId,
    /// Names fields, holds no value.
    pub warnings: Vec<String>,
}

/// What becomes of an embedded database that is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingDatabase {
    #[default]
    Create,
    /// Whoever looks for payments in the wrong directory shall be told.
    Fail,
    /// An empty one stands for it, in memory: what would change is asked, and nothing is.
    InMemory,
}

/// Keeps a second embedded `run` out; nothing for engines that many may share.
pub type RunLock = Option<Box<dyn std::any::Any + Send + Sync>>;

/// Looks at one dependency for `check`; never changes anything.
#[async_trait]
pub trait Probe: Send + Sync {
    /// Short name for the finding when the probe itself does not end in time.
    fn subject(&self) -> String;

    async fn run(&self) -> Vec<Finding>;
}

/// The engines behind a configuration. Each is opened with its first use, and shared by the uses of one command.
#[async_trait]
pub trait Services: Send + Sync {
    /// Brings the schema up to date; returns whether it was not.
    async fn migrate(&self, config: &Config) -> Result<bool, CommandError>;

    async fn settings(&self, config: &Config) -> Result<Arc<dyn Settings>, CommandError>;

    /// The ledger as people use it.
    async fn operator(&self, config: &Config) -> Result<Arc<dyn Operator>, CommandError>;

    /// What workers say of themselves, and the account of all jobs.
    async fn fleet(&self, config: &Config) -> Result<(Arc<dyn Fleet>, Arc<dyn Upkeep>), CommandError>;

    async fn queue(&self, config: &Config) -> Result<Arc<dyn Queue>, CommandError>;

    async fn limiter(&self, config: &Config) -> Result<Arc<dyn Limiter>, CommandError>;

    /// Fails when another `run` uses the same embedded limiter or queue. Connects to nothing but the database.
    async fn check_no_other_run(&self, config: &Config) -> Result<(), CommandError>;

    /// What a worker stands on, once everything is so that it may start. It may run while the lock lives.
    async fn worker_backends(&self, config: &Config) -> Result<(worker::Backends, RunLock), CommandError>;

    /// Probes beyond those that `check` has for every engine.
    fn probes(&self, config: &Config) -> Vec<Box<dyn Probe>>;

    /// Reads a provider file; one line per problem, with its place in the file.
    fn parse_provider_file(&self, text: &str) -> Result<Vec<ProviderRow>, Vec<String>>;

    /// What a row means.
    fn validate(&self, row: &ProviderRow) -> Result<Provider, InvalidRow>;

    /// What no worker could use of a row that can be meant, one line each; where its requests may go is none of it.
    fn provider_problems(&self, provider: &Provider) -> Vec<String>;

    /// Whether a worker of this configuration could call the provider; the error holds no secret.
    fn check_callable(&self, provider: &Provider, config: &Config) -> Result<(), String>;

    /// Secrets that a provider would send, and where, whether this configuration allows it or not.
    fn secret_uses(&self, provider: &Provider, config: &Config) -> Vec<SecretUse>;

    /// Secrets of a usable provider that this process cannot read; each names header and place, none holds a value.
    async fn unreadable_secrets(&self, provider: &Provider, config: &Config) -> Vec<String>;

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
