//! The worker: takes the payments of all lanes, sends each request, and records the outcome as the decision table says.
//!
//! It uses queue, ledger, limiter and provider only through their traits. The order of the steps is in [`job`];
//! what a lane consumes, and when, is in [`lane`].

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ledger::database::Database;
use crate::limiter::Limiter;
use crate::provider::ProviderFactory;
use crate::queue::message::CardNumbers;
use crate::queue::{Queue, QueueError};

pub mod active_jobs;
pub(crate) mod backlog;
mod beats;
pub mod change_hints;
pub mod commit_guard;
pub mod decision_batches;
pub mod decode;
mod evictions;
pub mod heartbeat;
mod held;
pub mod intake;
pub(crate) mod intake_bound;
mod intake_room;
pub mod job;
pub mod lane;
pub mod lane_control;
pub mod limit_returns;
pub mod liveness;
pub mod log_throttle;
pub mod meter;
mod outage_starts;
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
mod sleepers;
pub mod start_timer;
pub mod supervisor;
pub mod sweeper;
pub mod topology;
mod unpublished;
pub mod unwritten;

/// The backends that a worker uses.
#[derive(Clone)]
pub struct Backends {
    /// The broker that hands payments over; `None`: `enqueue` records them in the ledger.
    pub queue: Option<Arc<dyn Queue>>,
    pub ledger: Database,
    pub limiter: Arc<dyn Limiter>,
    pub providers: Arc<dyn ProviderFactory>,
}

impl Backends {
    /// The broker, for what only a message of it leads to.
    ///
    /// # Errors
    /// [`QueueError::Refused`] when there is none.
    fn broker(&self) -> Result<&Arc<dyn Queue>, QueueError> {
        self.queue.as_ref().ok_or_else(|| QueueError::Refused("queue.url names no broker".to_owned()))
    }
}

/// Settings that all lanes of a process share.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Names this process as the holder of jobs; new at each start.
    pub owner: String,
    pub card_numbers: CardNumbers,
    pub drain_timeout: Duration,
    /// Open jobs of a lane at which it consumes no more messages.
    pub max_open_jobs: u32,
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
    /// Says that this process has written an outcome event.
    pub new_events: Arc<Notify>,
    pub unwritten: Arc<unwritten::UnwrittenAnswers>,
    pub local_faults: Arc<log_throttle::LocalFaults>,
    pub log_throttle: Arc<log_throttle::LogThrottle>,
    pub start_timer: Arc<start_timer::StartTimer>,
    pub intake_turns: Arc<backlog::intake_pace::IntakeTurns>,
    pub flow_lanes: Arc<backlog::dispatcher::FlowLanes>,
    pub beats: Arc<beats::Beats>,
    pub lanes_with_returns: Arc<sleepers::LanesWithReturns>,
    pub rejected_room: Arc<rejections::MessageRoom>,
    pub held_room: Arc<rejections::MessageRoom>,
    pub guard: Arc<commit_guard::CommitGuard>,
    /// Fires when intake ends: jobs that only wait are requeued.
    pub stop: CancellationToken,
    /// Fires when the drain timeout has passed: nothing is waited for after that.
    pub abandon: CancellationToken,
    pub jobs: TaskTracker,
}
