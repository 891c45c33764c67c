//! What one call to the limiter says and what it is told: the same words for the functions in Redis, their Rust twin and the gate.
//!
//! Refuses to decide; [`super::quota`] does. What a limit means in numbers is [`super::quota_spec`].

use std::time::Duration;

use super::limit::AppliesTo;
use super::time::Micros;

/// Most groups of wants, most settlements, and most past uses in one call.
pub const BATCH_MAX: usize = 1_000;

/// Most permits of one group of wants.
pub const PERMITS_MAX: u32 = 1_000;

/// Who calls: one process's gate, for as long as it lives. Below 2^48.
pub type Incarnation = u64;

/// What a permit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CallKind {
    Charge,
    Lookup,
}

/// An account or a reference whose calls are counted on their own, with the limits that count them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// Unique within the quota, safe as a part of a key.
    pub key: String,
    pub limits: Vec<SubjectLimit>,
}

/// One limit as it holds for one subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SubjectLimit {
    /// Which limit of the spec.
    pub index: usize,
    pub max_requests: u32,
    pub window: Duration,
    /// As of the limit, or of the subject's own rule.
    pub burst: Option<u32>,
    /// A rule lets it pass. It is counted all the same, like a shadow limit: when the rule goes, who was sent under it waits.
    pub exempt: bool,
}

/// Permits wanted on the same terms, next to each other in line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRequest {
    pub permits: u32,
    /// What each of them uses of every limit.
    pub cost: u32,
    pub kind: CallKind,
    /// At most one account and one reference, each with at least one limit.
    pub subjects: Vec<Subject>,
}

impl PermitRequest {
    /// Charges without an account or reference that is counted.
    #[must_use]
    pub fn charges(permits: u32, cost: u32) -> Self {
        Self { permits, cost, kind: CallKind::Charge, subjects: Vec::new() }
    }
}

/// What became of permits granted by an earlier call of the same incarnation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitRelease {
    /// Number of the call that granted them.
    pub call: u64,
    pub cost: u32,
    pub kind: CallKind,
    /// The subjects they were granted for.
    pub subjects: Vec<Subject>,
    pub release_kind: ReleaseKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseKind {
    /// The answer was read this long before the call departed.
    Used { age: Duration },
    /// No request left. Each slot goes back with the instant it had, one per provider limit of the call's spec.
    Unused { origins: Vec<SlotInstant> },
}

/// When a slot was last answered, in milliseconds of the limiter's clock; 0 for a slot that needs no wait.
pub type SlotInstant = u64;

/// Requests that the ledger knows of, which ended together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastUse {
    /// Since their end, rounded down.
    pub age: Duration,
    pub cost: CostByKind,
}

/// What may still count at the provider, by the ledger, for a limiter that lost its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebuildData {
    /// Of the state that is rebuilt: one that was lost again since is another.
    pub state_epoch: Micros,
    /// At most [`BATCH_MAX`]; any order.
    pub ended: Vec<PastUse>,
    /// Of requests that may be on the wire now.
    pub in_flight: CostByKind,
}

/// Uses of one account or reference, or of all calls, by the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageHistory {
    /// By the limiter's clock: when the ledger was read, no permit that was granted before could begin any more.
    pub as_of: Micros,
    /// Uses that ended longer ago are left out.
    pub within: Duration,
    /// Any order.
    pub ended: Vec<PastUse>,
    /// Of requests that may be on the wire now.
    pub in_flight: CostByKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectHistory {
    pub subject: Subject,
    pub history: UsageHistory,
}

/// What counters are told whose past the limiter did not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSeeds {
    /// State that asked for them: any other ignores them.
    pub state_epoch: Micros,
    /// For the limits on all calls.
    pub provider: Option<UsageHistory>,
    /// At most [`BATCH_MAX`] past uses, those of the provider among them.
    pub subjects: Vec<SubjectHistory>,
}

impl CounterSeeds {
    /// Past uses in all of them.
    #[must_use]
    pub fn past_use_count(&self) -> usize {
        let histories = self.provider.iter().chain(self.subjects.iter().map(|seed| &seed.history));
        histories.map(|history| history.ended.len()).sum()
    }
}

/// Cost of requests, by kind: a limit on one kind counts its own alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CostByKind {
    pub charges: u32,
    pub lookups: u32,
}

impl CostByKind {
    #[must_use]
    pub fn charges(charges: u32) -> Self {
        Self { charges, lookups: 0 }
    }

    /// What a limit counts.
    #[must_use]
    pub fn counted_by(self, applies_to: AppliesTo) -> u32 {
        match applies_to {
            AppliesTo::All => self.charges.saturating_add(self.lookups),
            AppliesTo::Charge => self.charges,
            AppliesTo::Lookup => self.lookups,
        }
    }
}

/// One call: take permits, settle earlier ones, both or neither.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimiterCall {
    pub incarnation: Incarnation,
    /// From 1, one higher for each new call. A repeat carries the number of the call whose reply was lost.
    pub number: u64,
    /// First in line first. What is granted of them is a prefix, but for those whose own account or reference refuses.
    pub requests: Vec<PermitRequest>,
    pub releases: Vec<PermitRelease>,
    /// The provider named a wait: nobody starts before it has passed.
    pub pause: Option<Duration>,
    pub rebuild: Option<RebuildData>,
    pub seeds: Option<CounterSeeds>,
    /// The clock of the state that was born at this instant has made a step: nothing in it can be trusted.
    pub invalidate_epoch: Option<Micros>,
    /// Identity of the store's process; another one than before means that the state cannot be trusted.
    pub run_id: String,
}

/// Permits of one call with the same start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitGrant {
    /// Which of the wants.
    pub request_index: usize,
    pub permits: u32,
    /// Start, counted from the reply's arrival.
    pub wait_us: u64,
    /// Per provider limit, the youngest instant among the slots taken, for giving them back unused.
    pub origins: Vec<SlotInstant>,
}

/// What is left of a want whose own account, reference or kind of call has no slot, or that costs more than this worker's
/// share; those behind it were served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedRequest {
    pub request_index: usize,
    /// Which limit of the spec.
    pub limit: usize,
    pub wait_us: u64,
    pub exact: bool,
    pub shortage: Shortage,
}

/// Why a limit has no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// All are used.
    NoSlot,
    /// The limiter did not count its past. The wait is for the case that nobody can tell it.
    NeedsHistory {
        /// When the ledger knows all of it, in microseconds from the reply.
        readable_in_us: u64,
    },
}

/// Why the rest of the wants was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The limit at this index of the spec has no slot within the booking horizon.
    Limit { index: usize },
    /// The limiter did not count the past of the limit at this index; as of [`Shortage::NeedsHistory`].
    NeedsHistory { index: usize, readable_in_us: u64 },
    /// State was lost: nothing is granted until the wait has passed or the ledger has told what may still count.
    Cold,
    /// A provider named a wait.
    Paused,
    /// The caller's settings are older than the store's: reload them.
    StaleVersion,
    /// A later call of the same incarnation has been seen.
    StaleCall,
}

/// The answer to one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimiterReply {
    /// The limiter's clock.
    pub now: Micros,
    /// The newest settings version that the limiter knows.
    pub version: i64,
    /// When the limiter's state began.
    pub state_epoch: Micros,
    /// Calls of the state so far, this one among them: fewer than in an earlier reply are those of a state that was put back.
    pub calls: u64,
    /// Number of the caller's call before this one, as the state has it; 0: it has none.
    pub previous_call: u64,
    pub grants: Vec<PermitGrant>,
    pub skipped: Vec<SkippedRequest>,
    /// What may surely start now under the tightest of the provider's limits; more may be due.
    pub remaining: u64,
    /// The limit of the spec that has the least remaining, or that refuses.
    pub deciding_limit: usize,
    /// Until all of that limit is free again, if what is in flight is answered now and nothing else is granted.
    pub reset_us: u64,
    /// Present when the line stopped before its end.
    pub refused: Option<LimiterRefusal>,
}

/// A refusal with its wait, in microseconds from the reply, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimiterRefusal {
    pub reason: RefusalReason,
    pub wait_us: u64,
    /// Whether the next permit starts exactly then; otherwise it is the earliest that it can be.
    pub exact: bool,
}

impl LimiterReply {
    #[must_use]
    pub fn permits(&self) -> u64 {
        self.grants.iter().map(|run| u64::from(run.permits)).sum()
    }
}

/// How one limit stands, looked at without taking anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUsage {
    /// Which limit of the spec.
    pub index: usize,
    /// Uses that count now, those in flight among them.
    pub used: u64,
    /// Permits that a shadow limit would have refused, since its state began.
    pub would_have_refused: u64,
    /// Permits that a shadow limit would have made wait.
    pub would_have_waited: u64,
    /// Until the next permit of cost 1 may start, in microseconds.
    pub retry_us: u64,
    /// Until all of the limit is free again if nothing more is granted, in microseconds.
    pub reset_us: u64,
}

impl LimitUsage {
    /// A limit without uses that grants nothing for this time.
    #[must_use]
    pub fn unused(index: usize, retry_us: u64) -> Self {
        Self { index, used: 0, would_have_refused: 0, would_have_waited: 0, retry_us, reset_us: retry_us }
    }
}
