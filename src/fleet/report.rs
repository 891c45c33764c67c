//! The report of a worker, as stored in the `report` column of `worker_reports`: JSON, format 1.
//!
//! Readers ignore unknown fields and use defaults for missing ones, so fields may be added. A change of meaning needs
//! another format number, and readers leave an unknown format alone. A report holds no account and nothing of a payload.
//! It names one payment at most of each lane: the one that the provider refuses.
//!
//! [`LaneStatus`] is the only model of a lane's state. The overview, `explain`, `/api/v1/lanes` and the metrics read it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::domain::time::millis_down;
use crate::domain::wait_reason::Wait;

/// Format of the reports that this program writes.
pub const REPORT_FORMAT: u32 = 1;

/// State of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessReport {
    /// Settings are loaded and the topology is declared.
    pub ready: bool,
    pub draining: bool,
    /// Set in the last report of a process that may not delete its row.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// Version of the settings in force.
    pub settings_version: i64,
    /// By provider.
    pub lanes: BTreeMap<String, LaneReport>,
    /// `database`, `queue`, `limiter`.
    pub backends: BTreeMap<String, BackendStatus>,
    pub warnings: Vec<String>,
}

impl ProcessReport {
    /// The report as it reads this long after it was written: its pauses end sooner.
    pub fn aged(mut self, age: Duration) -> Self {
        let age_ms = millis_down(age);
        for pause in self
            .lanes
            .values_mut()
            .flat_map(|lane| [&mut lane.status.pause, &mut lane.gate, &mut lane.costly, &mut lane.refused])
            .flatten()
        {
            pause.ends_in_ms = pause.ends_in_ms.and_then(|ms| ms.checked_sub(age_ms)).filter(|ms| *ms > 0);
        }
        self
    }
}

/// State of one backend, as this process finds it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct BackendStatus {
    pub ok: bool,
    /// `postgres`, `sqlite`, `rabbitmq`, `redis`, `redis_cluster`, `embedded`.
    pub kind: String,
    /// As the backend reports it; absent if it has none or does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Duration of one ping, in milliseconds; absent without an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// Why it does not answer, or what it does not do though it answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// When it first did not answer, in milliseconds since the Unix epoch by the worker's clock; absent while it answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<i64>,
}

/// The problem with the backend's name before it, unless it begins with the name already.
pub fn problem_with_name(backend: &str, problem: &str) -> String {
    let problem_of = problem.strip_prefix("the ").unwrap_or(problem);
    let begins_with = |name: &str| problem_of.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', ':']));
    let named = begins_with(backend) || (backend == "queue" && begins_with("broker"));
    if named { problem.to_owned() } else { format!("{backend}: {problem}") }
}

/// One provider's lane in one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneReport {
    #[serde(flatten)]
    pub status: LaneStatus,
    /// Why the gate's wait queue is blocked; absent while it moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate: Option<ReportedPause>,
    /// Why costly payments wait while cheaper ones pass them; absent if none do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub costly: Option<ReportedPause>,
    /// The payment that was refused last and waits alone; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<ReportedPause>,
    /// Jobs that wait at the gate for a permit.
    pub gate_waiting: u64,
    pub active: u64,
    pub in_flight: u64,
    /// Requests begun since the process started.
    pub sent_total: u64,
    /// Of `sent_total`, those in the last ten seconds.
    pub sent_10s: u64,
    /// Mean hold of the requests that ended in the last ten seconds in which any did, in microseconds; absent before
    /// the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_hold_us: Option<u64>,
    /// Requests whose hold has ended since the process started, and the sum of their holds in microseconds.
    #[serde(skip)]
    pub held: HeldRequests,
    /// Waits for permits, since the process started.
    pub waits: WaitHistogram,
    /// Newest first.
    pub decisions: Vec<ReportedDecision>,
}

/// Ended holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldRequests {
    pub count: u64,
    pub total_us: u64,
}

impl HeldRequests {
    /// Mean hold of those since `before`; `None`: there are none.
    pub fn mean_us_since(self, before: Self) -> Option<u64> {
        self.total_us.saturating_sub(before.total_us).checked_div(self.count.saturating_sub(before.count))
    }
}

impl LaneReport {
    /// The pauses of the lane and of its gate.
    pub fn pauses(&self) -> impl Iterator<Item = &ReportedPause> {
        [&self.status.pause, &self.gate].into_iter().flatten()
    }
}

/// What a lane does, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneStatus {
    pub does: LaneState,
    /// Why the lane is paused, or probes; absent when it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<ReportedPause>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneState {
    /// Claims no jobs; active jobs continue, and new ones are recorded while the ledger accepts them.
    Resting,
    /// Sends nothing, and records new jobs. Without its queue, it takes none and still sends its active jobs.
    Stopped,
    /// One job at a time tests whether the provider is up again.
    Probing,
    /// Starts no charge until an operator releases it; records payments and sends look-ups.
    Held,
    /// Consumes no more, since it has as many open payments as it may have; sends them.
    Full,
    #[default]
    #[serde(other)]
    Running,
}

/// The name in JSON and metrics.
impl fmt::Display for LaneState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Why a lane or its gate is held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedPause {
    pub by: PauseCause,
    /// The limit that is used up, or `even pacing`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Text for operators.
    pub words: String,
    /// Earliest end, in milliseconds from now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
    /// The wait that `words` tell, for readers in the same process.
    #[serde(skip)]
    pub wait: Option<Wait>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseCause {
    Limit,
    /// The limiter starts without its earlier state, or lost it.
    Cold,
    /// The provider asked for a pause.
    Provider,
    /// The circuit breaker.
    Breaker,
    /// The set-up is wrong, as far as responses show.
    Setup,
    /// A backend is unavailable, rejects requests or is slow.
    Backend,
    /// The ledger may lack payments that were charged.
    Held,
    /// A short pause, or a cause that this program does not know.
    #[default]
    #[serde(other)]
    Other,
}

/// A histogram: `counts[i]` waits of at most `bounds_ms[i]`, and one more count for all longer ones. Not cumulative.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct WaitHistogram {
    pub bounds_ms: Vec<u64>,
    pub counts: Vec<u64>,
}

impl WaitHistogram {
    /// Adds the histogram of another process; one with other bounds cannot be added and is left out.
    pub fn add(&mut self, other: &Self) {
        if self.counts.is_empty() {
            *self = other.clone();
        } else if self.bounds_ms == other.bounds_ms && self.counts.len() == other.counts.len() {
            self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        }
    }
}

/// A decision of a lane or its gate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedDecision {
    /// Milliseconds since the Unix epoch, the worker's clock.
    pub at_ms: i64,
    /// `granted`, `refused`, `delayed`, `throttled`, `paused`, `resumed`, `breaker_opened`, `breaker_closed`.
    pub kind: String,
    pub reason: String,
    pub permits: u32,
}
