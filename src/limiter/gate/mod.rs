//! The gate: where the jobs of one quota wait for permits, in line, with at most one call to the limiter in flight.
//!
//! Any number of waiting tasks cost no more than one: their wants and the permits that have been settled travel in the
//! same call, and the next call is made when the announced instant comes. Refuses to grant anything by itself: while
//! the store is away, cold or ahead of our settings, nobody passes, and [`GateView`] says why.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Limiter, RecentAttempts};
use crate::domain::decision::QuotaSpec;

mod line;
mod permit;
mod task;

pub use permit::{InFlight, Late, Permit};

/// What a request for a permit comes to.
#[derive(Debug)]
pub enum Grant {
    Granted(Permit),
    Refused(GateRefusal),
}

/// A refusal with its wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateRefusal {
    pub retry_after: Duration,
    /// Whether a permit starts exactly then; otherwise it is the earliest that it can.
    pub exact: bool,
    pub by: RefusedBy,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusedBy {
    /// The named limit has no slot.
    Limit(String),
    /// The limiter lost its state and waits until nothing from before can count any more.
    Cold,
    /// The provider named a wait.
    Paused,
    StoreAway(String),
    /// The store knows newer settings than this process.
    StaleSettings,
    /// The job's cost is above the smallest limit: no window can ever admit it.
    TooCostly,
    Stopping,
}

/// What the gate waits for, for status and explanation.
#[derive(Clone, Debug, Default)]
pub struct GateView {
    pub waiting: usize,
    /// Why the line stands, and until when at the earliest; `None` while it moves.
    pub standing: Option<(RefusedBy, Instant)>,
}

#[derive(Debug)]
enum Message {
    Want(line::Waiter),
    Settled(permit::Settled),
    Pause { until: Instant },
}

/// A handle on one gate; cheap to clone. The gate lives until its token is cancelled.
#[derive(Clone)]
pub struct Gate {
    messages: mpsc::UnboundedSender<Message>,
    view: watch::Receiver<GateView>,
}

/// What a gate stands on.
pub struct GateParts {
    pub limiter: Arc<dyn Limiter>,
    pub recent: Arc<dyn RecentAttempts>,
    pub spec: watch::Receiver<Arc<QuotaSpec>>,
    /// Unique to this gate, below 2^53.
    pub incarnation: u64,
    pub stop: CancellationToken,
}

impl Gate {
    /// The gate and the task that runs it, for the caller to spawn and track.
    pub fn new(parts: GateParts) -> (Self, impl Future<Output = ()> + Send) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (view_tx, view) = watch::channel(GateView::default());
        let task = task::GateTask::new(parts, inbox, messages.downgrade(), view_tx);
        (Self { messages, view }, task.run())
    }

    /// Waits in line for a permit, at most until `wait_until`; a start that lies later is refused at once.
    ///
    /// Dropping the future leaves the line; a permit that was granted meanwhile is given back.
    pub async fn permit(&self, cost: u32, priority: u8, wait_until: Instant) -> Grant {
        let (reply, answer) = oneshot::channel();
        let waiter = line::Waiter { cost, priority, wait_until, reply };
        let stopping = || {
            let retry_after = Duration::from_secs(1);
            Grant::Refused(GateRefusal { retry_after, exact: false, by: RefusedBy::Stopping })
        };
        if self.messages.send(Message::Want(waiter)).is_err() {
            return stopping();
        }
        answer.await.unwrap_or_else(|_| stopping())
    }

    /// Holds the whole quota, in every process, for a wait that the provider named.
    pub fn pause(&self, wait: Duration) {
        // A gate that has stopped grants nothing, so there is nothing left to pause.
        let _ = self.messages.send(Message::Pause { until: Instant::now() + wait });
    }

    #[must_use]
    pub fn view(&self) -> watch::Receiver<GateView> {
        self.view.clone()
    }
}
