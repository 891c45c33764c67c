//! Specification of the counters of a quota: one for each limit, and one that spaces starts.
//!
//! A counter says how and what it counts, and how many uses it allows. Several algorithms share one kind of counter.

use std::time::Duration;

use super::{CONCURRENCY_RETRY, INTERVAL_PARTS, LimitSpec, QuotaSpec};
use crate::domain::egress::{EGRESS_SPAN, tightest_at_once};
use crate::domain::limit::{Algorithm, AppliesTo, Scope};
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::Pacing;
use crate::domain::time::{micros_up, millis_up};

/// Number of buckets that a sliding window rolls through: it allows its whole rate per window plus one bucket.
pub const WINDOW_BUCKETS: u64 = 256;
/// Entries that the log of one account or reference should stay below.
const SUBJECT_ENTRIES: u64 = 1_024;
/// Largest limit whose subject log keeps every millisecond separately.
const SUBJECT_EXACT_MAX: u32 = 128;
/// Name of the counter that spaces starts, with a blank, too.
pub(super) const SPACING: &str = "start spacing";
/// Starts that may come together, as time and as number. Slots come back as irregularly as responses do: with a strict
/// distance between starts, a slot that comes back early would wait for the one before it. With 50/1s and responses after
/// 80 ms (95 % within 300 ms) a strict distance leaves 2 % of the limit unused, and this 0.6 %.
const SPACING_TOLERANCE: Duration = Duration::from_millis(40);
const SPACING_STARTS_MIN: u32 = 4;
/// Longest time that a bucket may take to drain: its arithmetic is exact up to this, and a row may ask for half of it.
/// An account's own slower rate makes the bucket smaller instead.
const DRAIN_MAX_US: u64 = 62 * 86_400 * 1_000_000;

/// Counter of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSpec {
    pub name: String,
    pub kind: CounterKind,
    pub applies_to: AppliesTo,
    pub shadow: bool,
    /// Uses that may count at once; for a bucket, its capacity.
    pub max: u32,
    /// Time for which a use counts; for a bucket, its time to drain; for requests in flight, [`super::CONCURRENCY_RETRY`].
    pub window_us: u64,
}

/// With debt, one part in so many of a bucket must be free for a start, so that not every start is decided by itself.
pub const DEBT_PARTS: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Uses by the instant at which their window begins, rounded up to whole granules. `held`: a slot is held until the
    /// response.
    Log { granule_ms: u64, held: bool },
    /// Uses of the current window and of the next.
    Window { offset_us: u64 },
    /// Requests in flight, and none that has ended. A slot is held until the response, however other limits count.
    InFlight,
    /// The instant at which all uses have drained. With debt, uses need one of [`DEBT_PARTS`] parts of the bucket, and
    /// one may cost more than there is.
    Bucket { interval: u64, debt: bool },
}

impl CounterSpec {
    pub fn applies(&self, kind: CallKind) -> bool {
        match self.applies_to {
            AppliesTo::All => true,
            AppliesTo::Charge => kind == CallKind::Charge,
            AppliesTo::Lookup => kind == CallKind::Lookup,
        }
    }

    /// Whether it spaces starts: no limit of a row.
    pub fn is_pacing(&self) -> bool {
        matches!(self.kind, CounterKind::Bucket { debt: true, .. })
    }

    /// Whether slots are held until the response.
    pub fn is_held(&self) -> bool {
        matches!(self.kind, CounterKind::Log { held: true, .. } | CounterKind::InFlight)
    }
}

impl LimitSpec {
    /// The counter of this limit.
    pub(super) fn counter_spec(&self, held: bool) -> CounterSpec {
        let (own, max_requests) = (self.clone(), self.max_requests);
        let window_us = own.padded_window_us();
        let window_ms = millis_up(own.window);
        let interval = (micros_up(own.window) * INTERVAL_PARTS).div_ceil(u64::from(max_requests).max(1));
        let subject_ms = if max_requests <= SUBJECT_EXACT_MAX { 1 } else { window_ms.div_ceil(SUBJECT_ENTRIES) };
        let granule_ms = if own.scope == Scope::Provider { 1 } else { subject_ms };
        let mut max = own.cost_max();
        let (kind, window_us) = match own.algorithm {
            Algorithm::SlidingLog => (CounterKind::Log { granule_ms, held: held && !own.shadow }, window_us),
            Algorithm::SlidingWindow => {
                (CounterKind::Log { granule_ms: window_ms.div_ceil(WINDOW_BUCKETS), held: false }, window_us)
            }
            Algorithm::FixedWindow => (
                CounterKind::Window { offset_us: micros_up(own.offset) % micros_up(own.window) },
                micros_up(own.window),
            ),
            Algorithm::TokenBucket | Algorithm::Gcra => {
                let most = DRAIN_MAX_US * INTERVAL_PARTS / interval;
                max = max.min(u32::try_from(most).unwrap_or(u32::MAX));
                // A closed limit refuses for as long as an open one would need for its first request.
                let drain_us = (interval * u64::from(max.max(1))).div_ceil(INTERVAL_PARTS);
                (CounterKind::Bucket { interval, debt: false }, drain_us)
            }
            Algorithm::Concurrency => (CounterKind::InFlight, micros_up(CONCURRENCY_RETRY)),
        };
        CounterSpec { name: own.name, kind, applies_to: own.applies_to, shadow: own.shadow, max, window_us }
    }
}

impl QuotaSpec {
    fn paced(&self) -> impl Iterator<Item = &LimitSpec> {
        let counts = |limit: &&LimitSpec| limit.applies_to_every_charge() && limit.max_requests > 0;
        self.limits.iter().filter(counts)
    }

    /// The limit that allows the fewest requests within [`EGRESS_SPAN`], and their number.
    pub(super) fn burst_pace(&self) -> Option<(&LimitSpec, u32)> {
        let allowances = self.paced().filter_map(|limit| Some((limit, limit.allowance()?)));
        tightest_at_once(allowances).map(|(limit, _, most)| (limit, most))
    }

    /// Counter that spaces starts: the earliest next one.
    pub(super) fn pacing(&self) -> Option<CounterSpec> {
        let interval =
            |window: Duration, most: u32| (micros_up(window) * INTERVAL_PARTS).div_ceil(u64::from(most.max(1)));
        let (interval, max, applies_to) = match self.pacing? {
            Pacing::Even => {
                let intervals = self.paced().map(|limit| interval(limit.window, limit.max_requests));
                (intervals.filter(|interval| *interval > 0).max()?, 1, AppliesTo::All)
            }
            Pacing::Burst => {
                let (limit, most) = self.burst_pace()?;
                let interval = interval(EGRESS_SPAN, most);
                let together = micros_up(SPACING_TOLERANCE) * INTERVAL_PARTS / interval.max(1);
                (interval, u32::try_from(together).unwrap_or(u32::MAX).max(SPACING_STARTS_MIN), limit.applies_to)
            }
        };
        Some(CounterSpec {
            name: SPACING.to_owned(),
            kind: CounterKind::Bucket { interval, debt: true },
            applies_to,
            shadow: false,
            max,
            window_us: (interval * u64::from(max)).div_ceil(INTERVAL_PARTS),
        })
    }
}
