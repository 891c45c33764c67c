//! Protocol of the limiter: one call and its reply, shared by the functions in Redis, their Rust counterpart and the
//! gate. And the releases of ended permits, grouped for one call.
//!
//! The decisions are in [`super::quota`], and the numbers of a limit in [`super::quota_spec`].
//!
//! Permits that ended alike are one release. Responses of one millisecond share the age of the youngest, so that no
//! slot is freed too early. Unused permits share their slots' instants. The order does not depend on chance: the log
//! takes responses oldest first.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use super::limit::AppliesTo;
use super::time::Micros;

/// Most groups of permit requests, most releases, and most past uses in one call.
pub const BATCH_MAX: usize = 1_000;

/// Most permits of one group of permit requests.
pub const PERMITS_MAX: u32 = 1_000;

/// Identity of a caller: one process's gate, for its lifetime. Below 2^48.
pub type Incarnation = u64;

/// Purpose of a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CallKind {
    Charge,
    Lookup,
}

impl CallKind {
    pub fn is_counted_by(self, applies_to: AppliesTo) -> bool {
        match applies_to {
            AppliesTo::All => true,
            AppliesTo::Charge => self == Self::Charge,
            AppliesTo::Lookup => self == Self::Lookup,
        }
    }
}

/// An account or a reference whose calls are counted separately, with the limits that count them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// Unique within the quota, safe as a part of a key.
    pub key: String,
    pub limits: Vec<SubjectLimit>,
}

/// One limit as it applies to one subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubjectLimit {
    /// Index of the limit in the spec.
    pub index: usize,
    pub max_requests: u32,
    pub window: Duration,
    /// Burst of the limit, or of the subject's own rule.
    pub burst: Option<u32>,
    /// A rule exempts the subject. Its calls are counted all the same, as for a shadow limit: when the rule is removed,
    /// earlier calls count.
    pub exempt: bool,
}

/// Permits that are requested on the same terms, next to each other in the wait queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRequest {
    pub permits: u32,
    /// Cost of each permit at every limit.
    pub cost: u32,
    pub kind: CallKind,
    /// At most one account and one reference, each with at least one limit.
    pub subjects: Vec<Subject>,
}

impl PermitRequest {
    /// Charges without a counted account or reference.
    pub fn charges(permits: u32, cost: u32) -> Self {
        Self { permits, cost, kind: CallKind::Charge, subjects: Vec::new() }
    }
}

/// Release of permits that an earlier call of the same incarnation granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRelease {
    /// Number of the call that granted them.
    pub call: u64,
    pub cost: u32,
    pub kind: CallKind,
    /// The subjects that they were granted for.
    pub subjects: Vec<Subject>,
    pub release_kind: ReleaseKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseKind {
    /// The response was read this long before the call departed.
    Used { age: Duration },
    /// No request was sent. Each slot returns with the instant that it had, one per provider limit of the call's spec.
    Unused { origins: Vec<SlotInstant> },
}

/// Instant of a slot's last response, in milliseconds of the limiter's clock; 0 for a slot that needs no wait.
pub type SlotInstant = u64;

/// Requests in the ledger that ended together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastUse {
    /// Time since their end, rounded down.
    pub age: Duration,
    pub cost: CostByKind,
}

/// Usage from the ledger that may still count at the provider, for a limiter that lost its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebuildData {
    /// Epoch of the state that is rebuilt. A state that was lost again since has another epoch.
    pub state_epoch: Micros,
    /// At most [`BATCH_MAX`], in any order.
    pub ended: Vec<PastUse>,
    /// Cost of requests that may be in flight now.
    pub in_flight: CostByKind,
}

/// Usage of one account or reference, or of all calls, from the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageHistory {
    /// Instant by the limiter's clock. When the ledger was read, no permit granted before could begin any more.
    pub as_of: Micros,
    /// Uses that ended longer ago are left out.
    pub within: Duration,
    /// In any order.
    pub ended: Vec<PastUse>,
    /// Cost of requests that may be in flight now.
    pub in_flight: CostByKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectHistory {
    pub subject: Subject,
    pub history: UsageHistory,
}

/// Usage from the ledger for counters whose past the limiter did not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSeeds {
    /// Epoch of the state that asked for the seeds; other states ignore them.
    pub state_epoch: Micros,
    /// Usage of the limits on all calls.
    pub provider: Option<UsageHistory>,
    /// At most [`BATCH_MAX`] past uses, including those of the provider.
    pub subjects: Vec<SubjectHistory>,
}

impl CounterSeeds {
    /// Number of past uses in all histories.
    pub fn past_use_count(&self) -> usize {
        let histories = self.provider.iter().chain(self.subjects.iter().map(|seed| &seed.history));
        histories.map(|history| history.ended.len()).sum()
    }
}

/// Cost of requests by kind. A limit on one kind counts only that kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CostByKind {
    pub charges: u32,
    pub lookups: u32,
}

impl CostByKind {
    pub fn charges(charges: u32) -> Self {
        Self { charges, lookups: 0 }
    }

    /// The cost that a limit counts.
    pub fn counted_by(self, applies_to: AppliesTo) -> u32 {
        match applies_to {
            AppliesTo::All => self.charges.saturating_add(self.lookups),
            AppliesTo::Charge => self.charges,
            AppliesTo::Lookup => self.lookups,
        }
    }
}

/// One call: acquires permits and releases earlier ones, both or neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimiterCall {
    pub incarnation: Incarnation,
    /// Counts from 1, one higher for each new call. A repeat has the number of the call whose reply was lost.
    pub number: u64,
    /// In the order of the wait queue. The granted ones are a prefix, except for requests that their own account or
    /// reference refuses.
    pub requests: Vec<PermitRequest>,
    pub releases: Vec<PermitRelease>,
    /// The provider named a wait: no permit starts before it has passed.
    pub pause: Option<Duration>,
    pub rebuild: Option<RebuildData>,
    pub seeds: Option<CounterSeeds>,
    /// The clock stepped under the state with this epoch: the state must be discarded.
    pub invalidate_epoch: Option<Micros>,
    /// How far ahead starts are booked, at most [`BOOKING_HORIZON`](super::provider::BOOKING_HORIZON). What is booked,
    /// no more urgent job can get.
    pub look_ahead: Duration,
    /// Identity of the store's process. If it changed, the state must be discarded.
    pub run_id: String,
}

/// Permits of one call with the same start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitGrant {
    /// Index among the call's requests.
    pub request_index: usize,
    pub permits: u32,
    /// Time until the start, from the reply's arrival.
    pub wait_us: u64,
    /// Per provider limit, the youngest instant among the acquired slots, needed to release them unused.
    pub origins: Vec<SlotInstant>,
}

/// Rest of a request whose own account, reference or kind of call has no slot, or that costs more than this worker's
/// share. Requests behind it were served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedRequest {
    pub request_index: usize,
    /// Index of the limit in the spec.
    pub limit: usize,
    pub wait_us: u64,
    pub exact: bool,
    pub shortage: Shortage,
}

/// Reason why a limit has no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// All slots are used.
    NoSlot,
    /// The limiter did not count the limit's past. The wait applies if the history cannot be read.
    NeedsHistory {
        /// Time until the ledger knows all of it, in microseconds from the reply.
        readable_in_us: u64,
    },
}

/// Reason why the remaining requests were not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The limit at this index of the spec has no slot within the booking horizon.
    Limit { index: usize },
    /// The limiter did not count the past of the limit at this index; see [`Shortage::NeedsHistory`].
    NeedsHistory { index: usize, readable_in_us: u64 },
    /// State was lost: no permit is granted until the wait has passed or the state is rebuilt from the ledger.
    Cold,
    /// The provider named a wait.
    Paused,
    /// The caller's settings are older than the store's: reload them.
    StaleVersion,
    /// The limiter has seen a later call of the same incarnation.
    StaleCall,
}

/// Reply to one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimiterReply {
    /// The limiter's clock.
    pub now: Micros,
    /// The newest settings version that the limiter knows.
    pub version: i64,
    /// Instant at which the limiter's state began.
    pub state_epoch: Micros,
    /// Calls of the state so far, including this one. A lower number than in an earlier reply means that a backup was
    /// restored.
    pub calls: u64,
    /// Number of the caller's call before this one, as the state has it; 0: it has none.
    pub previous_call: u64,
    pub grants: Vec<PermitGrant>,
    pub skipped: Vec<SkippedRequest>,
    /// Permits that can certainly start now under the tightest of the provider's limits; more may be due.
    pub remaining: u64,
    /// Index of the limit that has the least remaining, or that refuses.
    pub deciding_limit: usize,
    /// Time until all of that limit is free again, if requests in flight get their response now and nothing else is
    /// granted.
    pub reset_us: u64,
    /// Present if not all requests were granted.
    pub refused: Option<LimiterRefusal>,
}

/// Refusal with its wait, in microseconds from the reply, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimiterRefusal {
    pub reason: RefusalReason,
    pub wait_us: u64,
    /// Whether the next permit starts exactly then; otherwise that is the earliest possible start.
    pub exact: bool,
}

impl LimiterReply {
    pub fn permits(&self) -> u64 {
        self.grants.iter().map(|grant| u64::from(grant.permits)).sum()
    }
}

/// One ended permit; `O` identifies its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedPermit<O> {
    /// The call that granted it.
    pub call: u64,
    pub holder: O,
    pub cost: u32,
    pub release_kind: ReleaseKind,
}

#[derive(PartialEq, Eq, Hash)]
enum ReleaseGroup {
    AgeMs(u128),
    Origins(Vec<SlotInstant>),
}

/// Groups the releases: responses first, oldest first, then unused permits. `counted` returns the kind and subjects of
/// a holder.
pub fn group_releases<O: Clone + Eq + Hash>(
    ended: impl IntoIterator<Item = EndedPermit<O>>,
    counted: impl Fn(&O) -> (CallKind, Vec<Subject>),
) -> Vec<PermitRelease> {
    let mut indices: HashMap<(u64, O, ReleaseGroup), usize> = HashMap::new();
    let mut releases: Vec<PermitRelease> = Vec::new();
    for EndedPermit { call, holder, cost, release_kind } in ended {
        let group = match &release_kind {
            ReleaseKind::Used { age } => ReleaseGroup::AgeMs(age.as_millis()),
            ReleaseKind::Unused { origins } => ReleaseGroup::Origins(origins.clone()),
        };
        let index = *indices.entry((call, holder.clone(), group)).or_insert(releases.len());
        let Some(release) = releases.get_mut(index) else {
            let (kind, subjects) = counted(&holder);
            releases.push(PermitRelease { call, cost, kind, subjects, release_kind });
            continue;
        };
        release.cost = release.cost.saturating_add(cost);
        let group_kind = &mut release.release_kind;
        if let (ReleaseKind::Used { age: youngest }, ReleaseKind::Used { age }) = (group_kind, release_kind) {
            *youngest = age.min(*youngest);
        }
    }
    releases.sort_by_key(|release| Reverse(sort_key(release)));
    releases
}

fn sort_key(release: &PermitRelease) -> (bool, Duration, u64) {
    match release.release_kind {
        ReleaseKind::Used { age } => (true, age, release.call),
        ReleaseKind::Unused { .. } => (false, Duration::ZERO, release.call),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(us: u64) -> ReleaseKind {
        ReleaseKind::Used { age: Duration::from_micros(us) }
    }

    fn unused(origin: SlotInstant) -> ReleaseKind {
        ReleaseKind::Unused { origins: vec![origin] }
    }

    #[test]
    fn equal_releases_are_grouped() {
        // Ended permits as call, holder, cost and release kind; then the expected releases.
        for (what, ended, expected) in [
            (
                "one millisecond, the youngest age",
                vec![(1, 'a', 1, used(2_900)), (1, 'a', 2, used(2_100))],
                vec![(1, 'a', 3, used(2_100))],
            ),
            (
                "another millisecond, oldest first",
                vec![(1, 'a', 1, used(2_999)), (1, 'a', 1, used(3_000))],
                vec![(1, 'a', 1, used(3_000)), (1, 'a', 1, used(2_999))],
            ),
            (
                "of two calls",
                vec![(1, 'a', 1, used(2_100)), (2, 'a', 1, used(2_500))],
                vec![(2, 'a', 1, used(2_500)), (1, 'a', 1, used(2_100))],
            ),
            (
                "of two",
                vec![(1, 'a', 1, used(2_100)), (1, 'b', 1, used(2_100))],
                vec![(1, 'a', 1, used(2_100)), (1, 'b', 1, used(2_100))],
            ),
            (
                "equal returns",
                vec![(1, 'a', 1, unused(7)), (1, 'a', 2, unused(7)), (1, 'a', 1, unused(8))],
                vec![(1, 'a', 3, unused(7)), (1, 'a', 1, unused(8))],
            ),
            (
                "returns last",
                vec![(9, 'a', 1, unused(7)), (1, 'a', 1, used(0))],
                vec![(1, 'a', 1, used(0)), (9, 'a', 1, unused(7))],
            ),
            (
                "more than can be counted",
                vec![(1, 'a', u32::MAX, used(1)), (1, 'a', 1, used(1))],
                vec![(1, 'a', u32::MAX, used(1))],
            ),
        ] {
            let one = |(call, holder, cost, release_kind)| EndedPermit { call, holder, cost, release_kind };
            let subject = |holder: &char| Subject { key: holder.to_string(), limits: Vec::new() };
            let found = group_releases(ended.into_iter().map(one), |holder| (CallKind::Charge, vec![subject(holder)]));
            let expected: Vec<PermitRelease> = expected
                .into_iter()
                .map(|(call, holder, cost, release_kind)| PermitRelease {
                    call,
                    cost,
                    kind: CallKind::Charge,
                    subjects: vec![subject(&holder)],
                    release_kind,
                })
                .collect();
            assert_eq!(found, expected, "{what}");
        }
    }
}
