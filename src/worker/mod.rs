//! The worker: consumes the jobs of all lanes, sends each request, and records the outcome as the decision table says.
//!
//! It uses queue, ledger, limiter and provider only through their traits. The order of the steps is in [`job`];
//! what a lane consumes, and when, is in [`lane`].

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ledger::database::Database;
use crate::limiter::Limiter;
use crate::provider::ProviderFactory;
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod active_jobs;
pub(crate) mod backlog;
pub mod decision_batches;
pub mod decode;
mod evictions;
pub mod heartbeat;
pub mod intake;
pub(crate) mod intake_bound;
pub mod job;
pub mod lane;
pub mod lane_control;
pub mod limit_returns;
pub mod liveness;
pub mod log_throttle;
mod lookups;
pub mod meter;
mod outage_starts;
pub mod outbox;
pub mod outcome_writes;
pub mod publish;
pub mod quotas;
pub mod rejected;
mod rejections;
mod report_warnings;
mod report_write;
pub mod resend;
pub mod retry;
pub mod settings_sync;
pub mod start_timer;
pub mod supervisor;
pub mod sweeper;
pub mod topology;
pub mod unwritten;

/// The backends that a worker uses.
#[derive(Clone)]
pub struct Backends {
    pub queue: Arc<dyn Queue>,
    pub ledger: Database,
    pub limiter: Arc<dyn Limiter>,
    pub providers: Arc<dyn ProviderFactory>,
}

/// Settings that all lanes of a process share.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Names this process in leases; unique.
    pub owner: String,
    pub card_numbers: CardNumbers,
    pub drain_timeout: Duration,
    /// How often the settings version is polled.
    pub settings_poll: Duration,
    /// Time between two sweeps; [`sweeper::SWEEP_INTERVAL`].
    pub sweep_every: Duration,
    /// Age at which payload and request body of finished jobs are emptied.
    pub scrub_after: Duration,
    /// Age at which they are emptied for jobs in `review`; `None`: never.
    pub scrub_review_after: Option<Duration>,
}

/// What every part of a running worker shares.
#[derive(Clone)]
pub struct WorkerContext {
    pub backends: Backends,
    pub options: Arc<WorkerOptions>,
    pub active_jobs: Arc<active_jobs::ActiveJobs>,
    pub meter: Arc<meter::Meter>,
    pub outbox: Arc<outbox::Outbox>,
    pub unconfirmed: Arc<publish::UnconfirmedPublishes>,
    pub unwritten: Arc<unwritten::UnwrittenAnswers>,
    pub local_faults: Arc<log_throttle::LocalFaults>,
    pub log_throttle: Arc<log_throttle::LogThrottle>,
    pub start_timer: Arc<start_timer::StartTimer>,
    pub intake_turns: Arc<backlog::intake_pace::IntakeTurns>,
    pub flow_lanes: Arc<backlog::dispatcher::FlowLanes>,
    pub rejected_room: Arc<rejections::RejectedRoom>,
    /// Fires when intake ends: jobs that only wait are requeued.
    pub stop: CancellationToken,
    /// Fires when the drain timeout has passed: nothing is waited for after that.
    pub abandon: CancellationToken,
    pub jobs: TaskTracker,
}
