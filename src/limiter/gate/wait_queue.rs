//! The wait queue of a gate: the waiting jobs, their order, and their deadlines.
//!
//! A job that cannot be granted blocks the jobs behind it, so that they do not starve a costly job. Other processes
//! have queues of their own and may overtake it. A job that a limit of its own account or reference refuses is deferred
//! meanwhile, and blocks no other.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use self::waiters::Waiters;
use super::block::{BlocksByKind, QueueBlock};
use super::{AcquireResult, BlockReason, GateRefusal, QueuePosition, RefusalScope};
use crate::domain::job::JobId;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::{BATCH_MAX, CallKind, PermitRequest, Subject};
use crate::domain::quota_spec::{Blocked, CounterSpec, QuotaSpec};

mod waiters;

/// The wait that a job of a blocked account is told.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// The kind, account and reference with which a permit is counted, besides the provider's limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CountingScope {
    pub kind: Option<CallKind>,
    pub account: Option<String>,
    /// A digest, because references are long and belong to the merchant.
    pub reference: Option<String>,
}

impl CountingScope {
    pub fn kind(&self) -> CallKind {
        self.kind.unwrap_or(CallKind::Charge)
    }

    /// The subjects that count a new permit.
    ///
    /// # Errors
    /// [`Blocked`]: a rule blocks the account, so it must get no permit.
    pub fn subjects(&self, spec: &QuotaSpec) -> Result<Vec<Subject>, Blocked> {
        spec.subjects(self.account.as_deref(), self.reference.as_deref())
    }

    /// The subjects that count a permit that was granted before. An account that was blocked since is not counted any
    /// more.
    pub fn subjects_to_release(&self, spec: &QuotaSpec) -> Vec<Subject> {
        self.subjects(spec).unwrap_or_default()
    }
}

/// A job that waits for a permit.
#[derive(Debug)]
pub(super) struct PermitWaiter {
    /// The job whose position can be queried.
    pub job: Option<JobId>,
    pub cost: u32,
    pub priority: u8,
    pub scope: CountingScope,
    /// The job's reference, for queries of the ledger.
    pub reference: Option<String>,
    /// The waiter is refused if its permit would start later than this.
    pub wait_until: Instant,
    pub reply: oneshot::Sender<AcquireResult>,
    /// Set while a limit of its own refuses it.
    pub deferral: Option<Deferral>,
}

/// Why a waiter is deferred, and until when.
#[derive(Clone, Debug)]
pub(super) struct Deferral {
    pub until: Instant,
    pub reason: BlockReason,
    pub exact: bool,
    /// What the limit counts together; later waiters that it counts with this one are deferred too.
    pub counted_with: Option<(Scope, AppliesTo)>,
}

impl PermitWaiter {
    /// Whether it is deferred by a limit that also counts the later waiter.
    fn defers(&self, later: &CountingScope) -> bool {
        let Some((scope, applies_to)) = self.deferral.as_ref().and_then(|deferral| deferral.counted_with) else {
            return false;
        };
        let is_same_subject = match scope {
            Scope::Provider => false,
            Scope::Account => self.scope.account == later.account,
            Scope::Reference => self.scope.reference == later.reference,
        };
        is_same_subject && (applies_to == AppliesTo::All || self.scope.kind() == later.kind())
    }

    /// When the limiter is to be asked for it; `None`: now.
    fn ready_at(&self, kinds: &BlocksByKind) -> Option<Instant> {
        let kind_retry_at = kinds.get(&self.scope.kind()).map(|block| block.retry_at);
        self.deferral.as_ref().map(|deferral| deferral.until).max(kind_retry_at)
    }
}

/// Order in the queue: higher priority first, then earlier arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueKey {
    priority_reversed: u8,
    arrival: u64,
}

/// Neighbours in the queue with the same scope and cost, as one request.
#[derive(Debug)]
pub(super) struct RequestBatch {
    pub request: PermitRequest,
    pub scope: CountingScope,
    /// The first job's reference.
    pub reference: Option<String>,
    /// Counters of its account and reference that hold slots.
    pub subject_counters: Vec<CounterSpec>,
    pub keys: Vec<QueueKey>,
}

#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    waiters: Waiters,
    arrivals: u64,
}

impl WaitQueue {
    /// Adds a waiter, unless the spec can never admit it. Returns its key, or `None` if it is refused or deferred.
    pub fn enqueue(&mut self, waiter: PermitWaiter, spec: &QuotaSpec, now: Instant) -> Option<QueueKey> {
        let waiter = refuse_inadmissible(waiter, spec)?;
        self.arrivals += 1;
        let key = QueueKey { priority_reversed: u8::MAX - waiter.priority, arrival: self.arrivals };
        let earlier = self.longest_earlier_deferral(key, &waiter.scope).cloned();
        self.waiters.insert(key, waiter);
        match earlier {
            Some(deferral) => {
                self.defer(key, &deferral, now);
                None
            }
            None => Some(key),
        }
    }

    /// The longest deferral of the waiters before this key by limits that also count this scope.
    fn longest_earlier_deferral(&self, key: QueueKey, scope: &CountingScope) -> Option<&Deferral> {
        let earlier =
            self.waiters.deferred_ahead_of(..key).filter(|waiter| !waiter.reply.is_closed() && waiter.defers(scope));
        earlier.filter_map(|waiter| waiter.deferral.as_ref()).max_by_key(|deferral| deferral.until)
    }

    /// Applies another spec: deferred waiters may pass now, and others may never be admitted.
    pub fn apply_spec(&mut self, spec: &QuotaSpec) {
        for (key, mut waiter) in std::mem::take(&mut self.waiters) {
            waiter.deferral = None;
            if let Some(waiter) = refuse_inadmissible(waiter, spec) {
                self.waiters.insert(key, waiter);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes cancelled waiters from time to time. Until then no permit is requested for them.
    pub fn sweep_cancelled(&mut self) {
        self.waiters.sweep_if_due();
    }

    /// The first waiters that are not deferred, at most `free_slots`, batched for one call.
    pub fn next_batches(
        &mut self,
        spec: &QuotaSpec,
        kinds: &BlocksByKind,
        free_slots: u32,
        now: Instant,
    ) -> Vec<RequestBatch> {
        let mut batches: Vec<RequestBatch> = Vec::new();
        self.waiters.resume_if(|deferral| deferral.until <= now);
        let present = self.waiters.iter().filter(|(_, waiter)| !waiter.reply.is_closed());
        let ready = present.filter(|(_, waiter)| waiter.ready_at(kinds) <= Some(now));
        for (key, waiter) in ready.take(BATCH_MAX.min(usize::try_from(free_slots).unwrap_or(BATCH_MAX))) {
            match batches.last_mut() {
                Some(batch) if batch.scope == waiter.scope && batch.request.cost == waiter.cost => {
                    batch.request.permits += 1;
                    batch.keys.push(*key);
                }
                _ => {
                    // A waiter whose account is blocked by now is refused when the new settings are applied.
                    let Ok(subjects) = waiter.scope.subjects(spec) else { continue };
                    let (scope, cost, kind) = (waiter.scope.clone(), waiter.cost, waiter.scope.kind());
                    let counters = subjects.iter().flat_map(|subject| spec.subject_counters(subject));
                    let subject_counters =
                        counters.filter(|counter| counter.is_held() && counter.applies(kind)).collect();
                    let request = PermitRequest { permits: 1, cost, kind, subjects };
                    let reference = waiter.reference.clone();
                    batches.push(RequestBatch { request, scope, reference, subject_counters, keys: vec![*key] });
                }
            }
        }
        if batches.is_empty() {
            self.waiters.sweep_all();
        }
        batches
    }

    /// When a waiter becomes ready; `None`: one is ready now, or the queue is empty.
    pub fn ready_at(&self, kinds: &BlocksByKind) -> Option<Instant> {
        let mut earliest = None;
        for (_, waiter) in self.waiters.iter() {
            let at = waiter.ready_at(kinds)?;
            earliest = Some(earliest.map_or(at, |known: Instant| known.min(at)));
        }
        earliest
    }

    /// The first waiter that is ready.
    pub fn first_ready(&self, kinds: &BlocksByKind, now: Instant) -> Option<QueueKey> {
        self.waiters.iter().find(|(_, waiter)| waiter.ready_at(kinds) <= Some(now)).map(|(key, _)| *key)
    }

    pub fn remove(&mut self, key: QueueKey) -> Option<PermitWaiter> {
        self.waiters.remove(key)
    }

    /// Defers a waiter, or refuses it if it would wait too long. A deferral lasts at least as long as those of earlier
    /// waiters by the same limit.
    pub fn defer(&mut self, key: QueueKey, deferral: &Deferral, now: Instant) {
        let Some(waiter) = self.waiters.get(key) else { return };
        let deferral = self
            .longest_earlier_deferral(key, &waiter.scope)
            .filter(|earlier| earlier.until > deferral.until)
            .unwrap_or(deferral)
            .clone();
        if waiter.wait_until >= deferral.until {
            self.waiters.defer(key, deferral);
        } else if let Some(waiter) = self.waiters.remove(key) {
            let wait = deferral.until.saturating_duration_since(now);
            refuse(waiter, wait, deferral.exact, &deferral.reason, RefusalScope::Job);
        }
    }

    /// Ends the deferrals that wait for a history.
    pub fn resume_after_history(&mut self) {
        self.waiters.resume_if(|deferral| deferral.reason == BlockReason::NeedsHistory);
    }

    /// Keeps a waiter in the queue, but requests no permit for it before this instant.
    pub fn defer_until(&mut self, key: QueueKey, until: Instant) {
        let reason = BlockReason::StoreUnavailable("its clock was not compared for too long".to_owned());
        self.waiters.defer(key, Deferral { until, reason, exact: false, counted_with: None });
    }

    /// A job's position, and what it waits for: its own deferral, its kind's block, or the queue's block.
    pub fn position_of(
        &self,
        job: &JobId,
        queue_block: Option<&QueueBlock>,
        kinds: &BlocksByKind,
    ) -> Option<QueuePosition> {
        let (key, waiter) = self.waiters.iter().find(|(_, waiter)| waiter.job.as_ref() == Some(job))?;
        let goes_first = |earlier: &&PermitWaiter| {
            let is_cancelled = earlier.reply.is_closed();
            !is_cancelled && (earlier.deferral.is_none() || earlier.defers(&waiter.scope))
        };
        let (mut jobs_ahead, mut cost_ahead) = (0, 0);
        for earlier in self.waiters.ahead_of(..*key).filter(goes_first) {
            jobs_ahead += 1;
            cost_ahead += u64::from(earlier.cost);
        }
        let own = waiter.deferral.as_ref().map(|own| (own.reason.clone(), own.until, own.exact));
        let is_own_limit = own.is_some();
        let shared = queue_block
            .or_else(|| kinds.get(&waiter.scope.kind()))
            .map(|block| (block.reason.clone(), block.until, block.exact));
        Some(QueuePosition { jobs_ahead, cost_ahead, block: own.or(shared), is_own_limit })
    }

    /// The earliest deadline of a waiter.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiters.first_deadline()
    }

    /// Refuses the first waiter if it does not wait as long as the block lasts while a cheaper waiter is behind it. All
    /// waiters of at least its cost whose deadline is before the block's end are refused too. Returns whether it did
    /// so: then the cheaper waiters may get the free slots. The refusals concern the job alone, so no lane pauses.
    pub fn evict_oversized(&mut self, first: QueueKey, block: &QueueBlock, now: Instant) -> bool {
        let QueueBlock { reason, until, exact, .. } = block;
        let is_evicted = |waiter: &&PermitWaiter| waiter.cost > 1 && waiter.wait_until < *until;
        let Some(cost) = self.waiters.get(first).filter(is_evicted).map(|waiter| waiter.cost) else { return false };
        if !self.waiters.iter().any(|(_, other)| other.cost < cost && other.deferral.is_none()) {
            return false;
        }
        for key in self.waiters.expiring_before(*until) {
            if self.waiters.get(key).is_some_and(|waiter| waiter.cost >= cost)
                && let Some(waiter) = self.waiters.remove(key)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, reason, RefusalScope::Job);
            }
        }
        true
    }

    /// Refuses all waiters, or all of a kind, whose deadline is before the block's end. A block of look-ups alone does
    /// not concern charges, which are what a lane takes from its queue.
    pub fn refuse_expiring(&mut self, block: &QueueBlock, kind: Option<CallKind>, now: Instant) {
        let QueueBlock { reason, until, exact, .. } = block;
        let scope = match kind {
            None => RefusalScope::All,
            Some(CallKind::Charge) => RefusalScope::Charges,
            Some(CallKind::Lookup) => RefusalScope::Job,
        };
        for key in self.waiters.expiring_before(*until) {
            let is_blocked = |waiter: &PermitWaiter| kind.is_none_or(|kind| kind == waiter.scope.kind());
            if self.waiters.get(key).is_some_and(is_blocked)
                && let Some(waiter) = self.waiters.remove(key)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, reason, scope);
            }
        }
    }
}

/// Refuses a waiter whose account is blocked, or whose cost no window can ever admit; returns any other.
fn refuse_inadmissible(waiter: PermitWaiter, spec: &QuotaSpec) -> Option<PermitWaiter> {
    let Ok(subjects) = waiter.scope.subjects(spec) else {
        let account = waiter.scope.account.clone().unwrap_or_default();
        refuse(waiter, BLOCKED_WAIT, false, &BlockReason::AccountBlocked { account }, RefusalScope::Job);
        return None;
    };
    // Jobs wait while a limit is closed (0), and every open limit admits a cost of 1.
    if waiter.cost > 1
        && let Some((limit, max_cost)) = spec.tightest_limit(waiter.scope.kind(), &subjects)
        && max_cost > 0
        && waiter.cost > max_cost
    {
        refuse(waiter, Duration::ZERO, true, &BlockReason::Oversized { limit, max_cost }, RefusalScope::Job);
        return None;
    }
    Some(waiter)
}

fn refuse(waiter: PermitWaiter, wait: Duration, exact: bool, reason: &BlockReason, scope: RefusalScope) {
    let never = matches!(reason, BlockReason::Oversized { .. });
    let retry_after = if never { Duration::ZERO } else { wait.max(Duration::from_millis(1)) };
    // A cancelled waiter needs no answer.
    let reason = reason.clone();
    let _ = waiter.reply.send(AcquireResult::Refused(GateRefusal { retry_after, exact, reason, scope }));
}
