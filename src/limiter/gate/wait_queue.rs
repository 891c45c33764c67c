//! The line before the gate: who waits, in which order, and who has waited long enough.
//!
//! Refuses to overtake: a want that cannot be granted holds those behind it, so that a costly job is not starved by them, as
//! long as it waits. Other processes have lines of their own, and can overtake it while they take what comes free. One whose
//! own account or reference refuses steps aside until that is over, and holds nobody.

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

/// How long a job of a blocked account is sent away before it is looked at again.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// Whose calls a permit is counted with, apart from everybody's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct CountingScope {
    pub kind: Option<CallKind>,
    pub account: Option<String>,
    /// A digest; references are long and not ours to keep.
    pub reference: Option<String>,
}

impl CountingScope {
    pub fn kind(&self) -> CallKind {
        self.kind.unwrap_or(CallKind::Charge)
    }

    /// The subjects that count a new permit.
    ///
    /// # Errors
    /// [`Blocked`] by a rule on the account: there must be none.
    pub fn subjects(&self, spec: &QuotaSpec) -> Result<Vec<Subject>, Blocked> {
        spec.subjects(self.account.as_deref(), self.reference.as_deref())
    }

    /// The subjects that count what was granted before; an account that was blocked meanwhile is counted nowhere any more.
    pub fn subjects_to_release(&self, spec: &QuotaSpec) -> Vec<Subject> {
        self.subjects(spec).unwrap_or_default()
    }
}

/// Somebody who wants a permit.
#[derive(Debug)]
pub(super) struct PermitWaiter {
    /// Whose place may be asked for.
    pub job: Option<JobId>,
    pub cost: u32,
    pub priority: u8,
    pub scope: CountingScope,
    /// As the job has it, for the ledger.
    pub reference: Option<String>,
    /// Will not wait in hand beyond this.
    pub wait_until: Instant,
    pub reply: oneshot::Sender<AcquireResult>,
    /// Refused by a limit of its own until then.
    pub deferral: Option<Deferral>,
}

/// Why a waiter steps aside, and until when.
#[derive(Clone, Debug)]
pub(super) struct Deferral {
    pub until: Instant,
    pub reason: BlockReason,
    pub exact: bool,
    /// What the limit counts together; those who come later of the same stay behind.
    pub counted_with: Option<(Scope, AppliesTo)>,
}

impl PermitWaiter {
    /// Whether it stands aside for a limit that counts the other one with it.
    fn defers(&self, later: &CountingScope) -> bool {
        let Some((scope, applies_to)) = self.deferral.as_ref().and_then(|aside| aside.counted_with) else {
            return false;
        };
        let of_one = match scope {
            Scope::Provider => false,
            Scope::Account => self.scope.account == later.account,
            Scope::Reference => self.scope.reference == later.reference,
        };
        of_one && (applies_to == AppliesTo::All || self.scope.kind() == later.kind())
    }

    /// When it is worth asking for; `None`: now.
    fn ready_at(&self, kinds: &BlocksByKind) -> Option<Instant> {
        let of_kind = kinds.get(&self.scope.kind()).map(|standing| standing.retry_at);
        self.deferral.as_ref().map(|aside| aside.until).max(of_kind)
    }
}

/// Place in line: higher priority first, then first come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueKey {
    priority_reversed: u8,
    arrival: u64,
}

/// Neighbours in line who want the same.
#[derive(Debug)]
pub(super) struct RequestBatch {
    pub request: PermitRequest,
    pub scope: CountingScope,
    /// As the first job has it.
    pub reference: Option<String>,
    /// What holds slots of its own account or reference.
    pub subject_counters: Vec<CounterSpec>,
    pub keys: Vec<QueueKey>,
}

#[derive(Debug, Default)]
pub(super) struct WaitQueue {
    waiters: Waiters,
    arrivals: u64,
}

impl WaitQueue {
    /// Joins, unless the spec can never admit it; returns its place if it need not step aside.
    pub fn enqueue(&mut self, waiter: PermitWaiter, spec: &QuotaSpec, now: Instant) -> Option<QueueKey> {
        let waiter = refuse_inadmissible(waiter, spec)?;
        self.arrivals += 1;
        let place = QueueKey { priority_reversed: u8::MAX - waiter.priority, arrival: self.arrivals };
        let held_by = self.longest_earlier_deferral(place, &waiter.scope).cloned();
        self.waiters.insert(place, waiter);
        match held_by {
            Some(aside) => {
                self.defer(place, &aside, now);
                None
            }
            None => Some(place),
        }
    }

    /// The longest wait of those before this place who stand aside for what counts its bearer as well.
    fn longest_earlier_deferral(&self, place: QueueKey, of: &CountingScope) -> Option<&Deferral> {
        let elders =
            self.waiters.deferred_ahead_of(..place).filter(|elder| !elder.reply.is_closed() && elder.defers(of));
        elders.filter_map(|elder| elder.deferral.as_ref()).max_by_key(|aside| aside.until)
    }

    /// Under another spec: what stood aside may pass now, and what waited may never.
    pub fn apply_spec(&mut self, spec: &QuotaSpec) {
        for (place, mut waiter) in std::mem::take(&mut self.waiters) {
            waiter.deferral = None;
            if let Some(waiter) = refuse_inadmissible(waiter, spec) {
                self.waiters.insert(place, waiter);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets those who have gone away, now and then; nobody asks for them meanwhile.
    pub fn sweep_cancelled(&mut self) {
        self.waiters.sweep_if_due();
    }

    /// The first in line who do not stand aside, as many as there is room for, for one call.
    pub fn next_batches(
        &mut self,
        spec: &QuotaSpec,
        kinds: &BlocksByKind,
        room: u32,
        now: Instant,
    ) -> Vec<RequestBatch> {
        let mut groups: Vec<RequestBatch> = Vec::new();
        self.waiters.resume_if(|aside| aside.until <= now);
        let present = self.waiters.iter().filter(|(_, waiter)| !waiter.reply.is_closed());
        let ready = present.filter(|(_, waiter)| waiter.ready_at(kinds) <= Some(now));
        for (place, waiter) in ready.take(BATCH_MAX.min(usize::try_from(room).unwrap_or(BATCH_MAX))) {
            match groups.last_mut() {
                Some(group) if group.scope == waiter.scope && group.request.cost == waiter.cost => {
                    group.request.permits += 1;
                    group.keys.push(*place);
                }
                _ => {
                    // One who is blocked by now is told so when the settings are followed.
                    let Ok(subjects) = waiter.scope.subjects(spec) else { continue };
                    let (of, cost, kind) = (waiter.scope.clone(), waiter.cost, waiter.scope.kind());
                    let own_cells = subjects.iter().flat_map(|subject| spec.subject_counters(subject));
                    let own_cells = own_cells.filter(|cell| cell.is_held() && cell.applies(kind)).collect();
                    let want = PermitRequest { permits: 1, cost, kind, subjects };
                    let reference = waiter.reference.clone();
                    groups.push(RequestBatch {
                        request: want,
                        scope: of,
                        reference,
                        subject_counters: own_cells,
                        keys: vec![*place],
                    });
                }
            }
        }
        if groups.is_empty() {
            self.waiters.sweep_all();
        }
        groups
    }

    /// When somebody who must wait may be asked for again; `None`: somebody may be now, or nobody is there.
    pub fn ready_at(&self, kinds: &BlocksByKind) -> Option<Instant> {
        let mut earliest = None;
        for (_, waiter) in self.waiters.iter() {
            let at = waiter.ready_at(kinds)?;
            earliest = Some(earliest.map_or(at, |known: Instant| known.min(at)));
        }
        earliest
    }

    /// The first of those who may be asked for.
    pub fn first_ready(&self, kinds: &BlocksByKind, now: Instant) -> Option<QueueKey> {
        self.waiters.iter().find(|(_, waiter)| waiter.ready_at(kinds) <= Some(now)).map(|(place, _)| *place)
    }

    pub fn remove(&mut self, place: QueueKey) -> Option<PermitWaiter> {
        self.waiters.remove(place)
    }

    /// Steps aside, or is refused if that takes too long; not asked for before those who came earlier.
    pub fn defer(&mut self, place: QueueKey, aside: &Deferral, now: Instant) {
        let Some(waiter) = self.waiters.get(place) else { return };
        let aside = self
            .longest_earlier_deferral(place, &waiter.scope)
            .filter(|elder| elder.until > aside.until)
            .unwrap_or(aside)
            .clone();
        if waiter.wait_until >= aside.until {
            self.waiters.defer(place, aside);
        } else if let Some(waiter) = self.waiters.remove(place) {
            refuse(waiter, aside.until.saturating_duration_since(now), aside.exact, &aside.reason, RefusalScope::Job);
        }
    }

    /// Those who stood aside for a history stand in line again.
    pub fn resume_after_history(&mut self) {
        self.waiters.resume_if(|aside| aside.reason == BlockReason::NeedsHistory);
    }

    /// Stays in line, but is not asked for before this.
    pub fn defer_until(&mut self, place: QueueKey, until: Instant) {
        let by = BlockReason::StoreUnavailable("its clock was not compared for too long".to_owned());
        self.waiters.defer(place, Deferral { until, reason: by, exact: false, counted_with: None });
    }

    /// Where a job stands, and what it waits for: something of its own, its kind's standing, or everybody's.
    pub fn position_of(
        &self,
        job: &JobId,
        standing: Option<&QueueBlock>,
        kinds: &BlocksByKind,
    ) -> Option<QueuePosition> {
        let (place, waiter) = self.waiters.iter().find(|(_, waiter)| waiter.job.as_ref() == Some(job))?;
        let goes_first = |elder: &&PermitWaiter| {
            let has_gone = elder.reply.is_closed();
            !has_gone && (elder.deferral.is_none() || elder.defers(&waiter.scope))
        };
        let (mut before, mut cost_before) = (0, 0);
        for elder in self.waiters.ahead_of(..*place).filter(goes_first) {
            before += 1;
            cost_before += u64::from(elder.cost);
        }
        let aside = waiter.deferral.as_ref().map(|aside| (aside.reason.clone(), aside.until, aside.exact));
        let of_its_own = aside.is_some();
        let line =
            standing.or_else(|| kinds.get(&waiter.scope.kind())).map(|it| (it.reason.clone(), it.until, it.exact));
        Some(QueuePosition {
            jobs_ahead: before,
            cost_ahead: cost_before,
            block: aside.or(line),
            is_own_limit: of_its_own,
        })
    }

    /// When the next of them will have waited long enough.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiters.first_deadline()
    }

    /// Whether the first in line wants more than somebody behind it, more than there is, and will not wait for it. Then it goes,
    /// with all who want as much and are no more patient, and those behind may have what there is. Their lane need not rest for
    /// that.
    pub fn evict_oversized(&mut self, first: QueueKey, standing: &QueueBlock, now: Instant) -> bool {
        let QueueBlock { reason: by, until, exact, .. } = standing;
        let goes = |waiter: &&PermitWaiter| waiter.cost > 1 && waiter.wait_until < *until;
        let Some(cost) = self.waiters.get(first).filter(goes).map(|waiter| waiter.cost) else { return false };
        if !self.waiters.iter().any(|(_, other)| other.cost < cost && other.deferral.is_none()) {
            return false;
        }
        for place in self.waiters.expiring_before(*until) {
            if self.waiters.get(place).is_some_and(|waiter| waiter.cost >= cost)
                && let Some(waiter) = self.waiters.remove(place)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, by, RefusalScope::Job);
            }
        }
        true
    }

    /// Refuses everybody, or everybody of a kind, who would have to wait beyond their time. What refuses look-ups alone says
    /// nothing of the charges, which are what a lane takes.
    pub fn refuse_expiring(&mut self, standing: &QueueBlock, kind: Option<CallKind>, now: Instant) {
        let QueueBlock { reason: by, until, exact, .. } = standing;
        let concerns = match kind {
            None => RefusalScope::All,
            Some(CallKind::Charge) => RefusalScope::Charges,
            Some(CallKind::Lookup) => RefusalScope::Job,
        };
        for place in self.waiters.expiring_before(*until) {
            let concerned = |waiter: &PermitWaiter| kind.is_none_or(|kind| kind == waiter.scope.kind());
            if self.waiters.get(place).is_some_and(concerned)
                && let Some(waiter) = self.waiters.remove(place)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, by, concerns);
            }
        }
    }
}

/// Those whose account is blocked, and those whose cost no window can ever admit, are told so.
fn refuse_inadmissible(waiter: PermitWaiter, spec: &QuotaSpec) -> Option<PermitWaiter> {
    let Ok(subjects) = waiter.scope.subjects(spec) else {
        let account = waiter.scope.account.clone().unwrap_or_default();
        refuse(waiter, BLOCKED_WAIT, false, &BlockReason::AccountBlocked { account }, RefusalScope::Job);
        return None;
    };
    // A quota that is closed for now is waited for, and any other admits one.
    if waiter.cost > 1
        && let Some((limit, at_once)) = spec.tightest_limit(waiter.scope.kind(), &subjects)
        && at_once > 0
        && waiter.cost > at_once
    {
        refuse(waiter, Duration::ZERO, true, &BlockReason::Oversized { limit, max_cost: at_once }, RefusalScope::Job);
        return None;
    }
    Some(waiter)
}

fn refuse(waiter: PermitWaiter, wait: Duration, exact: bool, by: &BlockReason, concerns: RefusalScope) {
    let never = matches!(by, BlockReason::Oversized { .. });
    let retry_after = if never { Duration::ZERO } else { wait.max(Duration::from_millis(1)) };
    // Whoever has gone away needs no answer.
    let _ = waiter.reply.send(AcquireResult::Refused(GateRefusal {
        retry_after,
        exact,
        reason: by.clone(),
        scope: concerns,
    }));
}
