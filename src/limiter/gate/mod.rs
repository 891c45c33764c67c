//! The gate: where the jobs of one quota wait for permits, in line, with at most one call to the limiter in flight.
//!
//! Any number of waiting tasks cost no more than one: their wants and the permits that have been settled travel in the
//! same call, and the next call is made when the announced instant comes. Refuses to grant anything by itself: while
//! the store is away, cold or ahead of our settings, nobody passes, and [`GateView`] says why.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Limiter, RecentAttempts};
use crate::domain::job::JobId;
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::QuotaSpec;

mod block;
mod call_sequence;
mod clock_verification;
mod dispatcher;
mod history;
mod pending_call;
mod permit;
mod rebuild;
mod release;
mod stall;
mod unpersisted;
mod wait_queue;

pub use block::{RETRY_AHEAD, RETRY_PAUSE_MIN};
pub use dispatcher::RELEASE_DELAY;
pub use permit::{InFlightPermit, Permit, PermitExpired};

/// Longest time by which a pause is prolonged to spread those who waited.
const PAUSE_SPREAD_MAX: Duration = Duration::from_secs(1);

/// What a request for a permit comes to.
#[derive(Debug)]
pub enum AcquireResult {
    Granted(Permit),
    Refused(GateRefusal),
}

/// A refusal with its wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateRefusal {
    pub retry_after: Duration,
    /// Whether a permit starts exactly then; otherwise it is the earliest that it can.
    pub exact: bool,
    pub reason: BlockReason,
    pub scope: RefusalScope,
}

/// Who is refused for the same reason, and as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalScope {
    /// What its own account, reference, cost or kind of call is counted with: a lane's charges may pass.
    Job,
    /// Every charge; look-ups may pass.
    Charges,
    All,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockReason {
    /// The named limit has no slot.
    Limit(String),
    /// The limiter lost its state and waits until nothing from before can count any more.
    Cold,
    /// The limiter did not count what was used of a limit before, and the ledger is asked.
    NeedsHistory,
    /// The provider named a wait.
    Paused,
    StoreUnavailable(String),
    /// The store knows newer settings than this process.
    StaleSettings,
    /// The job's cost is above what the named limit lets come at once: no window can ever admit it.
    Oversized {
        limit: String,
        max_cost: u32,
    },
    /// An operator's rule stops this account.
    AccountBlocked {
        account: String,
    },
    Stopping,
}

/// What somebody wants to send.
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    pub cost: u32,
    pub kind: CallKind,
    /// Higher first.
    pub priority: u8,
    pub account: Option<String>,
    /// As the job has it; only a digest goes further.
    pub reference: Option<String>,
    /// A start that lies later is refused at once.
    pub wait_until: Instant,
}

/// What the gate waits for, for status and explanation.
#[derive(Clone, Debug, Default)]
pub struct GateView {
    pub waiting: usize,
    /// Why the line stands, and until when at the earliest; `None` while it moves.
    pub block: Option<(BlockReason, Instant)>,
}

/// Where one waits in line, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePosition {
    /// How many go before it; those who stand aside for themselves alone are not counted.
    pub jobs_ahead: u64,
    /// What they and it use of each limit: the sum of the costs of those before it.
    pub cost_ahead: u64,
    /// Why it waits, until when, and whether that is exact; `None` while the line moves.
    pub block: Option<(BlockReason, Instant, bool)>,
    /// Refused by what counts its own account, reference or kind of call alone.
    pub is_own_limit: bool,
}

#[derive(Debug)]
enum GateMessage {
    Acquire(wait_queue::PermitWaiter),
    Position {
        job: JobId,
        reply: oneshot::Sender<Option<QueuePosition>>,
    },
    Release(permit::PendingRelease),
    /// Enough permits have been written down that more are worth asking for.
    SlotFreed,
    Pause {
        until: Instant,
    },
}

/// A handle on one gate; cheap to clone. The gate lives until its token is cancelled.
#[derive(Clone, Debug)]
pub struct Gate {
    messages: mpsc::UnboundedSender<GateMessage>,
    view: watch::Receiver<GateView>,
}

/// What a gate stands on.
pub struct GateContext {
    pub limiter: Arc<dyn Limiter>,
    pub recent: Arc<dyn RecentAttempts>,
    pub spec: watch::Receiver<Arc<QuotaSpec>>,
    /// Unique to this gate, below 2^48.
    pub incarnation: u64,
    pub stop: CancellationToken,
    /// Hears of a settings version that the store knows and we do not.
    pub on_newer_version: Arc<dyn Fn(i64) + Send + Sync>,
}

impl Gate {
    /// The gate and the task that runs it, for the caller to spawn and track.
    pub fn new(parts: GateContext) -> (Self, impl Future<Output = ()> + Send) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (view_tx, view) = watch::channel(GateView::default());
        let task = dispatcher::PermitDispatcher::new(parts, inbox, messages.downgrade(), view_tx);
        (Self { messages, view }, task.run())
    }

    /// Waits in line for a permit, at most until the time that was asked for.
    ///
    /// Dropping the future leaves the line; a permit that was granted meanwhile is given back.
    pub async fn acquire(&self, ask: AcquireRequest) -> AcquireResult {
        self.acquire_for(None, ask).await
    }

    /// The same, for a job whose place can be asked for by its id ([`Gate::place_of`]).
    pub async fn acquire_for(&self, job: Option<JobId>, ask: AcquireRequest) -> AcquireResult {
        let (reply, answer) = oneshot::channel();
        let AcquireRequest { cost, kind, priority, account, reference, wait_until } = ask;
        let of = wait_queue::CountingScope { kind: Some(kind), account, reference: reference.as_deref().map(digest) };
        let waiter =
            wait_queue::PermitWaiter { job, cost, priority, scope: of, reference, wait_until, reply, deferral: None };
        let stopping = || {
            let retry_after = Duration::from_secs(1);
            AcquireResult::Refused(GateRefusal {
                retry_after,
                exact: false,
                reason: BlockReason::Stopping,
                scope: RefusalScope::All,
            })
        };
        if self.messages.send(GateMessage::Acquire(waiter)).is_err() {
            return stopping();
        }
        answer.await.unwrap_or_else(|_| stopping())
    }

    /// Where this job stands in line; `None` when it does not. Looks at the whole line, so it is for people to ask.
    pub async fn position_of(&self, job: JobId) -> Option<QueuePosition> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(GateMessage::Position { job, reply }).ok()?;
        answer.await.ok().flatten()
    }

    /// Holds the whole quota, in every process, for a wait that the provider named, and up to a tenth of it longer (at most
    /// a second): those who were refused together need not come back together. `spread` lies in 0 to 1.
    pub fn pause(&self, wait: Duration, spread: f64) {
        let longer = (wait / 10).min(PAUSE_SPREAD_MAX).mul_f64(spread.clamp(0.0, 1.0));
        // A gate that has stopped grants nothing, so there is nothing left to pause.
        let _ = self.messages.send(GateMessage::Pause { until: Instant::now() + wait + longer });
    }

    /// Whether both are handles on one gate.
    #[must_use]
    pub fn same_queue(&self, other: &Self) -> bool {
        self.messages.same_channel(&other.messages)
    }

    /// Whether nothing refuses the line: a permit comes with the next call to the store, most often.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.view.borrow().block.is_none()
    }

    #[must_use]
    pub fn view(&self) -> watch::Receiver<GateView> {
        self.view.clone()
    }
}

/// 128 bits of SHA-256: two references that share it would only share a limit.
fn digest(reference: &str) -> String {
    hex::encode(&Sha256::digest(reference.as_bytes())[..16])
}
