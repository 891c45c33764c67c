//! Comparison of the store's clock with this process's monotonic clock: whether the store's clock was stepped, and when
//! a permit may start if a step may be hidden.
//!
//! It reads no clock: every instant is an argument.
//!
//! An exchange departs at d, its reply arrives at a, and the store wrote `now` in between. So the offset (store − ours)
//! lies in [now − a, now − d]. The known offset is the intersection over all exchanges, widened by [`DRIFT_PPM`] with
//! time. An exchange that lies beyond it by more than [`STEP_MIN`] proves a step.
//!
//! A step that stays inside the known bounds cannot be seen by any process. A step back is harmless: slots come free
//! later. A step forward by f frees every slot that was released before it f too early. So a permit also waits until
//! the slot's instant has come by the clock *as it was at the release*. That is the least offset that was possible
//! then.
//!
//! Later exchanges must not tighten that bound, because they may have happened after the step. Bounds of the past are
//! therefore kept while a slot released under them may still matter: one window. The window is measured from the
//! release by our monotonic clock, so its padding covers our drift too.
//!
//! The time before the first exchange is covered by another process's attestation ([`ClockAttestation`]): it
//! bounds the step that may be hidden ([`ClockComparison::assume_undetected_step`]). Not covered: a second step that
//! undoes an unseen one.
//!
//! Nor is one step that moves both clocks by the same amount, as when store and database share a machine. It must come
//! after an attestation and before the first comparison of a process that is granted permits. See
//! `docs/decisions/0013-verify-the-store-clock.md`.

use std::collections::VecDeque;
use std::time::Duration;

use super::provider::ProviderName;
use super::time::Micros;

/// Greatest difference in rate between two clocks, in parts per million: NTP's largest slew, and the relative padding
/// of a window.
pub const DRIFT_PPM: u32 = 500;
/// Least distance between a reading and the known bounds that counts as a step: the fixed part of a window's padding.
pub const STEP_MIN: Duration = Duration::from_millis(2);
/// Number of past bounds that are kept; more are merged to the safe side.
const MIN_OFFSETS_MAX: usize = 128;
/// The store truncates its clock to microseconds.
const TRUNCATION_NS: i128 = 1_000;

/// Result of one exchange about the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "grants of an exchange that shows a step must not be used"]
pub enum Comparison {
    /// There is nothing to compare with: grants of this exchange must not be used.
    First,
    /// No step can be seen. The offset is known to this width; steps forward up to about that may be hidden.
    Agrees {
        width: Duration,
    },
    /// The clock stepped by at least this since the exchange before. The comparison restarts from this exchange.
    SteppedForward {
        by: Duration,
    },
    SteppedBack {
        by: Duration,
    },
}

/// Bounds of the offset (store − ours) in nanoseconds, at an instant of our clock.
#[derive(Clone, Copy, Debug)]
struct OffsetBounds {
    least: i128,
    most: i128,
    at: Duration,
}

/// The least offset that was possible between two instants of ours.
#[derive(Clone, Copy, Debug)]
struct MinOffset {
    from: Duration,
    until: Duration,
    least: i128,
}

/// Knowledge of one process about one store's clock.
#[derive(Clone, Debug, Default)]
pub struct ClockComparison {
    known: Option<OffsetBounds>,
    /// Bounds by the first exchange, or by the first after a step.
    first: Option<OffsetBounds>,
    /// Sorted by time; each is higher than the one before.
    min_offsets: VecDeque<MinOffset>,
}

impl ClockComparison {
    /// Takes in one exchange, in the order of arrivals. `departed` and `arrived` are monotonic, since any one origin;
    /// `now` is the store's clock in between.
    pub fn observe(&mut self, departed: Duration, arrived: Duration, now: Micros) -> Comparison {
        let now = nanos(now);
        let reading = OffsetBounds { least: now - ns(arrived), most: now + TRUNCATION_NS - ns(departed), at: arrived };
        let heard = reading.at_arrival(departed);
        let Some(before) = self.known else {
            (self.known, self.first) = (Some(heard), Some(heard));
            return Comparison::First;
        };
        let known = before.aged_to(arrived);
        let (forward, back) = (reading.least - known.most, known.least - reading.most);
        let step = ns(STEP_MIN);
        if forward > step || back > step {
            (self.known, self.first) = (Some(heard), Some(heard));
            self.min_offsets.clear();
            return if forward > step {
                Comparison::SteppedForward { by: duration(forward) }
            } else {
                Comparison::SteppedBack { by: duration(back) }
            };
        }
        self.push_min_offset(MinOffset { from: before.at, until: arrived, least: known.least });
        let both = OffsetBounds { least: known.least.max(heard.least), most: known.most.min(heard.most), at: arrived };
        // The difference is too small for a step. The last reading is true in any case.
        let both = if both.least > both.most { heard } else { both };
        self.known = Some(both);
        Comparison::Agrees { width: duration(both.most - both.least) }
    }

    /// Whether an exchange was observed that later ones are compared with.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Bounds of the store's clock at our instant `at`, in nanoseconds. The lower one holds for the clock as it was at
    /// any time in the last `over`. So a step that is hidden from us stays hidden from no process that relies on these
    /// bounds.
    pub fn reading(&self, at: Duration, over: Duration) -> Option<(i128, i128)> {
        let known = self.known?.aged_to(at);
        let least =
            self.min_offset_since(at.saturating_sub(over)).map_or(known.least, |floor| floor.least.min(known.least));
        Some((least + ns(at), known.most + ns(at)))
    }

    /// Assumes, by another process's attestation, that no step forward longer than `hidden` came before the first
    /// exchange.
    pub fn assume_undetected_step(&mut self, hidden: Duration) {
        let Some(first) = self.first else { return };
        let least = first.least - ns(hidden);
        match self.min_offsets.front_mut() {
            // A later bound is lower still.
            Some(floor) if floor.least <= least => floor.from = Duration::ZERO,
            _ => self.min_offsets.push_front(MinOffset { from: Duration::ZERO, until: first.at, least }),
        }
    }

    /// The instant of our clock at which the store's clock reads `due`, as that clock was at any time in the last
    /// `over` before `arrived`. It holds whatever step was hidden since. Zero when nothing is known.
    ///
    /// A permit starts no earlier than this for each of its slots, and no earlier than the reply's wait after its
    /// arrival. `due` is the slot's own instant (its use plus the padded window) where that is known, else `now` +
    /// wait. So a slot that has been due for long causes no wait.
    ///
    /// `over` is the padded window: the longest time since the releases that the wait depends on. A slot whose lease
    /// ran out was never released, and a hidden step forward brings its instant nearer unseen. The longest hold in
    /// `over` would cover that case; the gate leaves it out.
    pub fn not_before(&self, arrived: Duration, due: Micros, over: Duration) -> Duration {
        let floor = self.min_offset_since(arrived.saturating_sub(over));
        floor.map_or(Duration::ZERO, |floor| duration(nanos(due) - floor.least))
    }

    /// The lowest bound since that instant.
    fn min_offset_since(&self, since: Duration) -> Option<&MinOffset> {
        self.min_offsets.get(self.min_offsets.partition_point(|floor| floor.until < since))
    }

    /// Drops the bounds that a later one undercuts: only the lowest bound since an instant is ever read.
    fn push_min_offset(&mut self, mut floor: MinOffset) {
        while let Some(last) = self.min_offsets.pop_back_if(|last| last.least >= floor.least) {
            floor.from = last.from;
        }
        self.min_offsets.push_back(floor);
        if self.min_offsets.len() > MIN_OFFSETS_MAX {
            self.merge(floor.until);
        }
    }

    /// Joins the two neighbours whose common span is shortest for its age, under the lower bound of both. Short windows
    /// stay exact, and long ones nearly.
    fn merge(&mut self, now: Duration) {
        let coarseness = |index: &usize| {
            let (older, newer) = (self.min_offsets[*index], self.min_offsets[index + 1]);
            let span = newer.until.saturating_sub(older.from).as_secs_f64();
            span / now.saturating_sub(newer.until).max(Duration::from_millis(1)).as_secs_f64()
        };
        let finest = (0..self.min_offsets.len() - 1).min_by(|a, b| coarseness(a).total_cmp(&coarseness(b)));
        if let Some(index) = finest {
            self.min_offsets[index].until = self.min_offsets[index + 1].until;
            self.min_offsets.remove(index + 1);
        }
    }
}

impl OffsetBounds {
    /// Makes the bounds of a reading hold at the arrival. The clock may have gained since a reading at the departure.
    /// Its possible loss is less than `least` leaves for a reading before the arrival.
    fn at_arrival(self, departed: Duration) -> Self {
        Self { most: self.most + drift(self.at.saturating_sub(departed)), ..self }
    }

    fn aged_to(self, at: Duration) -> Self {
        let drift = drift(at.saturating_sub(self.at));
        Self { least: self.least - drift, most: self.most + drift, at: at.max(self.at) }
    }
}

/// By how many nanoseconds two clocks may drift apart in this time.
fn drift(time: Duration) -> i128 {
    ns(time) * i128::from(DRIFT_PPM) / 1_000_000 + 1
}

fn nanos(instant: Micros) -> i128 {
    i128::from(instant.0) * 1_000
}

fn ns(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX)
}

/// Negative values become zero.
fn duration(ns: i128) -> Duration {
    Duration::from_nanos(u64::try_from(ns.max(0)).unwrap_or(u64::MAX))
}

/// The longest step that an attestation may leave undetected: permits are delayed by this for one window.
const UNDETECTED_STEP_MAX: Duration = Duration::from_millis(100);
/// Age at which an attestation is renewed: the clocks drift apart, and the step that may be undetected grows.
pub const ATTESTATION_RENEW_AFTER: Duration = Duration::from_secs(10);

/// Bounds of the offset of one clock from another, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    pub least_us: i64,
    pub most_us: i64,
}

/// Bounds of what a clock reads at one instant, in nanoseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockBounds {
    pub least_ns: i128,
    pub most_ns: i128,
}

impl ClockOffset {
    /// Offset of the store's clock from the database's, both read at one instant.
    pub fn between(store: ClockBounds, database: ClockBounds) -> Self {
        // Rounded outwards, so that the truncation to microseconds hides nothing.
        let down = |ns: i128| i64::try_from(ns.div_euclid(1_000)).unwrap_or(i64::MIN);
        let up = |ns: i128| i64::try_from((ns + 999).div_euclid(1_000)).unwrap_or(i64::MAX);
        Self { least_us: down(store.least_ns - database.most_ns), most_us: up(store.most_ns - database.least_ns) }
    }

    /// The offset after a time in which both clocks drifted.
    fn aged(self, age: Duration) -> Self {
        let drift_us = i64::try_from(age.as_micros() * u128::from(2 * DRIFT_PPM) / 1_000_000).unwrap_or(i64::MAX);
        Self { least_us: self.least_us.saturating_sub(drift_us), most_us: self.most_us.saturating_add(drift_us) }
    }
}

/// Statement of a process that compared the clocks without a break, stored in the database. A later process checks its
/// own reading of both clocks against it. If they differ too much, the state is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockAttestation {
    pub offset: ClockOffset,
    /// Instant by the store's clock from which on it made no step, until the attestation was stored.
    pub since: Micros,
}

/// An attestation for one quota, in a term of its leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaAttestation {
    pub quota: ProviderName,
    pub term: i64,
    pub attestation: ClockAttestation,
}

/// Result of checking an attestation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a state without a valid attestation must be reset"]
pub enum AttestationCheck {
    /// The store's clock made no step since that instant, except one forward of at most `undetected_step`.
    Valid { since: Micros, undetected_step: Duration },
    /// There is no attestation, or it cannot be compared yet: ask again.
    Missing,
    /// The offset between the clocks has changed.
    Mismatch,
}

/// Checks an attestation of this age against one's own reading.
pub fn check_attestation(reading: ClockOffset, attestation: ClockAttestation, age: Duration) -> AttestationCheck {
    let attested = attestation.offset.aged(age);
    let (forward_us, back_us) =
        (reading.most_us.saturating_sub(attested.least_us), attested.most_us.saturating_sub(reading.least_us));
    let most_us = i64::try_from(UNDETECTED_STEP_MAX.as_micros()).unwrap_or(i64::MAX);
    if forward_us > most_us || back_us > most_us {
        return AttestationCheck::Mismatch;
    }
    let undetected_step = Duration::from_micros(u64::try_from(forward_us).unwrap_or(0));
    AttestationCheck::Valid { since: attestation.since, undetected_step }
}

/// The limiter leader of a quota, which may grant its permits, as every worker reads it from the database.
/// `limiter::leader_election` decides who the leader should be. See `docs/decisions/0014-leader-row-in-sql.md`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderRow {
    /// `redis:` and the run id of the one writable primary, or the id of the one process with an embedded limiter; or
    /// `share`: each worker grants its own share.
    pub holder: String,
    /// Increases by one with each change. Limiter state from another term is discarded.
    pub term: i64,
    /// Time since the holder changed, by the database's clock. Other workers see a change once it is committed.
    pub age: Duration,
    /// The database's clock when this was read, cut to milliseconds.
    pub now: Micros,
    /// The last clock attestation of a worker in this term, and its age.
    pub attestation: Option<(ClockAttestation, Duration)>,
}

#[cfg(test)]
#[path = "clock_comparison_tests.rs"]
mod tests;
