//! Pace of a backlog: how fast a provider's limits, worker slots and egress rate let jobs out.
//!
//! Each limit lets a number of jobs out per cycle. A longer limit matters only where the shorter ones let out a whole
//! cycle of it before that cycle ends. So limits are taken from the shortest to the longest. Each is a function from a
//! number of jobs to seconds, built on the one before it.

use std::time::Duration;

use super::ClearTimeInput;
use crate::domain::limit::{Algorithm, Limit};
use crate::domain::provider::{Pacing, Provider, SlotRelease};

/// Time until `jobs` are sent and the last is answered; `None`: nothing is sent.
pub(super) fn send_time(conditions: &ClearTimeInput<'_>, jobs: u64) -> Option<Duration> {
    let per_second = steady_rate(conditions)?;
    let holding = conditions.provider.limits.iter().filter(|limit| limit.applies_to_every_charge());
    let mut rules: Vec<LimitPace> = holding.map(|limit| LimitPace::new(conditions, limit)).collect();
    rules.extend(even_pacing(conditions.provider));
    rules.sort_by(|a, b| a.cycle.total_cmp(&b.cycle));
    let sent_in = CombinedPace { limits: &rules, per_second }.seconds(jobs);
    Some(duration(sent_in + conditions.hold.as_secs_f64()))
}

/// Time that a backlog takes at this rate; `None`: it never ends.
pub(super) fn time_at_rate(jobs: u64, per_second: f64) -> Option<Duration> {
    (per_second > 0.0).then(|| duration(float(jobs) / per_second))
}

/// Jobs per second that all lanes let out without any limit: by their egress rate and their worker slots.
fn steady_rate(conditions: &ClearTimeInput<'_>) -> Option<f64> {
    let lanes = f64::from(conditions.lanes.max(1));
    let egress = conditions.provider.egress_per_second() * lanes;
    let hold = conditions.hold.as_secs_f64();
    let slots = if hold > 0.0 { f64::from(conditions.provider.workers) * lanes / hold } else { f64::INFINITY };
    Some(egress.min(slots)).filter(|rate| *rate > 0.0)
}

/// The spacing by the tightest limit, if starts are spread evenly.
fn even_pacing(provider: &Provider) -> Option<LimitPace> {
    let tightest = provider.tightest_rate().filter(|_| provider.pacing == Pacing::Even)?;
    let per_cycle = u64::from(provider.after_reserve(tightest.max_requests())).max(1);
    let window = tightest.window().as_secs_f64();
    // As the spacing of one job, it comes before every window.
    Some(LimitPace { per_cycle: 1, cycle: window / float(per_cycle), kind: PaceKind::Spaced { at_once: 1 } })
}

/// Pace of one limit.
struct LimitPace {
    /// Jobs per cycle, at least 1.
    per_cycle: u64,
    /// Seconds.
    cycle: f64,
    kind: PaceKind,
}

enum PaceKind {
    /// All that are free go at once, then one after the other.
    Spaced { at_once: u64 },
    /// All that are free go at once. Used slots are free again within a cycle.
    Sliding { free: u64 },
    /// All of a window at once, when it begins. The first one begins in `ends_in` seconds.
    Aligned { free: u64, ends_in: f64 },
}

impl LimitPace {
    fn new(conditions: &ClearTimeInput<'_>, limit: &Limit) -> Self {
        let provider = conditions.provider;
        let share = |count: u32| u64::from(provider.after_reserve(count));
        let per_cycle = share(limit.rate.max_requests()).max(1);
        let used = conditions.used_counts.iter().find(|used| used.limit == limit.name).map_or(0, |used| used.count);
        let free = share(limit.capacity()).saturating_sub(used);
        let window = limit.rate.window();
        let cycle = match (limit.algorithm, provider.slot_release) {
            (Algorithm::SlidingLog, SlotRelease::Response) | (Algorithm::Concurrency, _) => window + conditions.hold,
            (Algorithm::SlidingLog, SlotRelease::Grant { transit_jitter }) => window + transit_jitter,
            _ => window,
        };
        let kind = match limit.algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra => PaceKind::Spaced { at_once: free },
            Algorithm::FixedWindow => {
                let window_ms = window.as_millis().max(1);
                let now = u128::try_from(conditions.now.0).unwrap_or(0) + window_ms;
                let gone = now.saturating_sub(limit.offset.as_millis()) % window_ms;
                let ends_in = Duration::from_millis(u64::try_from(window_ms - gone).unwrap_or(u64::MAX));
                PaceKind::Aligned { free: free.min(per_cycle), ends_in: ends_in.as_secs_f64() }
            }
            Algorithm::SlidingLog | Algorithm::SlidingWindow | Algorithm::Concurrency => {
                PaceKind::Sliding { free: free.min(per_cycle) }
            }
        };
        Self { per_cycle, cycle: cycle.as_secs_f64(), kind }
    }

    /// Seconds until the `n`th job has a permit by this limit alone.
    fn permit_time(&self, n: u64) -> f64 {
        match self.kind {
            PaceKind::Spaced { at_once } => float(n.saturating_sub(at_once)) / float(self.per_cycle) * self.cycle,
            PaceKind::Sliding { free } => {
                // Whole cycles, then a last one: first the slots that are free now, then those that are used now.
                let (cycles, last) = (n.saturating_sub(1) / self.per_cycle, n.saturating_sub(1) % self.per_cycle + 1);
                let used = (self.per_cycle - free).max(1);
                (float(cycles) + float(last.saturating_sub(free)) / float(used)) * self.cycle
            }
            PaceKind::Aligned { free, ends_in } if n > free => {
                ends_in + float((n - free - 1) / self.per_cycle) * self.cycle
            }
            PaceKind::Aligned { .. } => 0.0,
        }
    }

    /// Seconds of the full cycles before the `n`th job, and the job's place in its own cycle.
    fn cycle_of(&self, n: u64) -> Option<(f64, u64)> {
        match self.kind {
            PaceKind::Spaced { .. } => None,
            PaceKind::Sliding { .. } => {
                let (cycles, place) = (n.saturating_sub(1) / self.per_cycle, n.saturating_sub(1) % self.per_cycle + 1);
                Some((float(cycles) * self.cycle, place))
            }
            PaceKind::Aligned { free, ends_in } if n > free => {
                let behind = n - free - 1;
                Some((ends_in + float(behind / self.per_cycle) * self.cycle, behind % self.per_cycle + 1))
            }
            PaceKind::Aligned { .. } => Some((0.0, n)),
        }
    }
}

/// Pace of several limits together, and of the lanes without any limit.
struct CombinedPace<'a> {
    /// Sorted by the length of their cycles.
    limits: &'a [LimitPace],
    per_second: f64,
}

impl CombinedPace<'_> {
    /// Seconds until the `n`th job is sent.
    fn seconds(&self, n: u64) -> f64 {
        let Some((rule, shorter)) = self.limits.split_last() else {
            return float(n.saturating_sub(1)) / self.per_second;
        };
        let shorter = CombinedPace { limits: shorter, per_second: self.per_second };
        let alone = rule.permit_time(n).max(shorter.seconds(n));
        let decides = shorter.seconds(rule.per_cycle.saturating_add(1)) < rule.cycle;
        match rule.cycle_of(n).filter(|_| decides) {
            Some((cycles, place)) => alone.max(cycles + shorter.seconds(place)),
            None => alone,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts of jobs are far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Saturates: a backlog may take longer than a duration can hold.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
