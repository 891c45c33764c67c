//! Result of a simulated run: waits, drain time, deadlines, the fullest windows, and utilisation.
//!
//! Windows are counted from the requests that reached the provider, and share no code with the limiter that they check.
//! A window of length W that ends at t covers (t − W, t]. A count can only peak at an arrival, so windows that end at an
//! arrival are enough.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::Serialize;

use super::world::{JobEnd, ProviderUse, RunRecord};
use super::{JobArrivals, Model};
use crate::domain::limit::{Algorithm, AppliesTo, Rate, Rule, Scope, limit_text};
use crate::domain::outcome::FinalState;
use crate::domain::quota_spec::{LimitSpec, QuotaSpec, limit_under_rule};
use crate::domain::time::micros_up;

/// Share of the requests in which the rate is measured. After it comes the tail, in which slots stay unused.
const MEASURED_SHARE: f64 = 0.9;

/// From arrival to the first start, of the jobs that were sent; all `None` if none was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WaitPercentiles {
    pub p50_ms: Option<u64>,
    pub p95_ms: Option<u64>,
    pub p99_ms: Option<u64>,
    pub max_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SimulationResult {
    pub jobs: u64,
    pub succeeded: u64,
    /// Jobs for manual review; `dead` ones are confirmed not charged.
    pub review: u64,
    pub dead: u64,
    /// Jobs that were not sent before their `expires_at`.
    pub deadlines_missed: u64,
    /// Jobs of accounts that a rule blocks.
    pub blocked: u64,
    /// Jobs that never end under the given limits.
    pub unfinished: u64,
    pub wait: WaitPercentiles,
    /// From the start to the last outcome; `None`: some job never ends.
    pub clears_in_ms: Option<u64>,
    pub windows: Vec<WindowCount>,
    pub requests: u64,
    /// Over whole cycles of the tightest limit; `None`: the measured part holds fewer than two.
    pub rate_per_s: Option<f64>,
    /// Mean time from start to response.
    pub hold_ms: f64,
    /// The rate over whole cycles of the tightest limit, relative to the most that it allows. That is L / (W + hold)
    /// for slots held until the response, L / (W + jitter) for slots freed by the start, else L / W.
    pub utilisation: Option<f64>,
    pub limiter_calls: u64,
    /// Number of times that a job went to sleep.
    pub delayed: u64,
    pub timeouts: u64,
    pub faults: u64,
    /// Permits that missed their deadline.
    pub late_permits: u64,
    /// Instants at which requests reached the provider, since the start; each repeated by its cost.
    #[serde(skip)]
    pub arrivals_us: Vec<u64>,
}

impl SimulationResult {
    /// Whether no window held more than its limit allows.
    pub fn holds(&self) -> bool {
        self.windows.iter().all(WindowCount::holds)
    }
}

pub(super) fn summarize(model: &Model, arrivals: &JobArrivals, record: &RunRecord) -> SimulationResult {
    let count =
        |end: JobEnd| record.jobs.iter().filter(|job| job.end.is_some_and(|(_, ended)| ended == end)).count() as u64;
    let waits = record
        .jobs
        .iter()
        .zip(arrivals.jobs())
        .filter_map(|(job, arrival)| Some(job.first_start_us?.saturating_sub(model.start_us + arrival.at_us)));
    let last_us = record.jobs.iter().filter_map(|job| job.end).map(|(at_us, _)| at_us).max();
    let unfinished = record.jobs.iter().filter(|job| job.end.is_none()).count() as u64;
    let since_start = |at_us: u64| at_us.saturating_sub(model.start_us);
    let uses = record.uses.iter().flat_map(|one| std::iter::repeat_n(since_start(one.at_us), usize::from(one.cost)));
    let mut arrivals_us: Vec<u64> = uses.collect();
    arrivals_us.sort_unstable();
    let hold = Duration::from_micros(record.held_us.checked_div(record.answers).unwrap_or(0));
    let (rate_per_s, utilisation) = utilisation(model, &arrivals_us, hold);
    let late = record.jobs.iter().filter(|job| job.late_for_deadline).count() as u64;
    SimulationResult {
        jobs: record.jobs.len() as u64,
        succeeded: count(JobEnd::Final(FinalState::Succeeded)),
        review: count(JobEnd::Final(FinalState::Review)),
        dead: count(JobEnd::Final(FinalState::Dead)),
        deadlines_missed: count(JobEnd::Final(FinalState::Expired)) + late,
        blocked: count(JobEnd::Blocked),
        unfinished,
        wait: wait_percentiles(waits.collect()),
        clears_in_ms: last_us.filter(|_| unfinished == 0).map(|at_us| (at_us - model.start_us).div_ceil(1_000)),
        windows: count_windows(&model.spec, &record.uses, arrivals.accounts()),
        requests: record.uses.len() as u64,
        rate_per_s,
        hold_ms: hold.as_secs_f64() * 1_000.0,
        utilisation,
        limiter_calls: record.limiter_calls,
        delayed: record.delayed,
        timeouts: record.timeouts,
        faults: record.faults,
        late_permits: record.late_permits,
        arrivals_us,
    }
}

/// Percentiles by nearest rank.
fn wait_percentiles(mut waits_us: Vec<u64>) -> WaitPercentiles {
    waits_us.sort_unstable();
    let rank = |percent: usize| {
        let index = (waits_us.len() * percent).div_ceil(100).saturating_sub(1);
        waits_us.get(index).map(|wait_us| wait_us.div_ceil(1_000))
    };
    WaitPercentiles { p50_ms: rank(50), p95_ms: rank(95), p99_ms: rank(99), max_ms: rank(100) }
}

/// Uses per second, and their share of what the tightest limit can let through.
fn utilisation(model: &Model, arrivals_us: &[u64], hold: Duration) -> (Option<f64>, Option<f64>) {
    let possible = |limit: &LimitSpec| {
        let beyond = match (limit.algorithm, model.spec.grant_jitter) {
            (Algorithm::SlidingLog, None) | (Algorithm::Concurrency, _) => hold,
            (Algorithm::SlidingLog, Some(jitter)) => jitter,
            _ => Duration::ZERO,
        };
        f64::from(limit.max_requests) / (limit.window + beyond).as_secs_f64()
    };
    let all = model.spec.limits.iter().filter(|limit| limit.applies_to_every_charge());
    let Some(tightest) = all.min_by(|a, b| possible(a).total_cmp(&possible(b))) else { return (None, None) };
    let Some(per_second) = tightest.rate().and_then(|rate| steady_rate(arrivals_us, rate)) else { return (None, None) };
    let possible = possible(tightest);
    (Some(per_second), (possible > 0.0).then(|| per_second / possible))
}

/// Arrivals per second over whole cycles of the limit: after the first L, which find unused slots and need not wait, as
/// many times L as fit before the tail. `None`: fewer than two cycles, so a burst without a steady rate.
pub fn steady_rate(arrivals_us: &[u64], limit: Rate) -> Option<f64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a share")]
    let to = (arrivals_us.len() as f64 * MEASURED_SHARE) as usize;
    let slots = usize::try_from(limit.max_requests()).unwrap_or(usize::MAX).max(1);
    let cycles = to.saturating_sub(1) / slots;
    if cycles >= 2 { between(arrivals_us, slots, cycles * slots) } else { None }
}

fn between(arrivals_us: &[u64], from: usize, to: usize) -> Option<f64> {
    match (arrivals_us.get(from), arrivals_us.get(to)) {
        #[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
        (Some(first_us), Some(last_us)) if last_us > first_us => {
            Some((to - from) as f64 * 1e6 / (last_us - first_us) as f64)
        }
        _ => None,
    }
}

/// Fullest window of one limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WindowCount {
    pub limit: String,
    /// The limit as operators write it: `100/1s`.
    pub allows: String,
    pub algorithm: &'static str,
    /// Most uses in any window; of one account, if the limit counts accounts.
    pub largest: u64,
    /// Most uses that a window may hold as this algorithm counts; of an account with a rule, that account's own.
    pub most: u64,
    /// Account of the window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// A shadow limit never refuses, so it may be exceeded.
    pub shadow: bool,
}

impl WindowCount {
    pub fn holds(&self) -> bool {
        self.shadow || self.largest <= self.most
    }
}

/// The fullest windows of the limits that count charges; `uses` in any order. References are not simulated.
fn count_windows(spec: &QuotaSpec, uses: &[ProviderUse], accounts: &[String]) -> Vec<WindowCount> {
    let mut sorted: Vec<ProviderUse> = uses.to_vec();
    sorted.sort_by_key(|provider_use| provider_use.at_us);
    let counted =
        spec.limits.iter().filter(|limit| limit.scope != Scope::Reference && limit.applies_to != AppliesTo::Lookup);
    counted.map(|limit| fullest(spec, limit, &sorted, accounts)).collect()
}

fn fullest(spec: &QuotaSpec, limit: &LimitSpec, sorted: &[ProviderUse], accounts: &[String]) -> WindowCount {
    // `None`: the limit does not count the account.
    let mut windows: BTreeMap<Option<u32>, Option<ObservedWindow>> = BTreeMap::new();
    for provider_use in sorted {
        let account = if limit.scope == Scope::Account { provider_use.account } else { None };
        if limit.scope == Scope::Account && account.is_none() {
            continue;
        }
        let window = windows.entry(account).or_insert_with(|| {
            let name = account.and_then(|account| accounts.get(account as usize));
            let limit = account_limit(spec, limit, name.map(String::as_str))?;
            Some(ObservedWindow::new(&limit, name.cloned()))
        });
        if let Some(window) = window {
            window.record(provider_use);
        }
    }
    // An exceeded window first, then the fullest in proportion.
    let worst = windows.into_values().flatten().max_by(|a, b| a.share().total_cmp(&b.share()));
    let worst = worst.unwrap_or_else(|| ObservedWindow::new(limit, None));
    WindowCount {
        limit: limit.name.clone(),
        allows: limit_text(limit.max_requests, limit.window),
        algorithm: limit.algorithm.name(),
        largest: worst.largest,
        most: worst.most,
        account: worst.account,
        shadow: limit.shadow,
    }
}

/// The limit as it applies to one account; `None`: it does not count the account.
fn account_limit(spec: &QuotaSpec, limit: &LimitSpec, account: Option<&str>) -> Option<LimitSpec> {
    let rules = || spec.account_rules.iter().filter(|rule| Some(rule.account.as_str()) == account);
    let named = rules().find(|rule| rule.limit.as_deref() == Some(limit.name.as_str()));
    match named.or_else(|| rules().find(|rule| rule.limit.is_none())).map(|rule| rule.rule) {
        Some(rule @ (Rule::Exempt | Rule::Limit(_))) => limit_under_rule(rule, limit),
        Some(Rule::Blocked | Rule::Refuse) | None => limit.without_rule(),
    }
}

struct ObservedWindow {
    window_us: u64,
    /// Fixed windows follow the calendar: offset of their start.
    offset_us: Option<u64>,
    /// Requests in flight count, each until its end.
    counts_in_flight: bool,
    /// Instants and costs.
    recent: VecDeque<(u64, u64)>,
    current: u64,
    largest: u64,
    most: u64,
    account: Option<String>,
}

impl ObservedWindow {
    fn new(limit: &LimitSpec, account: Option<String>) -> Self {
        let window_us = micros_up(limit.window);
        let is_fixed = limit.algorithm == Algorithm::FixedWindow;
        Self {
            window_us,
            offset_us: is_fixed.then(|| micros_up(limit.offset) % window_us),
            counts_in_flight: limit.algorithm == Algorithm::Concurrency,
            recent: VecDeque::new(),
            current: 0,
            largest: 0,
            most: window_capacity(limit),
            account,
        }
    }

    fn record(&mut self, provider_use: &ProviderUse) {
        let (at_us, cost) = (provider_use.at_us, u64::from(provider_use.cost));
        if self.counts_in_flight {
            self.recent.retain(|(ended_us, _)| *ended_us > at_us);
            self.recent.push_back((provider_use.ended_us, cost));
            self.current = self.recent.iter().map(|(_, cost)| cost).sum();
            self.largest = self.largest.max(self.current);
            return;
        }
        let is_over = |then_us: u64| match self.offset_us {
            Some(offset_us) => (then_us - offset_us) / self.window_us != (at_us - offset_us) / self.window_us,
            None => then_us + self.window_us <= at_us,
        };
        while let Some((_, gone)) = self.recent.pop_front_if(|(then_us, _)| is_over(*then_us)) {
            self.current -= gone;
        }
        self.recent.push_back((at_us, cost));
        self.current += cost;
        self.largest = self.largest.max(self.current);
    }

    #[allow(clippy::cast_precision_loss, reason = "for comparison alone")]
    fn share(&self) -> f64 {
        self.largest as f64 / (self.most as f64).max(0.5)
    }
}

/// Most uses that a window holds as the algorithm counts.
fn window_capacity(limit: &LimitSpec) -> u64 {
    let max = u64::from(limit.max_requests);
    match limit.algorithm {
        Algorithm::SlidingLog | Algorithm::SlidingWindow | Algorithm::FixedWindow | Algorithm::Concurrency => max,
        // The initial capacity, and what is refilled while the window lasts.
        Algorithm::TokenBucket | Algorithm::Gcra => u64::from(limit.cost_max()) + max,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_measured_over_whole_windows() {
        let limit: Rate = "10/1s".parse().unwrap();
        let pulses: Vec<u64> = (0..60).map(|i| i / 10 * 1_050_000).collect();
        assert!((steady_rate(&pulses, limit).unwrap() - 10.0 / 1.05).abs() < 0.01, "bursts of ten, 1.05 s apart");
        let even: Vec<u64> = (0..60).map(|i| i * 105_000).collect();
        assert!((steady_rate(&even, limit).unwrap() - 10.0 / 1.05).abs() < 0.01);
        assert_eq!(steady_rate(&[0, 500_000, 1_000_000], limit), None, "no whole cycle");
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let waits = wait_percentiles((1..=200).rev().map(|ms| ms * 1_000).collect());
        let wanted = [100, 190, 198, 200].map(Some);
        assert_eq!([waits.p50_ms, waits.p95_ms, waits.p99_ms, waits.max_ms], wanted);
        assert_eq!(wait_percentiles(Vec::new()), WaitPercentiles::default());
    }
}
