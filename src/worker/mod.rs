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

pub mod deployment;
pub mod execute;
pub mod in_hand;
pub mod intake;
pub mod lane;
pub mod late;
pub mod local_faults;
pub mod log_throttle;
mod lookups;
pub mod meter;
pub mod newer_version;
pub mod outbox;
pub mod park;
pub mod patience;
pub mod pauses;
pub mod pool;
pub mod quotas;
pub mod reading;
pub mod reporting;
pub mod send_again;
pub mod settings_watch;
pub mod start_timer;
pub mod sweeper;
pub mod topology;

/// The engines that a worker stands on.
#[derive(Clone)]
pub struct Engines {
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
pub struct Worker {
    pub engines: Engines,
    pub options: Arc<WorkerOptions>,
    pub in_hand: Arc<in_hand::InHand>,
    pub meter: Arc<meter::Meter>,
    pub outbox: Arc<outbox::Outbox>,
    pub late: Arc<late::LatePublishes>,
    pub local_faults: Arc<local_faults::LocalFaults>,
    pub log_throttle: Arc<log_throttle::LogThrottle>,
    pub start_timer: Arc<start_timer::StartTimer>,
    /// Fires when intake ends: what only waits is handed back.
    pub stop: CancellationToken,
    /// Fires when the drain's time is over: nothing is waited for any more.
    pub abandon: CancellationToken,
    pub jobs: TaskTracker,
}
