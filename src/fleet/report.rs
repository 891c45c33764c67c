//! What a worker says of itself, as it stands in the `report` column of `worker_reports`: JSON, format 1.
//!
//! Refuses nothing that it does not know: fields may be added, and whoever reads an older report finds their defaults. A
//! format that means something else gets another number, and programs that do not know it leave it alone. Holds no job
//! id, no account and nothing of a payload.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Of the reports that this program writes.
pub const REPORT_FORMAT: u32 = 1;

/// One process, now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessReport {
    /// Settings are loaded and the topology is declared.
    pub ready: bool,
    pub draining: bool,
    /// The last word of a process that may not delete its row.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// Of the settings that it goes by.
    pub settings_version: i64,
    /// By provider.
    pub lanes: BTreeMap<String, LaneReport>,
    /// `database`, `queue`, `limiter`.
    pub engines: BTreeMap<String, BackendStatus>,
    pub warnings: Vec<String>,
}

/// One dependency, as this process finds it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct BackendStatus {
    pub ok: bool,
    /// `postgres`, `sqlite`, `rabbitmq`, `redis`, `redis_cluster`, `embedded`.
    pub kind: String,
    /// As the engine tells it; absent where it has none of its own, or does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Of one question and its answer; absent when there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What is wrong with an engine, named once: many problems begin with the name of what has them.
#[must_use]
pub fn problem_with_name(engine: &str, problem: &str) -> String {
    let named = problem.strip_prefix(engine).is_some_and(|rest| rest.starts_with([' ', ':']));
    if named { problem.to_owned() } else { format!("{engine}: {problem}") }
}

/// One provider's lane in one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaneReport {
    pub does: LaneState,
    /// Why it rests; absent when it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<ReportedPause>,
    /// Why nobody passes its gate now; absent while the line moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate: Option<ReportedPause>,
    /// Jobs that wait at the gate for a permit.
    pub gate_waiting: u64,
    pub in_hand: u64,
    pub in_flight: u64,
    /// Requests begun since the process started.
    pub sent_total: u64,
    /// Of them, in the last ten seconds.
    pub sent_10s: u64,
    /// Answers that refused what we allowed, since the process started.
    pub throttled_total: u64,
    /// How long permits were waited for, since the process started.
    pub waits: WaitHistogram,
    /// Newest first.
    pub decisions: Vec<ReportedDecision>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneState {
    /// Takes no more; jobs in hand go on.
    Resting,
    /// Neither takes nor sends.
    Stopped,
    /// One job at a time finds out whether the provider is up again.
    Probing,
    #[default]
    #[serde(other)]
    Running,
}

/// What holds a lane or its gate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedPause {
    pub by: PauseCause,
    /// For a person.
    pub words: String,
    /// Until then at the earliest, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ends_in_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseCause {
    Limit,
    /// The limiter lost its state.
    Cold,
    /// The provider named a wait.
    Provider,
    /// The circuit breaker.
    Breaker,
    /// The set-up is wrong, as far as answers tell.
    Setup,
    /// A dependency of ours is away, refuses or is slow.
    Engine,
    /// Of short duration, or unknown to this program.
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
    /// Adds another process's; one with other bounds cannot be added and is left out.
    pub fn add(&mut self, other: &Self) {
        if self.counts.is_empty() {
            *self = other.clone();
        } else if self.bounds_ms == other.bounds_ms && self.counts.len() == other.counts.len() {
            self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        }
    }
}

/// One thing that a lane or its gate decided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedDecision {
    /// Milliseconds since the Unix epoch, the worker's clock.
    pub at_ms: i64,
    /// `granted`, `refused`, `parked`, `throttled`, `paused`, `resumed`, `breaker_opened`, `breaker_closed`.
    pub kind: String,
    pub reason: String,
    pub permits: u32,
}
