//! What commands need of the engines, as one face, and its wiring to the real ones.
//!
//! Refuses policy: it opens what the configuration names and passes results on.

use std::sync::Arc;

use async_trait::async_trait;

use super::CommandError;
use super::check::Finding;
use crate::config::{CardNumbers, Config};
use crate::domain::job::JobId;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::{BadRow, Settings};
use crate::queue::Queue;

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

/// Engines of a build in which none is wired in: every command that needs one says so and fails.
#[derive(Clone, Copy, Debug)]
pub struct Unwired;

const UNWIRED: &str = "no engine is wired into this build";

#[async_trait]
impl Engines for Unwired {
    async fn migrate(&self, _: &Config) -> Result<bool, CommandError> {
        Err(CommandError::Failed(UNWIRED.to_owned()))
    }

    async fn settings(&self, _: &Config) -> Result<Arc<dyn Settings>, CommandError> {
        Err(CommandError::Failed(UNWIRED.to_owned()))
    }

    async fn queue(&self, _: &Config) -> Result<Arc<dyn Queue>, CommandError> {
        Err(CommandError::Failed(UNWIRED.to_owned()))
    }

    fn probes(&self, _: &Config) -> Vec<Box<dyn Probe>> {
        Vec::new()
    }

    fn parse_provider_file(&self, _: &str) -> Result<Vec<ProviderRow>, Vec<String>> {
        Err(vec![UNWIRED.to_owned()])
    }

    fn meant(&self, row: &ProviderRow) -> Result<Provider, BadRow> {
        Err(BadRow { provider: row.name.clone(), problems: vec![UNWIRED.to_owned()] })
    }

    fn check_message(&self, _: &[u8], _: &ProviderName, _: CardNumbers) -> Result<CheckedMessage, String> {
        Err(UNWIRED.to_owned())
    }

    async fn close(&self) {}
}
