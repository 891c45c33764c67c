//! The worker: takes jobs from lanes, carries each through its steps, and puts it down where the decision table says.
//!
//! Refuses to know any implementation: it stands on the faces of queue, ledger, limiter and provider alone. The order of
//! the steps is in [`execute`] and nowhere else; what is taken and when is in [`lane`].

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::ledger::Ledger;
use crate::ledger::settings::Settings;
use crate::ledger::upkeep::Upkeep;
use crate::limiter::Limiter;
use crate::provider::ProviderFactory;
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod active_jobs;
pub mod decode;
pub mod delay;
pub mod execute;
pub mod heartbeat;
pub mod intake;
pub mod lane;
pub mod lane_control;
pub mod local_faults;
pub mod log_throttle;
mod lookups;
pub mod meter;
pub mod newer_version;
pub mod outbox;
pub mod quotas;
pub mod resend;
pub mod retry;
pub mod scheduler;
pub mod settings_sync;
pub mod start_timer;
pub mod supervisor;
pub mod sweeper;
pub mod topology;
pub mod unconfirmed;

/// The engines that a worker stands on.
#[derive(Clone)]
pub struct Backends {
    pub queue: Arc<dyn Queue>,
    pub ledger: Arc<dyn Ledger>,
    pub upkeep: Arc<dyn Upkeep>,
    pub settings: Arc<dyn Settings>,
    pub limiter: Arc<dyn Limiter>,
    pub providers: Arc<dyn ProviderFactory>,
}

/// What holds for all lanes of a process.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Names this process in leases; unique.
    pub owner: String,
    pub card_numbers: CardNumbers,
    pub drain_timeout: Duration,
    /// How often the settings version is looked at.
    pub settings_poll: Duration,
    /// How often the sweeper looks; [`sweeper::EVERY`].
    pub sweep_every: Duration,
    /// Age at which payload and request body of settled jobs are emptied.
    pub scrub_after: Duration,
    /// The same of jobs in `review`; `None`: never.
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
    pub unconfirmed: Arc<unconfirmed::UnconfirmedPublishes>,
    pub local_faults: Arc<local_faults::LocalFaults>,
    pub log_throttle: Arc<log_throttle::LogThrottle>,
    pub start_timer: Arc<start_timer::StartTimer>,
    /// Fires when intake ends: what only waits is handed back.
    pub stop: CancellationToken,
    /// Fires when the drain's time is over: nothing is waited for any more.
    pub abandon: CancellationToken,
    pub jobs: TaskTracker,
}
