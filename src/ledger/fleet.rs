//! The interface for worker reports: what each worker reports of itself, stored for all others to read.
//!
//! Reports are stored as written, with their age by the database's clock. Readers interpret them and decide which
//! worker is lost. No payment depends on these rows.

use std::time::Duration;

use async_trait::async_trait;

use super::LedgerError;
use super::deployment::DeploymentId;
use crate::domain::provider::ProviderName;

/// Most worker reports that are read at once.
pub const WORKERS_MAX: u32 = 1_000;

/// A process's report of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerReport {
    /// 1 to 64 of `A-Z a-z 0-9 _ -`; unique to the process.
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    /// How long the process has been running; only its first report sets this.
    pub uptime: Duration,
    /// The version of `body`'s format.
    pub format: u32,
    /// A JSON object.
    pub body: String,
}

/// The last report of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredReport {
    pub id: String,
    pub host: String,
    pub pid: u32,
    pub version: String,
    /// Milliseconds since the Unix epoch, the database's clock.
    pub started_at_ms: i64,
    pub reported_at_ms: i64,
    /// Time since it was written; never more than the true age.
    pub age: Duration,
    pub format: u32,
    pub body: String,
}

#[async_trait]
pub trait Fleet: Send + Sync {
    /// The id of the deployment whose database this is.
    async fn deployment(&self) -> Result<DeploymentId, LedgerError>;

    /// Inserts or replaces the row of a process.
    async fn report(&self, report: &WorkerReport) -> Result<(), LedgerError>;

    /// The rows of all processes, by id; at most [`WORKERS_MAX`].
    async fn reports(&self) -> Result<Vec<StoredReport>, LedgerError>;

    /// Deletes the row of a process that ends regularly.
    async fn remove_report(&self, id: &str) -> Result<(), LedgerError>;

    /// Deletes the rows of processes that have not reported for this long; returns how many.
    async fn remove_silent_reports(&self, silent_for: Duration) -> Result<u64, LedgerError>;

    /// Start of the longest wait of each provider, in milliseconds since the Unix epoch: since when its oldest due job
    /// could be processed. Providers without an open job are left out. Reads only the first hundred open jobs of each
    /// provider by an index, so a job that is delayed again and again may be older.
    async fn oldest_open(&self, providers: &[ProviderName]) -> Result<Vec<(String, i64)>, LedgerError>;
}
