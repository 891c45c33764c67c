//! Window counts of a simulated run: what the provider was sent, in every window of every limit.
//!
//! They share no code with the limiter that they check. A window of length W that ends at t covers (t − W, t]. A count
//! can only peak at an arrival, so windows that end at an arrival are enough.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use crate::domain::limit::{Algorithm, AppliesTo, Rule, Scope, limit_text};
use crate::domain::quota_spec::{LimitSpec, QuotaSpec, limit_under_rule};
use crate::domain::time::micros_up;

/// One request as the provider counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProviderUse {
    pub at_us: u64,
    /// When the provider has finished it.
    pub ended_us: u64,
    pub cost: u16,
    pub account: Option<u32>,
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
pub(super) fn count(spec: &QuotaSpec, uses: &[ProviderUse], accounts: &[String]) -> Vec<WindowCount> {
    let mut sorted: Vec<ProviderUse> = uses.to_vec();
    sorted.sort_by_key(|provider_use| provider_use.at_us);
    let counted =
        spec.limits.iter().filter(|limit| limit.scope != Scope::Reference && limit.applies_to != AppliesTo::Lookup);
    counted.map(|limit| fullest(spec, limit, &sorted, accounts)).collect()
}

fn fullest(spec: &QuotaSpec, limit: &LimitSpec, sorted: &[ProviderUse], accounts: &[String]) -> WindowCount {
    let mut windows: BTreeMap<Option<u32>, ObservedWindow> = BTreeMap::new();
    for provider_use in sorted {
        let account = if limit.scope == Scope::Account { provider_use.account } else { None };
        if limit.scope == Scope::Account && account.is_none() {
            continue;
        }
        let window = windows.entry(account).or_insert_with(|| {
            let name = account.and_then(|account| accounts.get(account as usize));
            ObservedWindow::new(&account_limit(spec, limit, name.map(String::as_str)), name.cloned())
        });
        window.record(provider_use);
    }
    // An exceeded window first, then the fullest in proportion.
    let worst = windows.into_values().filter(|window| !window.exempt).max_by(|a, b| a.share().total_cmp(&b.share()));
    let worst = worst.unwrap_or_else(|| ObservedWindow::new(&Some(limit.clone()), None));
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
        Some(Rule::Blocked | Rule::Refuse) | None => Some(limit.clone()),
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
    exempt: bool,
}

impl ObservedWindow {
    fn new(limit: &Option<LimitSpec>, account: Option<String>) -> Self {
        let window_us = limit.as_ref().map_or(1, |limit| micros_up(limit.window));
        let offset_us = limit.as_ref().filter(|limit| limit.algorithm == Algorithm::FixedWindow);
        Self {
            window_us,
            offset_us: offset_us.map(|limit| micros_up(limit.offset) % window_us),
            counts_in_flight: limit.as_ref().is_some_and(|limit| limit.algorithm == Algorithm::Concurrency),
            recent: VecDeque::new(),
            current: 0,
            largest: 0,
            most: limit.as_ref().map_or(0, window_capacity),
            account,
            exempt: limit.is_none(),
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
