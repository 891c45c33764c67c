//! The wait queue of a gate: the waiting jobs, their order, and their deadlines.
//!
//! A job that cannot be granted blocks the jobs behind it. Other processes have queues of their own and may overtake it. A
//! job that a limit of its own account or reference refuses is deferred meanwhile, with the later ones that this limit
//! counts, and blocks no other. Nor does a job whose lane has no free worker slot. A job that costs more than is free
//! blocks cheaper ones for [`waiter::COST_HOLD_MAX`] at most. Then it is deferred, and so are those that cost as much.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::call_bounds::HeldBack;
use self::waiter::{COST_HOLD_MAX, RELEASE_WAITERS_MAX, inadmissible_refusal, refusal_for};
use self::waiters::Waiters;
use super::block::{BlocksByKind, QueueBlock};
use super::core::{Decision, GrantedPermit, Ticket};
use super::egress::{EgressPosition, EgressRule};
use super::{AcquireResult, BlockReason, GateRefusal, QueuePosition, RefusalScope};
use crate::domain::job::JobId;
use crate::domain::permit_protocol::{BATCH_MAX, CallKind, PermitRequest};
use crate::domain::quota_spec::QuotaSpec;

mod by_name;
mod call_bounds;
mod waiter;
mod waiters;

pub(super) use self::waiter::Deferral;
pub(crate) use self::waiter::{CountedSubjects, CountingScope, PermitWaiter};

/// Order in the queue: higher priority first, then earlier arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    priority_reversed: u8,
    arrival: u64,
}

impl QueueKey {
    /// Behind every waiter.
    const LAST: Self = Self { priority_reversed: u8::MAX, arrival: u64::MAX };
}

/// Neighbours in the queue with the same scope and cost, as one request.
#[derive(Debug)]
pub(crate) struct RequestBatch {
    pub scope: CountingScope,
    pub cost: u32,
    /// The first job's reference.
    pub reference: Option<Arc<str>>,
    pub counted: Arc<CountedSubjects>,
    pub keys: Vec<QueueKey>,
}

impl RequestBatch {
    pub fn request(&self) -> PermitRequest {
        let permits = u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
        PermitRequest { permits, cost: self.cost, kind: self.scope.kind, subjects: self.counted.subjects.clone() }
    }
}

#[derive(Debug)]
pub(super) struct WaitQueue<T> {
    waiters: Waiters<T>,
    arrivals: u64,
    /// Decisions that were not taken yet.
    decisions: Vec<Decision<T>>,
}

impl<T> Default for WaitQueue<T> {
    fn default() -> Self {
        Self { waiters: Waiters::default(), arrivals: 0, decisions: Vec::new() }
    }
}

impl<T: Ticket> WaitQueue<T> {
    pub fn take_decisions(&mut self) -> Vec<Decision<T>> {
        std::mem::take(&mut self.decisions)
    }

    pub fn decide(&mut self, ticket: T, result: AcquireResult<GrantedPermit>) {
        self.decisions.push(Decision { ticket, result });
    }

    fn refuse(&mut self, key: QueueKey, refusal: GateRefusal, now: Instant) {
        if let Some(waiter) = self.waiters.remove(key, now) {
            self.decide(waiter.ticket, AcquireResult::Refused(refusal));
        }
    }

    /// Adds a waiter, unless the spec can never admit it. Returns its key, or `None` if it is refused or deferred.
    pub fn enqueue(&mut self, waiter: PermitWaiter<T>, spec: &QuotaSpec, now: Instant) -> Option<QueueKey> {
        let mut waiter = waiter;
        match CountedSubjects::of(&waiter, spec) {
            Ok(counted) if counted.subjects.is_empty() => {}
            Ok(counted) => waiter.counted = Arc::new(counted),
            Err(reason) => {
                self.decide(waiter.ticket, AcquireResult::Refused(inadmissible_refusal(reason)));
                return None;
            }
        }
        self.arrivals += 1;
        let key = QueueKey { priority_reversed: u8::MAX - waiter.priority, arrival: self.arrivals };
        let earlier = self.longest_earlier_deferral(key, &waiter.scope).cloned();
        self.waiters.insert(key, waiter, now);
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
        let earlier = self.waiters.related_ahead_of(key, scope);
        let earlier = earlier.filter(|waiter| !waiter.ticket.is_cancelled() && waiter.defers(scope));
        earlier.filter_map(|waiter| waiter.deferral.as_ref()).max_by_key(|deferral| deferral.until)
    }

    /// Applies another spec: deferred waiters may pass now, and others may never be admitted.
    pub fn apply_spec(&mut self, spec: &QuotaSpec, now: Instant) {
        self.waiters.resume_if(|_| true);
        let counted = self.waiters.iter().map(|(key, waiter)| (*key, CountedSubjects::of(waiter, spec)));
        for (key, counted) in counted.collect::<Vec<_>>() {
            match counted {
                Ok(counted) => self.waiters.count_with(key, counted),
                Err(reason) => self.refuse(key, inadmissible_refusal(reason), now),
            }
        }
    }

    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Removes cancelled waiters from time to time. Until then no permit is requested for them.
    pub fn sweep_cancelled(&mut self, now: Instant) {
        self.waiters.sweep_if_due(now);
    }

    /// The first waiters that are not deferred and may leave their lanes, at most `free_slots`, batched for one call. A
    /// limit of an account or a reference decides on a costly one before cheaper ones behind it are requested. All have the
    /// priority of the first: those of a lower one would be booked as far ahead as an urgent one.
    pub fn next_batches(&mut self, kinds: &BlocksByKind, free_slots: u32, now: Instant) -> Vec<RequestBatch> {
        let (mut batches, mut first_priority): (Vec<RequestBatch>, _) = (Vec::new(), None);
        self.waiters.resume_due(now);
        let mut capacity = self.waiters.lanes().capacity(now);
        let present = self.waiters.ready().filter(|(_, waiter)| !waiter.ticket.is_cancelled());
        let ready = present.filter(|(_, waiter)| waiter.ready_at(kinds) <= Some(now));
        let mut held_back = HeldBack::default();
        let mut left = BATCH_MAX.min(usize::try_from(free_slots).unwrap_or(BATCH_MAX));
        for (key, waiter) in ready {
            let is_lower = first_priority.is_some_and(|first| first != key.priority_reversed);
            if left == 0 || is_lower || capacity.is_used_up() || held_back.len() >= BATCH_MAX {
                break;
            }
            if !capacity.has_room_for(waiter.egress.as_ref()) || !held_back.admits(waiter) {
                continue;
            }
            capacity.take(waiter.egress.as_ref());
            left -= 1;
            first_priority = Some(key.priority_reversed);
            match batches.last_mut() {
                Some(batch) if batch.scope == waiter.scope && batch.cost == waiter.cost => batch.keys.push(*key),
                _ => batches.push(RequestBatch {
                    scope: waiter.scope.clone(),
                    cost: waiter.cost,
                    reference: waiter.reference.clone(),
                    counted: Arc::clone(&waiter.counted),
                    keys: vec![*key],
                }),
            }
        }
        if batches.is_empty() {
            self.waiters.sweep_all(now);
        }
        batches
    }

    /// When the next waiter is ready and may leave its lane; `None`: when a worker slot is released or a job comes.
    pub fn next_ready_at(&self, kinds: &BlocksByKind, now: Instant) -> Option<Instant> {
        let lanes = self.waiters.lanes();
        let capacity = lanes.capacity(now);
        let least = lanes.earliest(&capacity)?;
        let ready_at = |waiter: &PermitWaiter<T>| {
            let leaves_at = capacity.next_at(waiter.egress.as_ref())?;
            Some(waiter.ready_at(kinds).map_or(leaves_at, |ready_at| ready_at.max(leaves_at)))
        };
        let mut earliest: Option<Instant> = None;
        for at in self.waiters.ready().filter_map(|(_, waiter)| ready_at(waiter)) {
            earliest = Some(earliest.map_or(at, |known| known.min(at)));
            // No lane lets a job out earlier, so the others need not be looked at.
            if at <= least {
                return earliest;
            }
        }
        for (until, waiter) in self.waiters.deferred() {
            if earliest.is_some_and(|known| known <= until.max(least)) {
                break;
            }
            earliest = [ready_at(waiter), earliest].into_iter().flatten().min();
        }
        earliest
    }

    /// The first waiter that is ready and may leave its lane.
    pub fn first_ready(&mut self, kinds: &BlocksByKind, now: Instant) -> Option<QueueKey> {
        self.waiters.resume_due(now);
        let mut capacity = self.waiters.lanes().capacity(now);
        let mut ready = self.waiters.ready().filter(|(_, waiter)| waiter.ready_at(kinds) <= Some(now));
        ready.find(|(_, waiter)| capacity.take(waiter.egress.as_ref())).map(|(key, _)| *key)
    }

    /// Whether another waiter that is ready has a lower priority.
    pub fn is_urgent(&self, key: QueueKey) -> bool {
        self.waiters.ready().next_back().is_some_and(|(last, _)| last.priority_reversed > key.priority_reversed)
    }

    pub fn contains(&self, key: QueueKey) -> bool {
        self.waiters.get(key).is_some()
    }

    pub fn remove(&mut self, key: QueueKey, now: Instant) -> Option<PermitWaiter<T>> {
        self.waiters.remove(key, now)
    }

    /// Defers a waiter and the later ones that the same limit counts, or refuses those that would wait too long. A
    /// deferral lasts at least as long as those of earlier waiters by the same limit.
    pub fn defer(&mut self, key: QueueKey, deferral: &Deferral, now: Instant) {
        let Some(waiter) = self.waiters.get(key) else { return };
        // The later ones are deferred as long, too.
        if waiter.deferral.as_ref().is_some_and(|own| own.includes(deferral)) {
            return;
        }
        let waits_shorter = |later: &PermitWaiter<T>| {
            deferral.counts_together(&waiter.scope, &later.scope)
                && later.deferral.as_ref().is_none_or(|own| own.until < deferral.until)
        };
        let later = self.waiters.named_behind(key, &waiter.scope, deferral);
        let later: Vec<QueueKey> = later.filter(|(_, later)| waits_shorter(later)).map(|(key, _)| key).collect();
        let earlier = self.longest_earlier_deferral(key, &waiter.scope);
        let longest = earlier.filter(|earlier| earlier.until > deferral.until).unwrap_or(deferral).clone();
        self.defer_one(key, longest, now);
        for key in later {
            self.defer_one(key, deferral.clone(), now);
        }
    }

    fn defer_one(&mut self, key: QueueKey, deferral: Deferral, now: Instant) {
        let Some(waiter) = self.waiters.get(key) else { return };
        let workers = waiter.egress.as_ref().map_or(RELEASE_WAITERS_MAX, |egress| egress.lane.workers());
        let most = RELEASE_WAITERS_MAX.min(workers);
        let is_first = self.waiters.deferred_ahead(key, &waiter.scope).take(most).count() < most;
        if waiter.accepts_deferral(&deferral, is_first, now) {
            self.waiters.defer(key, deferral);
        } else {
            let wait = deferral.until.saturating_duration_since(now);
            let scope = match deferral.is_by_account_limit() {
                true => RefusalScope::Account,
                false if deferral.is_by_cost => RefusalScope::Cost,
                false => RefusalScope::Job,
            };
            self.refuse(key, refusal_for(wait, deferral.exact, &deferral.reason, scope), now);
        }
    }

    /// Whether a waiter holds back cheaper ones behind it until then: it does so for [`COST_HOLD_MAX`] at most, and then
    /// leaves them as much time.
    pub fn holds_until(&mut self, key: QueueKey, until: Instant, now: Instant) -> bool {
        let Some(waiter) = self.waiters.get(key) else { return false };
        let since = waiter.holds_since.filter(|since| now < *since + COST_HOLD_MAX * 2).unwrap_or(now);
        let holds = until <= since + COST_HOLD_MAX && waiter.accepts(until, now, now);
        if holds {
            self.waiters.hold(key, since);
        }
        holds
    }

    /// Defers the waiters of at least this cost, of all kinds or of one, that nothing else defers.
    pub fn defer_costly(&mut self, cost: u32, kind: Option<CallKind>, deferral: &Deferral, now: Instant) {
        let is_costly =
            |waiter: &PermitWaiter<T>| waiter.cost >= cost && kind.is_none_or(|kind| kind == waiter.scope.kind);
        let costly = self.waiters.ready().filter(|(_, waiter)| is_costly(waiter)).map(|(key, _)| *key);
        for key in costly.collect::<Vec<_>>() {
            self.defer_one(key, deferral.clone(), now);
        }
    }

    /// Ends the deferrals of costly waiters by limits that a release has freed a slot of.
    pub fn resume_costly(&mut self, is_freed: impl Fn(&BlockReason) -> bool) {
        self.waiters.resume_if(|own| own.is_by_cost && is_freed(&own.reason));
    }

    /// Ends the deferrals that wait for a history.
    pub fn resume_after_history(&mut self) {
        self.waiters.resume_if(|deferral| deferral.reason == BlockReason::NeedsHistory);
    }

    /// Ends the deferrals by limits that a release of this scope has freed a slot of.
    pub fn resume_after_release(&mut self, released: &CountingScope, is_freed: impl Fn(&BlockReason) -> bool) {
        let counts = |waiter: &PermitWaiter<T>, own: &Deferral| own.counts_together(&waiter.scope, released);
        self.waiters.resume_related(released, |waiter, own| counts(waiter, own) && is_freed(&own.reason));
    }

    /// Keeps ready waiters in the queue, but requests no permit for them before the instant that `until` returns.
    pub fn defer_ready(&mut self, until: impl Fn(&PermitWaiter<T>) -> Option<Instant>) {
        let deferred = self.waiters.ready().filter_map(|(key, waiter)| Some((*key, until(waiter)?)));
        for (key, until) in deferred.collect::<Vec<_>>() {
            let reason = BlockReason::StoreUnavailable("its clock was not compared for too long".to_owned());
            let deferral =
                Deferral { until, reason, exact: false, ends_by_release: false, counted_with: None, is_by_cost: false };
            self.waiters.defer(key, deferral);
        }
    }

    /// A job's position, and what it waits for: its own deferral, its kind's block, or the queue's block.
    pub fn position_of(
        &self,
        job: &JobId,
        queue_block: Option<&QueueBlock>,
        kinds: &BlocksByKind,
        now: Instant,
    ) -> Option<QueuePosition> {
        // The job may have given up waiting once, and wait again.
        let waits = |waiter: &PermitWaiter<T>| waiter.job.as_ref() == Some(job) && !waiter.ticket.is_cancelled();
        let (key, waiter) = self.waiters.iter().find(|(_, waiter)| waits(waiter))?;
        let goes_first = |earlier: &&PermitWaiter<T>| {
            let is_cancelled = earlier.ticket.is_cancelled();
            !is_cancelled && (earlier.deferral.is_none() || earlier.defers(&waiter.scope))
        };
        let (mut jobs_ahead, mut cost_ahead, mut leave_before) = (0, 0, 0);
        for earlier in self.waiters.ahead_of(..*key).filter(goes_first) {
            jobs_ahead += 1;
            cost_ahead += u64::from(earlier.cost);
            leave_before += u64::from(earlier.leaves_before(waiter));
        }
        let own = waiter.deferral.as_ref().map(|own| (own.reason.clone(), own.until, own.exact));
        let is_own_limit = own.is_some();
        let shared = queue_block
            .or_else(|| kinds.get(&waiter.scope.kind))
            .map(|block| (block.reason.clone(), block.until, block.exact));
        let capacity = self.waiters.lanes().capacity(now);
        let egress =
            waiter.egress.as_ref().filter(|egress| capacity.next_at(Some(egress)) != Some(now)).map(|egress| {
                let egress_wait = match egress.rule {
                    EgressRule::Paced => egress.lane.wait_behind(now, leave_before),
                    EgressRule::Exempt => Duration::ZERO,
                };
                EgressPosition { jobs_ahead: leave_before, egress_wait }
            });
        Some(QueuePosition { jobs_ahead, cost_ahead, block: own.or(shared), is_own_limit, egress })
    }

    /// The earliest deadline of a waiter after `now`. One that is past and that nothing blocks gets its permit soon.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let first = self.waiters.first_deadline().filter(|at| *at > now);
        first.into_iter().chain(self.waiters.next_egress_deadline(now)).min()
    }

    /// Ends the wait of those that got no worker slot at the egress rate in time.
    pub fn refuse_without_worker_slot(&mut self, now: Instant) {
        let late = self.waiters.past_egress_deadline(now);
        if late.is_empty() {
            return;
        }
        let capacity = self.waiters.lanes().capacity(now);
        for key in late {
            let leaves_at = self.waiters.get(key).and_then(|waiter| capacity.next_at(waiter.egress.as_ref()));
            if leaves_at.is_none_or(|at| at > now)
                && let Some(waiter) = self.waiters.remove(key, now)
            {
                self.decide(waiter.ticket, AcquireResult::NoWorkerSlot);
            }
        }
    }

    /// Refuses those of the waiters whose deadline is before the block's end.
    fn refuse_blocked(
        &mut self,
        block: &QueueBlock,
        scope: RefusalScope,
        now: Instant,
        is_refused: impl Fn(&PermitWaiter<T>) -> bool,
    ) {
        for key in self.waiters.expiring_before(block.until) {
            if self.waiters.get(key).is_some_and(&is_refused) {
                let wait = block.until.saturating_duration_since(now);
                self.refuse(key, refusal_for(wait, block.exact, &block.reason, scope), now);
            }
        }
    }

    /// Refuses all waiters, or all of a kind, whose deadline is before the block's end. A block of look-ups alone does
    /// not concern charges, which are what a lane takes from its queue.
    pub fn refuse_expiring(
        &mut self,
        block: &QueueBlock,
        kind: Option<CallKind>,
        stalled_since: Instant,
        now: Instant,
    ) {
        let scope = match kind {
            // Others might have passed the one that was refused.
            _ if block.is_by_cost => RefusalScope::Job,
            None => RefusalScope::All,
            Some(CallKind::Charge) => RefusalScope::Charges,
            Some(CallKind::Lookup) => RefusalScope::Job,
        };
        self.refuse_blocked(block, scope, now, |waiter| {
            kind.is_none_or(|kind| kind == waiter.scope.kind) && !waiter.accepts(block.until, stalled_since, now)
        });
    }
}
