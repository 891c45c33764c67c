//! Specification of a quota: its limits and rules, and the counters that follow.
//!
//! There are four kinds of counter: a log of uses (sliding log, sliding window), a counter per window (fixed window),
//! a theoretical arrival time (token bucket, GCRA, pacing), and requests in flight (concurrency). The counting is
//! done in [`super::quota`].

use std::time::Duration;

use super::egress::Allowance;
use super::limit::{AccountRule, Algorithm, AppliesTo, RULE_LIMIT, Rate, Rule, Scope};
use super::permit_protocol::{CallKind, Subject, SubjectLimit};
use super::provider::{BOOKING_HORIZON, Pacing, ProviderName, StoreDown};
use super::time::micros_up;

pub use self::counter_spec::{CounterKind, CounterSpec, DEBT_PARTS, WINDOW_BUCKETS};

use self::counter_spec::SPACING;

mod counter_spec;

/// Parts of a microsecond in which a bucket's interval is counted.
pub const INTERVAL_PARTS: u64 = 1_024;
/// When a caller asks again that a concurrency limit has refused. Its own releases wake it up at once; those of other
/// processes it only finds out by asking.
pub const CONCURRENCY_RETRY: Duration = Duration::from_millis(50);
/// Name of even pacing in a refusal. It contains a blank, which no limit's name can have.
pub const PACING: &str = "even pacing";

/// Range of past usage that a limiter which lost its state reads from the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookback {
    /// Uses that ended within this time may count under an enforced limit of the provider: every use matters.
    pub count_within: Duration,
    /// Uses that ended within this time may count under some limit. Beyond [`Self::count_within`] it only matters
    /// whether there were any. Never shorter than that.
    pub notice_within: Duration,
}

impl Lookback {
    /// All uses within one time.
    pub fn all(within: Duration) -> Self {
        Self { count_within: within, notice_within: within }
    }
}

/// Accounts or references whose uses are read from the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectQuery {
    /// [`Scope::Account`] or [`Scope::Reference`].
    pub scope: Scope,
    /// Names as in the jobs.
    pub names: Vec<String>,
    /// Uses that ended longer ago are left out.
    pub within: Duration,
}

/// One limit as the limiter counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    pub name: String,
    pub algorithm: Algorithm,
    pub scope: Scope,
    pub applies_to: AppliesTo,
    /// The limit counts and reports, and never refuses.
    pub shadow: bool,
    /// Requests per window or in flight, after the reserve is taken off; 0 means closed.
    pub max_requests: u32,
    /// Zero for [`Algorithm::Concurrency`].
    pub window: Duration,
    /// Start of fixed windows relative to the Unix epoch.
    pub offset: Duration,
    /// Requests that may come at once: of a token bucket in all, of GCRA beyond the first.
    pub burst: Option<u32>,
}

impl LimitSpec {
    /// An exact limit on all calls that the provider counts.
    pub fn sliding_log(name: impl Into<String>, max_requests: u32, window: Duration) -> Self {
        Self {
            name: name.into(),
            algorithm: Algorithm::SlidingLog,
            scope: Scope::Provider,
            applies_to: AppliesTo::All,
            shadow: false,
            max_requests,
            window,
            offset: Duration::ZERO,
            burst: None,
        }
    }

    /// The limit that counts accounts by their rules alone. An account without a rule is exempt; its counter must exist,
    /// so that a rule that comes later finds what was not counted. It needs no room in that log.
    pub fn of_rules(longest_window: Duration) -> Self {
        Self { scope: Scope::Account, ..Self::sliding_log(RULE_LIMIT, 1, longest_window) }
    }

    /// Whether only rules give it numbers ([`Self::of_rules`]).
    pub fn is_of_rules(&self) -> bool {
        self.name == RULE_LIMIT
    }

    /// The limit as it applies to a subject without a rule; `None`: it is exempt.
    pub fn without_rule(&self) -> Option<Self> {
        (!self.is_of_rules()).then(|| self.clone())
    }

    /// At most so many requests in flight.
    pub fn concurrency(name: impl Into<String>, max_requests: u32) -> Self {
        let algorithm = Algorithm::Concurrency;
        Self { algorithm, ..Self::sliding_log(name, max_requests, Duration::ZERO) }
    }

    /// Its numbers; `None`: it has no window.
    pub fn allowance(&self) -> Option<Allowance> {
        (self.algorithm != Algorithm::Concurrency).then(|| Allowance {
            algorithm: self.algorithm,
            max_requests: self.max_requests,
            at_once: self.cost_max(),
            window: self.window,
            counts_lookups: self.applies_to == AppliesTo::All,
        })
    }

    /// What it allows; `None`: its numbers are no rate.
    pub fn rate(&self) -> Option<Rate> {
        let at_once = self.algorithm == Algorithm::Concurrency;
        if at_once { Rate::at_once(self.max_requests) } else { Rate::new(self.max_requests, self.window) }.ok()
    }

    /// The window in microseconds, plus 2 ms and 0.05 %, which covers what the comparison of clocks cannot see.
    pub fn padded_window_us(&self) -> u64 {
        padded_us(micros_up(self.window))
    }

    /// The largest cost that this limit can ever admit.
    pub fn cost_max(&self) -> u32 {
        self.algorithm.burst_capacity(self.max_requests, self.burst)
    }

    /// The limit with a subject's own numbers.
    pub fn with_subject_limit(&self, own: &SubjectLimit) -> Self {
        let SubjectLimit { max_requests, window, burst, .. } = *own;
        Self { max_requests, window, burst, ..self.clone() }
    }

    /// The stricter combination of two rows for one limit: the lower numbers, and the smaller capacity. A number that a
    /// row leaves out is its algorithm's default.
    pub fn stricter_of(&self, other: &Self) -> Self {
        let at_once = self.cost_max().min(other.cost_max());
        let says_burst = self.burst.is_some() || other.burst.is_some();
        Self {
            burst: says_burst.then(|| self.algorithm.burst_for_capacity(at_once)),
            max_requests: self.max_requests.min(other.max_requests),
            window: self.window.max(other.window),
            ..self.clone()
        }
    }
}

/// The limit as it applies to an account under a rule; `None`: the rule exempts the account. Numbers of a window do not
/// apply to requests in flight, nor the other way round: then the limit's own do.
pub fn limit_under_rule(rule: Rule, limit: &LimitSpec) -> Option<LimitSpec> {
    let (max_requests, window, burst) = match rule {
        Rule::Limit(own) if own.rate.is_at_once() != (limit.algorithm == Algorithm::Concurrency) => {
            return limit.without_rule();
        }
        Rule::Exempt => return None,
        // Its look-ups count as those of any account.
        Rule::Refuse => return limit.without_rule(),
        Rule::Limit(own) => (own.rate.max_requests(), own.rate.window(), own.burst),
        Rule::Blocked => (0, limit.window, limit.burst),
    };
    // A rule on several limits gives its burst only to those that can have one.
    let has_burst = matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
    Some(LimitSpec { max_requests, window, burst: burst.filter(|_| has_burst), ..limit.clone() })
}

/// Part of the transit jitter that a late start may use; the rest is for the transit. A start 49 ms late, of 50, was
/// counted less than a window before the next use of its slot on a busy machine.
const START_SHARE: f64 = 0.8;

/// Limits and rules of a quota, at one settings version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSpec {
    pub quota: ProviderName,
    pub version: i64,
    /// Sorted by name; never empty.
    pub limits: Vec<LimitSpec>,
    pub account_rules: Vec<AccountRule>,
    /// How starts are spaced, in all workers together: by the mean rate of the slowest limit, or by what the tightest
    /// one allows within a second. `None`: they are not.
    pub pacing: Option<Pacing>,
    /// `None`: a slot is held until the response. `Some(jitter)`: it is freed by the start plus this allowance.
    pub grant_jitter: Option<Duration>,
    /// Longest time from the start until the provider counts the request.
    pub hold_max: Duration,
    /// Time after its start at which a permit may still be used.
    pub send_budget: Duration,
    /// Grants of the workers while the store is unavailable.
    pub store_down: StoreDown,
    /// Providers whose rows name this quota, sorted by name.
    pub members: Vec<ProviderName>,
    /// When an operator ended the waits that the provider had named, in epoch milliseconds; 0: never. A change ends a
    /// pause that the limiter keeps.
    pub resumed_at: u64,
    /// Time after the start of a state in which another limiter leader may still grant permits, because it has not
    /// noticed the change. Zero if there is never another one.
    pub handover: Duration,
}

/// Longest time by the store's clock while `us` pass by another clock, as far as their comparison can tell.
pub fn padded_us(us: u64) -> u64 {
    us + 2_000 + us.div_ceil(2_000)
}

/// An operator's rule blocks this account: none of its jobs is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked;

impl QuotaSpec {
    /// Whether a rule refuses the charges of this account. Its look-ups count against the usual limits.
    pub fn refuses_charges_of(&self, account: Option<&str>) -> bool {
        let mut rules = self.account_rules.iter().filter(|rule| rule.rule == Rule::Refuse);
        rules.any(|rule| Some(rule.account.as_str()) == account)
    }

    /// Whether both allow the same number of requests. The other settings of a row free no slot: the longest hold, for
    /// example, or what is granted while the store is unavailable.
    pub fn has_same_allowance(&self, other: &Self) -> bool {
        let as_other = Self {
            version: other.version,
            hold_max: other.hold_max,
            send_budget: other.send_budget,
            store_down: other.store_down,
            members: other.members.clone(),
            handover: other.handover,
            resumed_at: other.resumed_at,
            ..self.clone()
        };
        as_other == *other
    }

    /// Time after its start at which a permit may be used. The transit jitter covers a late start and the transit
    /// together: a start may use [`START_SHARE`] of it.
    pub fn use_within(&self) -> Duration {
        self.grant_jitter.map_or(self.send_budget, |jitter| jitter.mul_f64(START_SHARE).min(self.send_budget))
    }

    /// Spec indices of the limits that count all calls together, in the order of their counters.
    pub fn provider_limits(&self) -> Vec<usize> {
        let all = self.limits.iter().enumerate().filter(|(_, limit)| limit.scope == Scope::Provider);
        all.map(|(index, _)| index).chain(self.pacing().map(|_| self.limits.len())).collect()
    }

    /// Counters of all calls together, in the order of [`Self::provider_limits`].
    pub fn provider_counters(&self) -> Vec<CounterSpec> {
        let held = self.grant_jitter.is_none();
        let all = self.limits.iter().filter(|limit| limit.scope == Scope::Provider);
        let counters = all.map(|limit| limit.counter_spec(held));
        counters.chain(self.pacing()).collect()
    }

    /// The names of [`Self::provider_counters`], each once.
    pub fn provider_counter_names(&self) -> Vec<&str> {
        let limits = self.limits.iter().filter(|limit| limit.scope == Scope::Provider);
        limits.map(|limit| limit.name.as_str()).chain(self.pacing().map(|_| SPACING)).collect()
    }

    /// Counters of one subject's calls, in the order of its limits.
    pub fn subject_counters(&self, subject: &Subject) -> Vec<CounterSpec> {
        let held = self.grant_jitter.is_none();
        let counter = |own: &SubjectLimit| {
            let spec = self.limits.get(own.index)?.with_subject_limit(own).counter_spec(held && !own.exempt);
            Some(CounterSpec { shadow: spec.shadow || own.exempt, ..spec })
        };
        subject.limits.iter().filter_map(counter).collect()
    }

    /// The subjects that a job's calls are counted for; a name without a limit is none. Both names become parts of
    /// keys, so they must be plain (`A-Z a-z 0-9 _ -`, at most 64).
    pub fn subjects(&self, account: Option<&str>, reference: Option<&str>) -> Result<Vec<Subject>, Blocked> {
        let rules = || self.account_rules.iter().filter(|rule| Some(rule.account.as_str()) == account);
        if rules().any(|rule| rule.rule == Rule::Blocked) {
            return Err(Blocked);
        }
        let mut subjects = Vec::new();
        for (scope, prefix, name) in [(Scope::Account, "account", account), (Scope::Reference, "reference", reference)]
        {
            let Some(name) = name else { continue };
            let limits: Vec<SubjectLimit> = self
                .limits
                .iter()
                .enumerate()
                .filter(|(_, limit)| limit.scope == scope)
                .map(|(index, limit)| {
                    // A rule that names the limit takes precedence.
                    let named = |rule: &&AccountRule| rule.limit.as_deref() == Some(limit.name.as_str());
                    let general = |rule: &&AccountRule| rule.limit.is_none();
                    let rule = rules().find(named).or_else(|| rules().find(general));
                    let rule = rule.filter(|_| scope == Scope::Account).map(|rule| rule.rule);
                    let own = rule.map_or_else(|| limit.without_rule(), |rule| limit_under_rule(rule, limit));
                    let exempt = own.is_none();
                    let LimitSpec { max_requests, window, burst, .. } = own.unwrap_or_else(|| limit.clone());
                    SubjectLimit { index, max_requests, window, burst, exempt }
                })
                .collect();
            if !limits.is_empty() {
                subjects.push(Subject { key: format!("{prefix}:{name}"), limits });
            }
        }
        Ok(subjects)
    }

    /// Scope of the limits that count a subject.
    pub fn scope_of(&self, subject: &Subject) -> Scope {
        let first = subject.limits.first().and_then(|own| self.limits.get(own.index));
        first.map_or(Scope::Provider, |limit| limit.scope)
    }

    /// Longest time after its grant at which a use may begin to count.
    pub fn count_delay_max_us(&self) -> u64 {
        micros_up(BOOKING_HORIZON) + micros_up(self.hold_max)
    }

    /// Longest time after its grant at which a permit may start.
    pub fn start_delay_max_us(&self) -> u64 {
        micros_up(BOOKING_HORIZON) + micros_up(self.send_budget)
    }

    /// Name of the limit at an index of a reply. Behind the limits' it is the spacing's: even pacing, or the limit from
    /// which the rate of starts follows.
    pub fn limit_name(&self, index: usize) -> &str {
        let paced = || self.burst_pace().filter(|_| self.pacing == Some(Pacing::Burst)).map(|(limit, _)| limit);
        self.limits.get(index).or_else(paced).map_or(PACING, |limit| limit.name.as_str())
    }

    /// Whether the limit of this name counts requests in flight, so that each release may let the next one start.
    pub fn counts_in_flight(&self, name: &str) -> bool {
        let mut limits = self.limits.iter();
        limits.any(|limit| limit.name == name && limit.algorithm == Algorithm::Concurrency)
    }

    /// Whether a waiter may get the slot of a release at once, because an enforced limit counts requests in flight.
    pub fn releases_are_urgent(&self) -> bool {
        self.limits.iter().any(|limit| limit.algorithm == Algorithm::Concurrency && !limit.shadow)
    }

    /// Longest time that any use can count: after it, a limiter without memory knows as much as one with it.
    pub fn longest_window_us(&self) -> u64 {
        Scope::ALL.into_iter().map(|scope| self.longest_window_of_us(scope)).max().unwrap_or(0)
    }

    /// Longest time that a use can count under the limits of a scope; 0: the scope has none.
    pub fn longest_window_of_us(&self, scope: Scope) -> u64 {
        let limits = || self.limits.iter().filter(|limit| limit.scope == scope);
        let rules = self.account_rules.iter().filter(|_| scope == Scope::Account);
        let ruled = rules.flat_map(|rule| {
            let named = limits().filter(|limit| rule.limit.as_ref().is_none_or(|name| *name == limit.name));
            named.filter_map(|limit| limit_under_rule(rule.rule, limit))
        });
        limits().cloned().chain(ruled).map(|limit| limit.counter_spec(true).window_us).max().unwrap_or(0)
    }

    /// Length of a cold start: how long after its state was lost a limiter grants nothing. It covers the handover,
    /// starts that were booked, their longest hold, and the longest window.
    pub fn cold_start_us(&self) -> u64 {
        self.longest_window_us() + self.lag_us()
    }

    /// How far back the ledger must be read after a loss. Shadow limits do not matter: they restart from zero, and so
    /// does a limit that was a shadow. Accounts and references wait unless nothing was used.
    pub fn lookback(&self) -> Lookback {
        let enforced = self.provider_counters().into_iter().filter(|counter| !counter.shadow);
        let longest_us = enforced.map(|counter| counter.window_us).max().unwrap_or(0);
        Lookback {
            count_within: Duration::from_micros(longest_us + self.lag_us()),
            notice_within: Duration::from_micros(self.cold_start_us()),
        }
    }

    /// Longest time after the loss of a state at which a use granted before the loss may begin to count.
    pub fn lag_us(&self) -> u64 {
        micros_up(self.hold_max) + micros_up(BOOKING_HORIZON) + micros_up(self.handover)
    }

    /// The largest cost that can ever be granted to a call of this kind and these subjects.
    pub fn cost_max(&self, kind: CallKind, subjects: &[Subject]) -> u32 {
        self.tightest_limit(kind, subjects).map_or(0, |(_, at_once)| at_once)
    }

    /// The limit with the smallest capacity among those that count such a call, and this capacity.
    pub fn tightest_limit(&self, kind: CallKind, subjects: &[Subject]) -> Option<(String, u32)> {
        let provider = self.provider_counters();
        let own = subjects.iter().flat_map(|subject| self.subject_counters(subject));
        let counters = provider.into_iter().filter(|counter| !counter.is_pacing()).chain(own);
        counters
            .filter(|counter| !counter.shadow && counter.applies(kind))
            .map(|counter| (counter.name, counter.max))
            .min_by_key(|(_, max)| *max)
    }
}

#[cfg(test)]
#[path = "quota_spec_tests.rs"]
mod tests;
