//! The judge of readouts: finds false readouts by comparing the record of readouts with the record of the truth.
//!
//! Every readout has an age, and recovery from an outage takes a moment. So a figure is correct if it lies between the
//! smallest and the largest true value of the last [`AGE_MAX`]. A statement about a backend is judged only if the truth
//! has not changed for [`GRACE`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::ask::{Overview, Provider};
use super::hindered::{faults, judged_faults, promises, refusals};
use super::{History, Sample, Truth};

/// Age that a readout may have.
pub const AGE_MAX: Duration = Duration::from_secs(6);
/// Time after which every readout reports that a backend is unavailable, or available again.
pub const GRACE: Duration = Duration::from_secs(6);
/// Longest lease plus a readout's age. Until then, jobs of a killed or frozen worker may be counted twice.
const LEASE_MAX: Duration = Duration::from_secs(40);
/// Most payments that workers have consumed and not recorded yet: they are in no source for up to half a second.
pub(super) const TAKEN_MAX: u64 = 64;
/// States that report an unavailable backend, or no worker.
pub(super) const UNAVAILABLE: [&str; 2] = ["backend_unavailable", "no_worker"];
/// Cause of a database that answers but has committed nothing for half a second. It is correct on an overloaded
/// machine, and gone after a second.
pub(super) const TOO_SLOW: &str = "the ledger does not commit within the send budget";
/// Alerts whose expression may be true without a fault. Causes: a limit used in full, a paused provider's backlog,
/// payments in review, a provider's expected refusals, invalid messages, counts over the last minutes, and late commits
/// on an overloaded machine (the alert waits ten minutes).
pub(super) const EARNED: [&str; 7] = [
    "SluicegateMessagesRejected",
    "SluicegateLimitNearlyUsed",
    "SluicegatePermitsLate",
    "SluicegateQueueStandsStill",
    "SluicegateReviewsWaiting",
    "SluicegateProviderRefusesUs",
    "SluicegateSettingsNotRead",
];

/// Printed violations per rule.
const PRINTED: usize = 12;

/// A false readout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Untruth {
    pub rule: &'static str,
    pub at: Duration,
    pub worker: usize,
    pub what: String,
}

type Rule = fn(&Around<'_>) -> Vec<String>;

/// All rules, in the order of the report.
pub const RULES: [(&str, Rule); 12] = [
    ("limits can be looked at", limits_answer),
    ("usage is what the provider received", usage),
    ("available backends are not called unavailable", backends),
    ("running workers are not called lost", workers),
    ("waiting counts every payment once", waiting),
    ("a missing source is not zero", missing_sources),
    ("dashboard shows what waits", dashboard),
    ("alerts are silent while nothing is wrong", alerts),
    ("explanations name the state", explanations),
    ("no finish time is promised while 429s come", promises),
    ("429s are counted as by the provider", refusals),
    ("a backend that does no work is named", faults),
];

/// Rules that judge nothing while no backend or provider is at fault.
pub const OF_FAULTS: [&str; 3] = [
    "a missing source is not zero",
    "no finish time is promised while 429s come",
    "a backend that does no work is named",
];

/// All false readouts of a history.
pub fn judge(history: &History) -> Vec<Untruth> {
    judge_by(history, |_| true)
}

/// False readouts of a history that these rules find.
pub fn judge_by(history: &History, counts: impl Fn(&str) -> bool) -> Vec<Untruth> {
    let mut found = Vec::new();
    for sample in &history.samples {
        let around = Around::new(history, sample);
        for (rule, check) in RULES.into_iter().filter(|(rule, _)| counts(rule)) {
            let untruth = |what| Untruth { rule, at: sample.asked, worker: sample.worker, what };
            found.extend(check(&around).into_iter().map(untruth));
        }
    }
    found
}

/// False readouts by rule, the first few of each.
pub fn table(untruths: &[Untruth]) -> String {
    let mut text = String::new();
    for (rule, _) in RULES {
        let of_rule: Vec<&Untruth> = untruths.iter().filter(|untruth| untruth.rule == rule).collect();
        let _ = writeln!(text, "{rule}: {} untruths", of_rule.len());
        for untruth in of_rule.iter().take(PRINTED) {
            let _ =
                writeln!(text, "  {:>7.3} s, worker {}: {}", untruth.at.as_secs_f64(), untruth.worker, untruth.what);
        }
    }
    text
}

/// Number of readouts that each rule judged. A rule without any proves nothing.
pub fn judged(history: &History) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for sample in &history.samples {
        let around = Around::new(history, sample);
        let (calm, limits) = (around.is_calm(), sample.shown.limits.values().flatten().flatten().count());
        let alerts = sample.shown.alerts.is_some();
        let broker_down = around.has_been_down(|truth| truth.ready.is_some());
        let explained =
            sample.shown.explained.iter().filter(|job| job.before.is_some() && job.before == job.after).count();
        for ((rule, _), count) in RULES.into_iter().zip([
            usize::from(calm),
            if around.limiter_kept() { limits } else { 0 },
            usize::from(calm),
            usize::from(calm),
            usize::from(calm && around.no_lost_leases),
            usize::from(broker_down),
            if calm && around.no_lost_leases { sample.shown.panels.len() } else { 0 },
            usize::from(calm && alerts),
            explained,
            if calm { around.throttled_providers().count() } else { 0 },
            if calm { around.truths.last().map_or(0, |truth| truth.throttled.len()) } else { 0 },
            judged_faults(&around),
        ]) {
            *counts.entry(rule).or_default() += count;
        }
    }
    counts
}

/// One sample, and the true values that it may show.
pub struct Around<'a> {
    pub(super) sample: &'a Sample,
    /// No worker started, ended or stopped for [`LEASE_MAX`], or since the start.
    pub(super) no_lost_leases: bool,
    /// From the last one that ended [`AGE_MAX`] before the request to the first one that began after the response.
    pub(super) truths: Vec<&'a Truth>,
    /// From the start of the watch to the first of them.
    earlier: &'a [Truth],
}

impl<'a> Around<'a> {
    pub(super) fn new(history: &'a History, sample: &'a Sample) -> Self {
        let from = sample.asked.saturating_sub(AGE_MAX.max(GRACE));
        let first = history.truths.iter().rposition(|truth| truth.to <= from).unwrap_or(0);
        let last = history.truths.iter().position(|truth| truth.from >= sample.answered);
        let last = last.unwrap_or(history.truths.len().saturating_sub(1));
        let since = sample.asked.saturating_sub(LEASE_MAX);
        let mut lately = history.truths[..=last].iter().filter(|truth| truth.to >= since);
        let workers = lately.next().map(|truth| &truth.workers);
        let alike =
            |truth: &Truth| Some(&truth.workers) == workers && truth.workers.iter().all(|worker| worker.healthy);
        let no_lost_leases = lately.all(alike);
        let truths = history.truths[first..=last].iter().collect();
        Self { sample, no_lost_leases, truths, earlier: &history.truths[..=first] }
    }

    fn always(&self, holds: impl Fn(&Truth) -> bool) -> bool {
        !self.truths.is_empty() && self.truths.iter().all(|truth| holds(truth))
    }

    /// It has been so for [`GRACE`].
    pub(super) fn has_been(&self, is_so: impl Fn(&Truth) -> bool) -> bool {
        self.always(is_so) && self.truths.first().is_some_and(|first| first.to + GRACE <= self.sample.asked)
    }

    /// Providers that have refused requests lately, for as long as the readouts may be old.
    pub(super) fn throttled_providers(&self) -> impl Iterator<Item = &'a str> {
        let names = self.truths.first().into_iter().flat_map(|truth| truth.throttled.keys());
        names.map(String::as_str).filter(|name| {
            let lately = |truth: &Truth| truth.throttled.get(*name).is_some_and(|throttled| throttled.lately > 0);
            self.has_been(lately)
        })
    }

    /// Whether the provider has refused requests again after a pause, longer ago than a readout may be old. The requests
    /// that were in flight at its first refusal were refused within two looks.
    pub(super) fn is_refused_again(&self, name: &str) -> bool {
        let ever = |truth: &Truth| truth.throttled.get(name).map_or(0, |throttled| throttled.ever);
        let mut since_first = self.earlier.iter().map(ever).filter(|ever| *ever > 0);
        let settled = since_first.nth(2);
        settled.is_some_and(|settled| since_first.next_back().is_some_and(|last| last > settled))
    }

    /// For [`GRACE`], all backends did their work for all workers, and no worker started or ended.
    pub(super) fn is_calm(&self) -> bool {
        let first = self.truths.first();
        let same = |truth: &Truth| first.is_some_and(|first| first.workers == truth.workers);
        let well = |truth: &Truth| truth.workers.iter().all(|worker| worker.healthy);
        let backends = |truth: &Truth| {
            let answer = truth.ledger.is_some() && truth.ready.is_some() && truth.limiter_kept.is_some();
            answer && !truth.writes_are_refused && !truth.publishers_are_blocked
        };
        self.always(|truth| same(truth) && well(truth) && backends(truth))
            && first.is_some_and(|first| first.to + GRACE <= self.sample.asked)
    }

    /// A backend has been down for [`GRACE`] and still is.
    fn has_been_down(&self, answers: impl Fn(&Truth) -> bool) -> bool {
        self.has_been(|truth| !answers(truth))
    }

    /// Redis was available and lost no data.
    fn limiter_kept(&self) -> bool {
        self.is_calm() && self.always(|truth| truth.limiter_kept == Some(true))
    }

    pub(super) fn overview(&self) -> Option<&'a Overview> {
        self.sample.shown.overview.as_ref()
    }

    pub(super) fn providers(&self) -> impl Iterator<Item = (&'a str, &'a Provider)> {
        self.overview().into_iter().flat_map(|overview| &overview.providers).map(|(name, shown)| (name.as_str(), shown))
    }

    /// Smallest and largest number of a provider's finished payments.
    fn finished(&self, provider: &str) -> Option<Bounds> {
        let finished = self.truths.iter().filter_map(|truth| finished(truth, provider));
        finished.map(|finished| Bounds { least: finished, most: finished }).reduce(Bounds::and)
    }

    /// No payment of the provider moved between queue and ledger, so that each is in one of the two.
    pub(super) fn is_still(&self, provider: &str) -> bool {
        let states = |truth: &Truth| truth.ledger.as_ref().map(|ledger| ledger.get(provider).cloned());
        let first = self.truths.first().map(|truth| states(truth));
        self.always(|truth| Some(states(truth)) == first)
    }

    /// Smallest and largest number of a provider's unfinished payments, also between two truths: until the later one
    /// read its ledger, payments may have arrived before others finished, or after. A payment with two messages in the
    /// queue counts at most twice.
    pub(super) fn open(&self, provider: &str) -> Option<Bounds> {
        let pairs = self.truths.windows(2).filter_map(|pair| open_between(pair[0], pair[1], provider));
        let single = self.truths.iter().filter_map(|truth| open(truth, provider));
        single.chain(pairs).reduce(Bounds::and)
    }
}

/// Range in which a figure must lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub least: u64,
    pub most: u64,
}

impl Bounds {
    pub(super) fn and(self, other: Self) -> Self {
        Self { least: self.least.min(other.least), most: self.most.max(other.most) }
    }

    pub(super) fn has(self, figure: u64) -> bool {
        (self.least..=self.most).contains(&figure)
    }
}

pub(super) fn finished(truth: &Truth, provider: &str) -> Option<u64> {
    let states = truth.ledger.as_ref()?.get(provider);
    Some(states.map_or(0, |states| {
        let open: u64 = ["waiting", "sending", "unknown"].iter().filter_map(|state| states.get(*state)).sum();
        states.values().sum::<u64>() - open
    }))
}

pub(super) fn open(truth: &Truth, provider: &str) -> Option<Bounds> {
    open_between(truth, truth, provider)
}

/// From the first truth until the second.
fn open_between(first: &Truth, second: &Truth, provider: &str) -> Option<Bounds> {
    let [before, after] = [first.published.get(provider)?, second.published.get(provider)?];
    let least = before.confirmed.saturating_sub(finished(second, provider)?);
    Some(Bounds { least, most: after.sent.saturating_sub(finished(first, provider)?) + after.copies })
}

fn limits_answer(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let failed = around.sample.shown.limits.iter().filter_map(|(name, limits)| Some((name, limits.as_ref().err()?)));
    failed.map(|(name, error)| format!("limits of {name}: {error}")).collect()
}

fn usage(around: &Around<'_>) -> Vec<String> {
    if !around.limiter_kept() {
        return Vec::new();
    }
    let shown = around.sample.shown.limits.iter();
    let limits = shown.flat_map(|(name, limits)| limits.iter().flatten().map(move |limit| (name, limit)));
    let wrong = limits.filter(|(_, limit)| limit.used < limit.received || limit.used > limit.capacity);
    wrong.map(|(name, limit)| format!("{name}: {limit:?}")).collect()
}

fn backends(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let Some(overview) = around.overview() else { return vec!["no overview".to_owned()] };
    let unavailable = around.providers().filter(|(_, shown)| UNAVAILABLE.contains(&shown.state.as_str()));
    let unavailable = unavailable.filter(|(_, shown)| !shown.cause.starts_with(TOO_SLOW));
    let states = unavailable.map(|(name, shown)| format!("{name} is shown as {}: {}", shown.state, shown.cause));
    let needles = ["unreachable", "unavailable", "no answer", "does not answer", "could not"];
    let warnings = overview.warnings.iter().filter(|text| needles.iter().any(|needle| text.contains(needle)));
    states.chain(warnings.cloned()).collect()
}

fn workers(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let running: Vec<u32> = around.truths.iter().flat_map(|truth| &truth.workers).map(|worker| worker.pid).collect();
    let shown = &around.sample.shown;
    let lost = shown.lost_pids.iter().filter(|pid| running.contains(pid)).map(|pid| format!("{pid} is shown as lost"));
    let missing = running.iter().filter(|pid| !shown.live_pids.contains(pid)).take(1);
    lost.chain(missing.map(|pid| format!("{pid} is not shown as running: {:?}", shown.live_pids))).collect()
}

fn waiting(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() || !around.no_lost_leases {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (name, shown) in around.providers() {
        let Some(open) = around.open(name) else { continue };
        let figure = shown.waiting + shown.in_flight;
        // If no payment moves, the figure is exact. A worker that drains a queue has payments that are in no source yet.
        let least = if around.is_still(name) { open.least } else { open.least.saturating_sub(TAKEN_MAX) };
        if !(least..=open.most).contains(&figure) || shown.at_least {
            found.push(format!("{name}: {open:?} are open, shown are {shown:?}"));
        }
        let finished = around.finished(name);
        if finished.is_some_and(|finished| !finished.has(shown.finished)) {
            found.push(format!("{name}: {finished:?} have ended, shown are {shown:?}"));
        }
        let metric = around.sample.shown.waiting_metric.as_ref().map(|metric| metric.get(name));
        // This figure excludes requests in flight, so it may be lower by their number.
        if let Some(metric) = metric
            && metric.is_none_or(|metric| *metric > as_float(open.most) || *metric + 64.0 < as_float(open.least))
        {
            found.push(format!("{name}: {open:?} are open, /metrics has {metric:?}"));
        }
    }
    found
}

fn missing_sources(around: &Around<'_>) -> Vec<String> {
    let broker = around.has_been_down(|truth| truth.ready.is_some());
    let database = around.has_been_down(|truth| truth.ledger.is_some());
    if !broker && !database {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (name, shown) in around.providers() {
        if !shown.at_least {
            found.push(format!("{name}: {} wait as if every source had answered", shown.waiting));
        }
        if let Some(ms) = shown.clears_in_ms {
            found.push(format!("{name}: clears in {ms} ms, although the backlog is unknown"));
        }
    }
    let metric = around.sample.shown.waiting_metric.iter().flatten();
    found.extend(metric.map(|(name, value)| format!("{name}: /metrics has {value} waiting")));
    found
}

fn dashboard(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() || !around.no_lost_leases || around.sample.shown.panels.is_empty() {
        return Vec::new();
    }
    let waiting = around.sample.shown.panels.get("Waiting");
    let mut found = Vec::new();
    for (name, _) in around.providers() {
        let Some(open) = around.open(name) else { continue };
        let shown = waiting.and_then(|panel| panel.get(name));
        // A worker has at most its slots in flight, which this panel excludes.
        if shown.is_none_or(|shown| *shown > as_float(open.most) || *shown + 64.0 < as_float(open.least)) {
            found.push(format!("{name}: {open:?} are open, the panel shows {shown:?}"));
        }
    }
    found
}

fn alerts(around: &Around<'_>) -> Vec<String> {
    if !around.is_calm() {
        return Vec::new();
    }
    let shown = around.sample.shown.alerts.iter().flatten();
    shown.filter(|name| !EARNED.contains(&name.as_str())).map(|name| format!("{name} is true")).collect()
}

fn explanations(around: &Around<'_>) -> Vec<String> {
    let shown = around.sample.shown.explained.iter();
    let steady = shown.filter(|job| job.before.is_some() && job.before == job.after && job.state.is_some());
    steady.filter(|job| job.state != job.before).map(|job| format!("{job:?}")).collect()
}

#[allow(clippy::cast_precision_loss, reason = "counts of payments are far below 2^53")]
fn as_float(count: u64) -> f64 {
    count as f64
}
