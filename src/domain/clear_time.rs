//! Clear time of a backlog: one estimate, used by every view.
//!
//! It is an estimate, not a promise: it assumes that no new job arrives. Invariant: a larger backlog never clears
//! sooner, and a higher limit never clears it later (held by `estimates_are_monotone`).
//!
//! Each limit lets a number of jobs out per cycle; `combined` says what several of them let out together. Lanes that have
//! been slower than their limits lately are expected to stay so: `kept_pace` says how fast they are.

use std::time::Duration;

use super::limit::{Algorithm, AppliesTo, Limit, RULE_LIMIT, Scope};
use super::provider::{Pacing, Provider, SlotRelease};
use super::time::EpochMs;

mod combined;
mod kept_pace;
mod missed;
mod slot_returns;

use self::combined::CombinedPace;
use self::kept_pace::kept_per_second;
pub use self::missed::{CutoffForecast, MissedCutoff};
use self::slot_returns::ReturnCurve;

/// Length of a step of [`ClearTimeInput::sent_before`].
pub const SENT_STEP: Duration = Duration::from_secs(10);

/// Clear time of a backlog, or the reason why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum ClearTime {
    In(Duration),
    /// The named limit is 0. `None`: the lanes send nothing.
    Never {
        limit: Option<String>,
    },
    /// An account rule blocks every job that waits.
    NotWhileBlocked,
    /// The provider refuses requests with 429: its own limit decides, and it is not known.
    NotWhileThrottled {
        /// Jobs per second that got through lately, if that is known.
        passed_per_s: Option<f64>,
    },
    NotWhilePaused,
    NotWhileDisabled,
    NotWhileBreakerOpen,
    Unknown(MissingInput),
    /// The named limits count each account or reference separately, and the accounts of the waiting jobs are not known.
    DependsOnAccounts {
        at_least: Duration,
        limits: Vec<String>,
        /// At the rate of the last minutes, if that is known.
        about: Option<Duration>,
    },
}

impl ClearTime {
    /// The same estimate, this long after it was made.
    pub fn after(self, age: Duration) -> Self {
        let left = |time: Duration| time.saturating_sub(age);
        match self {
            Self::In(clears_in) => Self::In(left(clears_in)),
            Self::DependsOnAccounts { at_least, limits, about } => {
                Self::DependsOnAccounts { at_least: left(at_least), limits, about: about.map(left) }
            }
            other => other,
        }
    }
}

/// Input that an estimate needs and does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MissingInput {
    /// No worker sends reports.
    Worker,
    /// The workers cannot reach a backend.
    Backend,
    /// The provider refuses our address, method or credential.
    Configuration,
    /// The broker does not report the length of the queue.
    Queue,
    /// The database does not report the waiting jobs.
    Ledger,
    /// The provider has no valid row.
    Row,
    /// A limit of requests in flight decides, and none was answered lately.
    ResponseTime,
}

/// State of the lane's sending, apart from limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SendingState {
    /// Requests start after this time.
    StartsIn(Duration),
    /// The provider refuses some of the requests that the limits allow.
    Throttled {
        passed_per_s: Option<f64>,
    },
    Paused,
    Disabled,
    BreakerOpen,
    Unknown(MissingInput),
}

/// Jobs that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitingJobs {
    /// Jobs of all providers that share the quota.
    pub jobs: u64,
    /// A source that did not answer: more jobs may wait.
    pub missing: Option<MissingInput>,
    /// Jobs of this provider that wait until they are due.
    pub delayed: u64,
    /// Time until the last delayed job is due.
    pub last_due_in: Duration,
    /// All of them are delayed, and an account rule of the provider blocks them.
    pub blocked: bool,
}

/// Usage of one limit now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedCount {
    pub limit: String,
    pub count: u64,
    /// When the first and the last of the used slots are free again; `None`: within the next cycle of the limit.
    pub returns: Option<SlotReturns>,
}

/// Used slots are free again from the first one to the last one, counted from now: as they were used if that is known,
/// else evenly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotReturns {
    pub first_in: Duration,
    pub last_in: Duration,
    /// Slots that are still used after each step; empty: that is not known.
    pub still_used: Vec<u64>,
    pub step: Duration,
}

/// Input of the estimate.
#[derive(Clone, Copy, Debug)]
pub struct ClearTimeInput<'a> {
    pub provider: &'a Provider,
    pub now: EpochMs,
    pub sending: SendingState,
    pub waiting: WaitingJobs,
    /// A limit that is not named counts as unused.
    pub used_counts: &'a [UsedCount],
    /// Requests that all providers of the quota sent in each [`SENT_STEP`] until now, the last step first. It ends where
    /// they are not known.
    pub sent_before: &'a [f64],
    /// The part of the limits' pace that the lanes keep, at most 1; see [`Self::measured_part`].
    pub kept_part: f64,
    /// From a request's start to its response.
    pub hold: Duration,
    /// Live workers that run the lane.
    pub lanes: u32,
    /// Jobs per second over the last minutes.
    pub recent_rate: Option<f64>,
    /// Mean cost of the jobs: limits count costs, and lanes and backlogs count jobs. At least 1.
    pub cost_per_job: f64,
}

impl ClearTimeInput<'_> {
    /// Estimates when the backlog is cleared.
    pub fn clear_time(&self) -> ClearTime {
        let WaitingJobs { jobs, missing, last_due_in, blocked, delayed: _ } = self.waiting;
        if jobs == 0 && missing.is_none() {
            return ClearTime::In(Duration::ZERO);
        }
        let starts_in = match self.sending {
            SendingState::StartsIn(starts_in) => starts_in,
            SendingState::Throttled { .. } => Duration::ZERO,
            SendingState::Paused => return ClearTime::NotWhilePaused,
            SendingState::Disabled => return ClearTime::NotWhileDisabled,
            SendingState::BreakerOpen => return ClearTime::NotWhileBreakerOpen,
            SendingState::Unknown(missing) => return ClearTime::Unknown(missing),
        };
        if let Some(limit) = closed_limit(self.provider) {
            return ClearTime::Never { limit: Some(limit) };
        }
        if let Some(missing) = missing {
            return ClearTime::Unknown(missing);
        }
        if blocked {
            return ClearTime::NotWhileBlocked;
        }
        if let SendingState::Throttled { passed_per_s } = self.sending {
            return ClearTime::NotWhileThrottled { passed_per_s };
        }
        if self.hold.is_zero() && self.provider.in_flight_max().is_some() {
            return ClearTime::Unknown(MissingInput::ResponseTime);
        }
        let Some(pace) = SendPace::new(self) else { return ClearTime::Never { limit: None } };
        let clears_in = starts_in.saturating_add(pace.sent_in(jobs)).max(last_due_in);
        let limits = limits_by_account(self.provider);
        if limits.is_empty() {
            return ClearTime::In(clears_in);
        }
        let about = self.recent_rate.and_then(|rate| time_at_rate(jobs, rate)).map(|about| about.max(clears_in));
        ClearTime::DependsOnAccounts { at_least: clears_in, limits, about }
    }
}

/// The name of a limit of 0 that applies to every charge.
fn closed_limit(provider: &Provider) -> Option<String> {
    let mut holding = provider.limits.iter().filter(|limit| limit.applies_to_every_charge());
    holding.find(|limit| provider.after_reserve(limit.rate.max_requests()) == 0).map(|limit| limit.name.clone())
}

/// Names of the limits that apply to charges and count each account or reference separately.
pub fn limits_by_account(provider: &Provider) -> Vec<String> {
    let holding = provider.limits.iter().filter(|limit| !limit.shadow && limit.applies_to != AppliesTo::Lookup);
    let names = holding.filter(|limit| limit.scope != Scope::Provider).map(|limit| limit.name.clone());
    names.chain(provider.rule_limit_window().map(|_| RULE_LIMIT.to_owned())).collect()
}

/// How fast a backlog is sent, by the limits and the lanes. It does not depend on the number of jobs.
struct SendPace {
    combined: CombinedPace,
    /// Seconds from the last start to its response.
    hold: f64,
}

impl SendPace {
    /// `None`: nothing is sent.
    fn new(input: &ClearTimeInput<'_>) -> Option<Self> {
        let per_second = steady_rate(input)?;
        let limits = limit_paces(input);
        let per_second = kept_per_second(input.kept_part, &limits, per_second);
        Some(Self { combined: CombinedPace::new(limits, per_second), hold: input.hold.as_secs_f64() })
    }

    /// Time until `jobs` are sent and the last is answered.
    fn sent_in(&self, jobs: u64) -> Duration {
        duration(self.combined.seconds(jobs) + self.hold)
    }
}

/// Time that a backlog takes at this rate; `None`: it never ends.
fn time_at_rate(jobs: u64, per_second: f64) -> Option<Duration> {
    (per_second > 0.0).then(|| duration(float(jobs) / per_second))
}

/// Jobs per second that all lanes let out without any limit: by their egress rate and their worker slots.
fn steady_rate(input: &ClearTimeInput<'_>) -> Option<f64> {
    let lanes = f64::from(input.lanes.max(1));
    let egress = input.provider.egress_per_second() * lanes;
    let hold = input.hold.as_secs_f64();
    let slots = if hold > 0.0 { f64::from(input.provider.workers) * lanes / hold } else { f64::INFINITY };
    Some(egress.min(slots)).filter(|rate| *rate > 0.0)
}

/// The paces of the limits that hold every charge back.
fn limit_paces(input: &ClearTimeInput<'_>) -> Vec<LimitPace> {
    let holding = input.provider.limits.iter().filter(|limit| limit.applies_to_every_charge());
    let mut limits: Vec<LimitPace> = holding.map(|limit| LimitPace::new(input, limit)).collect();
    limits.extend(even_pacing(input.provider, input.cost_per_job));
    limits
}

/// The spacing by the tightest limit, if starts are spread evenly.
fn even_pacing(provider: &Provider, cost_per_job: f64) -> Option<LimitPace> {
    let tightest = provider.tightest_rate().filter(|_| provider.pacing == Pacing::Even)?;
    let per_cycle = u64::from(provider.after_reserve(tightest.max_requests())).max(1);
    let window = tightest.window().as_secs_f64();
    // As the spacing of one job, it comes before every window.
    let kind = PaceKind::Spaced { at_once: 1, cost: cost_per_job };
    Some(LimitPace { per_cycle: 1, cycle: window / float(per_cycle), kind })
}

/// Pace of one limit.
#[derive(Clone, Debug)]
struct LimitPace {
    /// Jobs per cycle, at least 1.
    per_cycle: u64,
    /// Seconds.
    cycle: f64,
    kind: PaceKind,
}

#[derive(Clone, Debug)]
enum PaceKind {
    /// All that are free go at once, then one after the other; `cost` counts in the cycle for each of them.
    Spaced { at_once: u64, cost: f64 },
    /// All that are free go at once. Used slots are free again within a cycle.
    Sliding { free: u64, returns: ReturnCurve },
    /// All of a window at once, when it begins. The first one begins in `ends_in` seconds.
    Aligned { free: u64, ends_in: f64 },
}

impl LimitPace {
    fn new(input: &ClearTimeInput<'_>, limit: &Limit) -> Self {
        let provider = input.provider;
        let share = |count: u32| u64::from(provider.after_reserve(count));
        let jobs = |cost: u64| jobs_of(cost, input.cost_per_job);
        let max = share(limit.rate.max_requests()).max(1);
        let per_cycle = jobs(max).max(1);
        let used = input.used_counts.iter().find(|used| used.limit == limit.name);
        let returns = used.and_then(|used| used.returns.as_ref());
        let used = used.map_or(0, |used| used.count);
        let free = jobs(share(limit.capacity()).saturating_sub(used));
        let window = limit.rate.window();
        let cycle = match (limit.algorithm, provider.slot_release) {
            (Algorithm::SlidingLog, SlotRelease::Response) | (Algorithm::Concurrency, _) => window + input.hold,
            (Algorithm::SlidingLog, SlotRelease::Grant { transit_jitter }) => window + transit_jitter,
            _ => window,
        };
        let kind = match limit.algorithm {
            // It fills up without windows, so that no part of one is left over.
            Algorithm::TokenBucket | Algorithm::Gcra => {
                let kind = PaceKind::Spaced { at_once: free, cost: input.cost_per_job };
                return Self { per_cycle: max, cycle: cycle.as_secs_f64(), kind };
            }
            Algorithm::FixedWindow => {
                let window_ms = window.as_millis().max(1);
                let now = u128::try_from(input.now.0).unwrap_or(0) + window_ms;
                let gone = now.saturating_sub(limit.offset.as_millis()) % window_ms;
                let ends_in = Duration::from_millis(u64::try_from(window_ms - gone).unwrap_or(u64::MAX));
                PaceKind::Aligned { free: free.min(per_cycle), ends_in: ends_in.as_secs_f64() }
            }
            Algorithm::SlidingLog | Algorithm::SlidingWindow | Algorithm::Concurrency => {
                let returns = ReturnCurve::new(returns, used, cycle);
                PaceKind::Sliding { free: free.min(per_cycle), returns }
            }
        };
        Self { per_cycle, cycle: cycle.as_secs_f64(), kind }
    }

    /// Seconds until the `n`th job has a permit by this limit alone.
    fn permit_time(&self, n: u64) -> f64 {
        let (cycles, place) = self.cycle_of(n).unwrap_or_default();
        match &self.kind {
            PaceKind::Spaced { at_once, cost } => {
                float(n.saturating_sub(*at_once)) * cost / float(self.per_cycle) * self.cycle
            }
            // Whole cycles, then a last one: first the slots that are free now, then those that are used now.
            PaceKind::Sliding { free, .. } if place <= *free => cycles,
            PaceKind::Sliding { free, returns } => {
                let used = (self.per_cycle - free).max(1);
                cycles + returns.time_of(float(place - free) / float(used))
            }
            PaceKind::Aligned { .. } => cycles,
        }
    }

    /// Jobs that are let out in the first cycle.
    fn free(&self) -> u64 {
        match self.kind {
            PaceKind::Spaced { at_once: free, .. }
            | PaceKind::Sliding { free, .. }
            | PaceKind::Aligned { free, .. } => free,
        }
    }

    /// Seconds until the second window begins, and the place of the `n`th job among those that wait for it.
    fn behind_first_window(&self, n: u64) -> Option<(f64, u64)> {
        match self.kind {
            PaceKind::Aligned { free, ends_in } if n > free => Some((ends_in, n - free)),
            _ => None,
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

/// Jobs of this mean cost that fit into a cost: a job that does not fit waits, and leaves a rest.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and no more than the cost")]
pub fn jobs_of(cost: u64, cost_per_job: f64) -> u64 {
    (float(cost) / cost_per_job.max(1.0)) as u64
}

#[allow(clippy::cast_precision_loss, reason = "counts of jobs are far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Saturates: a backlog may take longer than a duration can hold.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
