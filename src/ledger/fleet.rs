//! The face of the fleet: what each worker says of itself, kept where any other can read it.
//!
//! Refuses to judge who is lost and to read a report: it keeps them as they were written, with their age by the database's
//! clock. Nothing that a payment needs is here.

use std::time::Duration;

use async_trait::async_trait;

use super::LedgerError;
use super::deployment::DeploymentId;
use crate::domain::provider::ProviderName;

/// Most workers that are read at once.
pub const WORKERS_MAX: u32 = 1_000;

/// What one process writes about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerReport {
    /// 1 to 64 of `A-Z a-z 0-9 _ -`; unique to the process.
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    /// How long the process has been running; counts with its first report.
    pub uptime: Duration,
    /// How `body` is to be read.
    pub format: u32,
    /// A JSON object.
    pub body: String,
}

/// What one process wrote about itself last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredReport {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    /// Milliseconds since the Unix epoch, the database's clock.
    pub started_at_ms: i64,
    pub reported_at_ms: i64,
    /// Since it was written; never more than the true age.
    pub age: Duration,
    pub format: u32,
    pub body: String,
}

#[async_trait]
pub trait Fleet: Send + Sync {
    /// The id of the deployment whose database this is.
    async fn deployment(&self) -> Result<DeploymentId, LedgerError>;

    /// Writes a process's row, or writes it anew.
    async fn report(&self, report: &WorkerReport) -> Result<(), LedgerError>;

    /// The rows of all processes, by id; at most [`WORKERS_MAX`].
    async fn reports(&self) -> Result<Vec<StoredReport>, LedgerError>;

    /// Deletes the row of a process that ends as it should.
    async fn remove_report(&self, id: &str) -> Result<(), LedgerError>;

    /// Deletes the rows of processes that have not reported for so long; returns how many.
    async fn remove_silent_reports(&self, silent_for: Duration) -> Result<u64, LedgerError>;

    /// Since when the job that has been due for longest could be worked on, in milliseconds since the Unix epoch; providers
    /// without an open job are left out. Looks at the first hundred open jobs of each by an index, so a job that is parked
    /// again and again may be older.
    async fn oldest_open(&self, providers: &[ProviderName]) -> Result<Vec<(String, i64)>, LedgerError>;
}
