//! A job that waits for a permit: what its permit counts against, how long it waits, and why it is deferred or refused.
//!
//! A waiter that a limit of its own account or reference refuses is deferred, and later ones that the limit counts
//! with it. So is one that costs more than a limit of the provider has free, with those that cost as much. One whose
//! account is blocked by a rule, or whose cost no window can admit, is refused as soon as it arrives.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::domain::job::JobId;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::{CallKind, Subject};
use crate::domain::quota_spec::{Blocked, CounterSpec, QuotaSpec};
use crate::limiter::gate::block::BlocksByKind;
use crate::limiter::gate::egress::{EgressRequest, ReleaseWait};
use crate::limiter::gate::{AcquireRequest, BlockReason, GateRefusal, RefusalScope};

/// Wait of a job whose account is blocked.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);
/// Longest time for which a waiter that costs more than is free holds back cheaper ones behind it. Their slots would keep
/// it waiting where a limit's window is short; where it is long, they would wait beside free slots.
pub(super) const COST_HOLD_MAX: Duration = Duration::from_secs(3);
/// How much longer than for other limits of their account the first waiters of an account wait for a slot in flight. It
/// is free as soon as a request ends, so they start sooner than jobs that return to the ledger and are claimed again.
pub(super) const RELEASE_WAIT: Duration = Duration::from_millis(1_750);
/// Most such waiters of an account, and no more than its lane has worker slots: the others leave the lane's places to
/// other accounts.
pub(super) const RELEASE_WAITERS_MAX: usize = 16;

/// The kind, account and reference with which a permit is counted, besides the provider's limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CountingScope {
    pub kind: CallKind,
    pub account: Option<Arc<str>>,
    /// A digest, because references are long and belong to the merchant.
    pub reference: Option<Arc<str>>,
}

impl CountingScope {
    /// The subjects that count a new permit.
    ///
    /// # Errors
    /// [`Blocked`]: a rule blocks the account, or refuses its charges, so it must get no permit.
    pub fn subjects(&self, spec: &QuotaSpec) -> Result<Vec<Subject>, Blocked> {
        if self.kind == CallKind::Charge && spec.refuses_charges_of(self.account.as_deref()) {
            return Err(Blocked);
        }
        spec.subjects(self.account.as_deref(), self.reference.as_deref())
    }

    /// The subjects that count a permit that was granted before. An account that was blocked since is not counted any
    /// more.
    pub fn subjects_to_release(&self, spec: &QuotaSpec) -> Vec<Subject> {
        spec.subjects(self.account.as_deref(), self.reference.as_deref()).unwrap_or_default()
    }
}

/// A job that waits for a permit.
#[derive(Debug)]
pub(crate) struct PermitWaiter<T> {
    /// The job whose position can be queried.
    pub job: Option<JobId>,
    pub cost: u32,
    pub priority: u8,
    pub scope: CountingScope,
    /// The job's reference, for queries of the ledger.
    pub reference: Option<Arc<str>>,
    /// The waiter is refused if its permit would start later than this.
    pub wait_until: Instant,
    /// A block of the queue that lasts no longer is never refused.
    pub accepted_wait: Duration,
    /// The waiter is refused if a limit of its account, or its cost, makes it wait longer than this; `None`: never for
    /// that. For a slot in flight, the first ones wait [`RELEASE_WAIT`] longer.
    pub account_wait_until: Option<Instant>,
    /// The worker slot that it takes with its permit.
    pub egress: Option<EgressRequest>,
    pub ticket: T,
    /// Set while a limit of its own refuses it.
    pub(super) deferral: Option<Deferral>,
    /// Set from its first deferral by a limit of its own that counts requests in flight until it leaves the queue or
    /// waits for something else. So it counts as such also while the limiter is asked for it again.
    pub(super) release_wait: Option<ReleaseWait>,
    /// Since when it holds back cheaper ones, or last did, because too few slots were free for it.
    pub(super) holds_since: Option<Instant>,
    /// A limit of its account has deferred it, now or before.
    pub(in crate::limiter::gate) waited_for_account: bool,
    /// Set by the queue.
    pub(in crate::limiter::gate) counted: Arc<CountedSubjects>,
}

/// The subjects that count a waiter's permit, and their counters.
#[derive(Debug, Default)]
pub(crate) struct CountedSubjects {
    pub subjects: Vec<Subject>,
    pub held_counters: Vec<CounterSpec>,
    /// The limits of the subjects that may refuse the permit.
    pub enforced: Vec<EnforcedLimit>,
}

/// A limit of an account or a reference that may refuse a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EnforcedLimit {
    /// Index of the subject.
    pub subject: usize,
    /// Index of the limit in the spec.
    pub limit: usize,
}

/// Why a waiter is deferred, and until when.
#[derive(Clone, Debug)]
pub(crate) struct Deferral {
    pub until: Instant,
    pub reason: BlockReason,
    pub exact: bool,
    /// The limit counts requests in flight, so a release may end it at any time.
    pub ends_by_release: bool,
    /// What the limit counts together; later waiters that it counts with this one are deferred too.
    pub counted_with: Option<(Scope, AppliesTo)>,
    /// A limit of the provider has too few free slots for its cost.
    pub is_by_cost: bool,
}

impl Deferral {
    /// Whether its limit counts the two together.
    pub fn counts_together(&self, one: &CountingScope, other: &CountingScope) -> bool {
        let Some((scope, applies_to)) = self.counted_with else { return false };
        let is_same_subject = match scope {
            Scope::Provider => false,
            Scope::Account => one.account == other.account,
            Scope::Reference => one.reference == other.reference,
        };
        is_same_subject && (applies_to == AppliesTo::All || one.kind == other.kind)
    }

    /// Whether a waiter that is deferred like this waits at least as long by the same limit.
    pub fn includes(&self, other: &Self) -> bool {
        self.until >= other.until && self.reason == other.reason && self.counted_with == other.counted_with
    }

    pub fn is_by_account_limit(&self) -> bool {
        matches!((&self.reason, self.counted_with), (BlockReason::Limit(_), Some((Scope::Account, _))))
    }
}

impl<T> PermitWaiter<T> {
    /// The request of a job at this instant.
    pub fn new(request: AcquireRequest, ticket: T, now: Instant) -> Self {
        let AcquireRequest { job, cost, kind, priority, account, reference, .. } = request;
        Self {
            job,
            cost,
            priority,
            scope: CountingScope { kind, account, reference: reference.as_deref().map(digest) },
            reference,
            wait_until: request.wait_until,
            accepted_wait: request.accepted_wait,
            account_wait_until: now.checked_add(request.account_wait),
            egress: request.egress,
            ticket,
            deferral: None,
            release_wait: None,
            holds_since: None,
            waited_for_account: false,
            counted: Arc::default(),
        }
    }

    /// Whether it is deferred by a limit that also counts the later waiter.
    pub fn defers(&self, later: &CountingScope) -> bool {
        self.deferral.as_ref().is_some_and(|own| own.counts_together(&self.scope, later))
    }

    /// Whether it waits until then, since the queue stalled at `stalled_since`.
    pub fn accepts(&self, until: Instant, stalled_since: Instant, now: Instant) -> bool {
        let is_in_time = self.egress.as_ref().is_none_or(|egress| now < egress.wait_until);
        until <= self.wait_until || (is_in_time && until <= stalled_since + self.accepted_wait)
    }

    /// Whether it waits for the end of its own deferral; `is_first`: it is among the first of its account that wait.
    pub fn accepts_deferral(&self, deferral: &Deferral, is_first: bool, now: Instant) -> bool {
        let longer = if deferral.ends_by_release && is_first { RELEASE_WAIT } else { Duration::ZERO };
        let in_time = self.account_wait_until.is_none_or(|latest| deferral.until <= latest + longer);
        (in_time || !deferral.is_by_account_limit() && !deferral.is_by_cost) && self.accepts(deferral.until, now, now)
    }

    /// Whether it leaves its lane before the later waiter does.
    pub fn leaves_before(&self, later: &Self) -> bool {
        let (Some(own), Some(other)) = (&self.egress, &later.egress) else { return false };
        own.rule == other.rule && Arc::ptr_eq(&own.lane, &other.lane)
    }

    /// When the limiter is to be asked for it; `None`: now.
    pub(in crate::limiter::gate) fn ready_at(&self, kinds: &BlocksByKind) -> Option<Instant> {
        let kind_retry_at = kinds.get(&self.scope.kind).map(|block| block.retry_at);
        self.deferral.as_ref().map(|deferral| deferral.until).max(kind_retry_at)
    }
}

impl CountedSubjects {
    /// The subjects that count a waiter, or why the limiter is not called for it: its account is blocked, or no window
    /// can ever admit its cost.
    pub(super) fn of<T>(waiter: &PermitWaiter<T>, spec: &QuotaSpec) -> Result<Self, BlockReason> {
        let kind = waiter.scope.kind;
        let Ok(subjects) = waiter.scope.subjects(spec) else {
            let account = waiter.scope.account.as_deref().unwrap_or_default().to_owned();
            return Err(BlockReason::AccountBlocked { account });
        };
        // Every open limit admits a cost of 1. Jobs wait while a limit is closed (0).
        if waiter.cost > 1
            && let Some((limit, max_cost)) = spec.tightest_limit(kind, &subjects)
            && max_cost > 0
            && waiter.cost > max_cost
        {
            return Err(BlockReason::Oversized { limit, max_cost });
        }
        let (mut held_counters, mut enforced) = (Vec::new(), Vec::new());
        for (subject, own) in subjects.iter().enumerate() {
            let counters = own.limits.iter().zip(spec.subject_counters(own));
            for (limit, counter) in counters.filter(|(_, counter)| counter.applies(kind)) {
                if !counter.shadow {
                    enforced.push(EnforcedLimit { subject, limit: limit.index });
                }
                if counter.is_held() {
                    held_counters.push(counter);
                }
            }
        }
        Ok(Self { subjects, held_counters, enforced })
    }
}

pub(super) fn inadmissible_refusal(reason: BlockReason) -> GateRefusal {
    if matches!(reason, BlockReason::Oversized { .. }) {
        return GateRefusal { retry_after: Duration::ZERO, exact: true, reason, scope: RefusalScope::Job };
    }
    GateRefusal { retry_after: BLOCKED_WAIT, exact: false, reason, scope: RefusalScope::Account }
}

pub(super) fn refusal_for(wait: Duration, exact: bool, reason: &BlockReason, scope: RefusalScope) -> GateRefusal {
    GateRefusal { retry_after: wait.max(Duration::from_millis(1)), exact, reason: reason.clone(), scope }
}

/// 128 bits of SHA-256: two references that share it would only share a limit.
fn digest(reference: &str) -> Arc<str> {
    hex::encode(&Sha256::digest(reference.as_bytes())[..16]).into()
}
