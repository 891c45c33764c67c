//! The worker reports in the ledger: what each worker reports of itself, stored for all others to read.
//!
//! Reports are stored as written, with their age by the database's clock. Readers interpret them and decide which
//! worker is lost. No payment depends on these rows.

use std::time::Duration;

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
