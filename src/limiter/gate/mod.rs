//! The gate: the jobs of one quota wait here for permits, in a queue, with at most one limiter call in flight.
//!
//! Any number of waiting jobs cost the store no more than one. Their requests and the released permits travel in the
//! same call, and the next call is made at the announced instant.
//!
//! [`core`] decides, as a pure state machine that the simulation drives, too. Here is its I/O for a worker.
//!
//! The gate grants nothing by itself. While the store is unavailable, cold or has newer settings, no job gets a permit,
//! and [`GateView`] says why. See `docs/decisions/0016-one-batched-call-per-quota.md`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Limiter, RecentAttempts};
use crate::domain::job::JobId;
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::QuotaSpec;

mod block;
mod call_sequence;
pub(crate) mod core;
mod dispatcher;
mod egress;
mod history;
mod history_stock;
mod pending_call;
mod permit;
mod unpersisted;
mod wait_queue;

pub use self::core::RELEASE_DELAY;
pub use crate::domain::wait_reason::BlockReason;
pub use block::RETRY_PAUSE_MIN;
pub use egress::{EgressPosition, EgressRequest, EgressRule, LaneEgress};
pub(crate) use pending_call::{GrantedSlots, PendingCall, PendingRelease};
pub use permit::{InFlightPermit, Permit, PermitExpired, WorkerSlot};
pub(crate) use unpersisted::WindowSlot;
pub(crate) use wait_queue::{CountingScope, PermitWaiter};

/// Longest time by which a pause is prolonged, so that jobs do not all resume at once.
const PAUSE_SPREAD_MAX: Duration = Duration::from_secs(1);

/// The result of a request for a permit. `P`: a [`Permit`], or what the gate's core has granted.
#[derive(Debug)]
pub enum AcquireResult<P = Permit> {
    Granted(P),
    Refused(GateRefusal),
    /// The lane had no worker slot at its egress rate in time.
    NoWorkerSlot,
}

/// A refusal and the wait until the next try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateRefusal {
    pub retry_after: Duration,
    /// Whether a permit starts exactly then; otherwise it is the earliest that it can.
    pub exact: bool,
    pub reason: BlockReason,
    pub scope: RefusalScope,
}

/// The jobs that are refused for the same reason and as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalScope {
    /// This job alone: its reference, cost or kind of call is at a limit. Other charges of the lane may pass.
    Job,
    /// The charges of its account: a limit of the account has no slot, or a rule blocks it.
    Account,
    /// Charges that cost as much or more: a limit of the provider has too few free slots for them. Cheaper ones may pass.
    Cost,
    /// Every charge; look-ups may pass.
    Charges,
    All,
}

/// A job's request for a permit.
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    /// The job whose position can be queried ([`Gate::position_of`]).
    pub job: Option<JobId>,
    pub cost: u32,
    pub kind: CallKind,
    /// Higher first: 0 to 9, and above that a job whose outcome is unknown.
    pub priority: u8,
    pub account: Option<Arc<str>>,
    /// The job's reference. Only a digest of it leaves the gate.
    pub reference: Option<Arc<str>>,
    /// Latest start; if the permit would start later, the request is refused at once.
    pub wait_until: Instant,
    /// Length of a block of the queue that is accepted even beyond `wait_until`, while the job may wait for a worker
    /// slot: a shorter one is not worth a requeue.
    pub accepted_wait: Duration,
    /// Longest time at the gate for a limit of the job's account, or for as many slots at once as it costs; then the
    /// request is refused. Other waits do not count. The first jobs of an account wait longer for a slot in flight.
    pub account_wait: Duration,
    /// The worker slot that is taken with the permit; `None`: the request needs none.
    pub egress: Option<EgressRequest>,
}

impl AcquireRequest {
    /// A request for one permit that needs no worker slot, with nothing else set.
    pub fn new(cost: u32, kind: CallKind, wait_until: Instant) -> Self {
        Self {
            job: None,
            cost,
            kind,
            priority: 0,
            account: None,
            reference: None,
            wait_until,
            accepted_wait: Duration::ZERO,
            account_wait: Duration::MAX,
            egress: None,
        }
    }
}

/// The gate's state for `status` and `explain`.
#[derive(Clone, Debug, Default)]
pub struct GateView {
    pub waiting: usize,
    /// Why the queue is blocked, and the earliest end; `None` while it is open.
    pub block: Option<(BlockReason, Instant)>,
    /// When a limit blocked the queue last, now included.
    pub limited_at: Option<Instant>,
    /// When something else blocked the queue last, now included: a cold limiter, or one that cannot be reached.
    pub unavailable_at: Option<Instant>,
}

impl GateView {
    /// Whether a limit blocks the queue.
    pub fn is_blocked_by_limit(&self) -> bool {
        matches!(self.block, Some((BlockReason::Limit(_), _)))
    }

    /// Whether a limit blocks the queue, or did so since then.
    pub fn was_at_limit_since(&self, since: Instant) -> bool {
        self.limited_at.is_some_and(|at| at >= since)
    }

    /// Time of a wait that limits and worker slots explain: all since something else has blocked the queue last. A worker
    /// that starts with a full queue has a cold limiter, and all that it holds by then waits.
    pub fn waited_for_limits(&self, began: Instant, now: Instant) -> Duration {
        now.saturating_duration_since(self.unavailable_at.map_or(began, |at| at.max(began)))
    }
}

/// A job's position in the queue, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePosition {
    /// Jobs before it, without those that are deferred by limits of their own.
    pub jobs_ahead: u64,
    /// Sum of the costs of the jobs before it.
    pub cost_ahead: u64,
    /// Why it waits, until when, and whether that is exact; `None` while the queue is open.
    pub block: Option<(BlockReason, Instant, bool)>,
    /// Blocked by a limit on its own account, reference or kind of call alone.
    pub is_own_limit: bool,
    /// Its position in its lane's egress; `None` while its lane lets it leave.
    pub egress: Option<EgressPosition>,
}

#[derive(Debug)]
enum GateMessage {
    Acquire(PermitWaiter<oneshot::Sender<AcquireResult>>),
    Position {
        job: JobId,
        reply: oneshot::Sender<Option<QueuePosition>>,
    },
    /// Answered as soon as the gate's task handles it.
    Ping(oneshot::Sender<()>),
    Release(PendingRelease),
    /// A worker slot is free, or enough permits are persisted: the gate may ask for more.
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

/// The dependencies of a gate.
pub struct GateContext {
    pub limiter: Arc<dyn Limiter>,
    pub recent: Arc<dyn RecentAttempts>,
    pub spec: watch::Receiver<Arc<QuotaSpec>>,
    /// Unique to this gate, below 2^48.
    pub incarnation: u64,
    pub stop: CancellationToken,
    /// Called with a settings version of the store that is newer than this process's.
    pub on_newer_version: Arc<dyn Fn(i64) + Send + Sync>,
}

impl Gate {
    /// A gate, and its task for the caller to spawn and track.
    pub fn new(parts: GateContext) -> (Self, impl Future<Output = ()> + Send) {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (view_tx, view) = watch::channel(GateView::default());
        let task = dispatcher::PermitDispatcher::new(parts, inbox, messages.downgrade(), view_tx);
        (Self { messages, view }, task.run())
    }

    /// Waits in the queue for a permit, at most until [`AcquireRequest::wait_until`].
    ///
    /// Dropping the future leaves the queue. A permit that was granted meanwhile is released unused.
    pub async fn acquire(&self, request: AcquireRequest) -> AcquireResult {
        let (reply, answer) = oneshot::channel();
        // A gate that has ended drops the request, and the answer with it.
        let _ = self.messages.send(GateMessage::Acquire(PermitWaiter::new(request, reply, Instant::now())));
        let (reason, scope) = (BlockReason::Stopping, RefusalScope::All);
        let refusal = GateRefusal { retry_after: Duration::from_secs(1), exact: false, reason, scope };
        answer.await.unwrap_or(AcquireResult::Refused(refusal))
    }

    /// This job's position in the queue; `None` if it does not wait. Reads the whole queue, so it is meant for people.
    pub async fn position_of(&self, job: JobId) -> Option<QueuePosition> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(GateMessage::Position { job, reply }).ok()?;
        answer.await.ok().flatten()
    }

    /// Waits until the gate's task has handled a message. Returns at once if the gate has ended.
    pub async fn ping(&self) {
        let (reply, answer) = oneshot::channel();
        if self.messages.send(GateMessage::Ping(reply)).is_ok() {
            // A gate that ends drops the reply.
            let _ = answer.await;
        }
    }

    /// Pauses the whole quota, in every process, for a wait that the provider named. `spread` (0 to 1) prolongs it by
    /// at most a tenth or a second, so that jobs that were refused together do not return together.
    pub fn pause(&self, wait: Duration, spread: f64) {
        let longer = (wait / 10).min(PAUSE_SPREAD_MAX).mul_f64(spread.clamp(0.0, 1.0));
        // A gate that has stopped grants nothing, so there is nothing left to pause.
        let _ = self.messages.send(GateMessage::Pause { until: Instant::now() + wait + longer });
    }

    /// Has the gate look at its waiters again, after the egress of a lane changed.
    pub fn wake(&self) {
        let _ = self.messages.send(GateMessage::SlotFreed);
    }

    /// Whether both are handles on one gate.
    pub fn same_queue(&self, other: &Self) -> bool {
        self.messages.same_channel(&other.messages)
    }

    /// Whether the queue is not blocked. Then the next call to the store usually brings a permit.
    pub fn is_open(&self) -> bool {
        self.view.borrow().block.is_none()
    }

    pub fn view(&self) -> watch::Receiver<GateView> {
        self.view.clone()
    }
}
