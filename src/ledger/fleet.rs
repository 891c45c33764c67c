//! The worker reports in the ledger, and the identity of the deployment whose database this is.
//!
//! Each worker stores what it reports of itself, for all others to read.
//! Reports are stored as written, with their age by the database's clock. Readers interpret them and decide which
//! worker is lost. No payment depends on these rows.
//!
//! The deployment's id is given when the database is created. A copy of a database, or a restored backup, has the id of
//! its original.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

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

/// How far a worker process has come: the number rises for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The process's id, new at each start.
    pub worker: String,
    pub number: i64,
}

/// Random UUID in the one row of table `deployment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeploymentId(Uuid);

impl DeploymentId {
    pub fn parse(text: &str) -> Result<Self, String> {
        Uuid::parse_str(text).map(Self).map_err(|error| format!("a deployment id is a UUID: {error}"))
    }
}

impl TryFrom<String> for DeploymentId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<DeploymentId> for String {
    fn from(id: DeploymentId) -> Self {
        id.to_string()
    }
}

impl fmt::Display for DeploymentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}
