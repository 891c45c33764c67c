//! The input of a provider's estimates: clear time, and what misses the cut-off.
//!
//! Waiting jobs and used slots are taken from one moment, that of the last count: between two moments a lane sends, and
//! a slot or a job would count twice. The end of a lane that sends in bursts would shift by the pause between two of
//! them. The estimate is made for that moment, and moved to now. An old count, and one without an answer of the limiter,
//! is compared with the usage of now. Then jobs are subtracted that were sent since, at the rate of the last ten seconds.

use std::time::Duration;

use super::backlog::{ProviderCounts, RATE_WINDOW};
use super::pace::usage_of;
use super::provider_status::{ProviderState, ProviderStatus, provider_status};
use super::{OverviewInput, UsageByQuota};
use crate::domain::clear_time::{
    ClearTime, ClearTimeInput, MissingInput, SendingState, SlotReturns, UsedCount, WaitingJobs, jobs_of,
};
use crate::domain::limit::Limit;
use crate::domain::limit_usage::STILL_USED_STEPS;
use crate::domain::provider::Provider;
use crate::domain::time::EpochMs;
use crate::ledger::throttled::Throttling;
use crate::ledger::upkeep::ProviderReconciliation;

/// Time from a response until it is recorded; often it is less. An estimate with one job too few ends one start early.
/// With one too many it may end a whole pause between two bursts late, because backlogs and limits are round numbers.
const RECORDED_WITHIN: Duration = Duration::from_millis(100);

/// The longest pause that a 429 may ask for, and the time until its outcome is recorded.
const PAUSE_MAX_MS: i64 = 16 * 60_000;

/// Clear time of this provider's backlog with this row: the one in force, or a proposed one.
pub fn clear_time(evidence: &OverviewInput, provider: &Provider) -> ClearTime {
    estimate(evidence, provider, |input| {
        let age_ms = u64::try_from(evidence.at_ms - input.now.0).unwrap_or(0);
        input.clear_time().after(Duration::from_millis(age_ms))
    })
}

/// An estimate from the gathered input, for the moment of [`ClearTimeInput::now`].
pub(super) fn estimate<T>(
    evidence: &OverviewInput,
    provider: &Provider,
    estimate: impl FnOnce(&ClearTimeInput<'_>) -> T,
) -> T {
    let name = provider.name.as_str();
    let status = evidence.row(name).map(|_| provider_status(evidence, name, true));
    let sending = match &status {
        _ if !provider.enabled => SendingState::Disabled,
        _ if provider.paused => SendingState::Paused,
        None => SendingState::Unknown(MissingInput::Row),
        Some(status) => throttled(evidence, provider, status.state).unwrap_or_else(|| flow(status)),
    };
    let counts = QuotaCounts::new(evidence, provider);
    let moment = match sending {
        // Nothing but the limits has held it back since the count.
        SendingState::StartsIn(Duration::ZERO) | SendingState::Throttled { .. } => {
            Moment::of_count(evidence, provider, &counts)
        }
        _ => None,
    };
    let is_running = matches!(status, Some(ProviderStatus { state: ProviderState::Running, .. }));
    let moment = moment.unwrap_or_else(|| Moment::now(evidence, &counts, is_running));
    let usage = |limit: &Limit| {
        let used = usage_of(moment.usage, provider, &limit.name)?;
        // Of a limit that is used up, the next permit starts when the first slot is free again.
        let returns = used.retry_after.map(|first_in| SlotReturns {
            first_in,
            last_in: used.reset_after,
            still_used: used.still_used.clone(),
            step: used.window / STILL_USED_STEPS,
        });
        Some(UsedCount { limit: limit.name.clone(), count: used.used, returns })
    };
    let sent_before = sent_before(evidence, provider);
    let input = ClearTimeInput {
        provider,
        now: EpochMs(moment.at_ms),
        sending,
        waiting: waiting(provider, &counts, moment.sent),
        used_counts: &provider.limits.iter().filter_map(usage).collect::<Vec<_>>(),
        sent_before: &sent_before,
        kept_part: 1.0,
        hold: counts.own.hold(provider),
        lanes: counts.own.lanes,
        recent_rate: evidence.recent_per_s.get(name).copied(),
        cost_per_job: counts.cost_per_job(),
    };
    // What lanes have sent is measured by the limits that they had.
    let in_force = evidence.providers.get(name).map_or(provider, AsRef::as_ref);
    let judged_before = evidence.judged_before.get(name).map_or(&[][..], Vec::as_slice);
    let kept_part = ClearTimeInput { provider: in_force, ..input }.measured_part(judged_before);
    estimate(&ClearTimeInput { kept_part, ..input })
}

/// Counts of a provider, and of those that share its limits.
pub(super) struct QuotaCounts<'a> {
    pub own: ProviderCounts<'a>,
    others: Vec<ProviderCounts<'a>>,
}

impl<'a> QuotaCounts<'a> {
    pub fn new(evidence: &'a OverviewInput, provider: &Provider) -> Self {
        let of = |name: &str| ProviderCounts::new(evidence, name);
        let others = evidence.others_of_quota(provider).map(|other| of(other.name.as_str())).collect();
        Self { own: of(provider.name.as_str()), others }
    }

    pub fn sum(&self, count: impl Fn(&ProviderCounts<'a>) -> u64) -> u64 {
        count(&self.own) + self.others.iter().map(count).sum::<u64>()
    }

    /// Mean cost of the waiting jobs, by those that the ledger has; 1 if it has none.
    #[allow(clippy::cast_precision_loss, reason = "counts of jobs are far below 2^53")]
    pub fn cost_per_job(&self) -> f64 {
        let of_ledger = |count: fn(&ProviderReconciliation) -> u64| {
            self.sum(|counts| counts.reconciliation.as_deref().map_or(0, count)) as f64
        };
        let (jobs, cost) = (of_ledger(ProviderReconciliation::waiting), of_ledger(|account| account.waiting_cost));
        if jobs > 0.0 { (cost / jobs).max(1.0) } else { 1.0 }
    }
}

/// The moment for which an estimate is made.
struct Moment<'a> {
    at_ms: i64,
    usage: &'a UsageByQuota,
    /// Counted jobs that were sent before it, or have their permit.
    sent: u64,
}

impl<'a> Moment<'a> {
    /// The moment of the count; `None`: that is too long ago, or the limiter did not answer then.
    fn of_count(evidence: &'a OverviewInput, provider: &Provider, counts: &QuotaCounts<'_>) -> Option<Self> {
        let usage = evidence.usage_at_count.get(&provider.quota)?;
        let age = count_age(evidence);
        if age > RATE_WINDOW {
            return None;
        }
        // A slot that is still used at the end of a window has a permit without a response. The ledger counts its job as
        // waiting until the request is recorded, shortly before its start.
        let permits = usage.iter().filter_map(|limit| limit.still_used.last()).max().copied().unwrap_or(0);
        let permits = jobs_of(permits, counts.cost_per_job());
        let in_flight = counts.sum(ProviderCounts::in_flight);
        let with_permit = in_flight - responses_to_record(in_flight, counts.own.hold(provider));
        let sent = permits.saturating_sub(with_permit);
        let at_ms = evidence.at_ms - i64::try_from(age.as_millis()).unwrap_or(0);
        Some(Self { at_ms, usage: &evidence.usage_at_count, sent })
    }

    fn now(evidence: &'a OverviewInput, counts: &QuotaCounts<'_>, is_running: bool) -> Self {
        let age = count_age(evidence);
        let sending_for = if is_running { age } else { age.min(RATE_WINDOW) };
        let sent = counts.sum(|counts| counts.sent_within(sending_for));
        Self { at_ms: evidence.at_ms, usage: &evidence.limit_usage, sent }
    }
}

/// Jobs in flight by the ledger whose response is there and not recorded yet: the limiter knows it already.
fn responses_to_record(in_flight: u64, hold: Duration) -> u64 {
    let [part_ms, whole_ms] = [RECORDED_WITHIN, hold + RECORDED_WITHIN].map(|time| time.as_millis());
    let jobs = (u128::from(in_flight) * part_ms + whole_ms / 2) / whole_ms;
    u64::try_from(jobs).unwrap_or(in_flight)
}

/// Time since the jobs were counted: for a large ledger, that may be minutes.
fn count_age(evidence: &OverviewInput) -> Duration {
    let age_ms = evidence.counted_at_ms.map_or(0, |counted_at_ms| evidence.at_ms - counted_at_ms);
    Duration::from_millis(u64::try_from(age_ms).unwrap_or(0))
}

/// Requests of the provider and of those that share its limits.
fn sent_before(evidence: &OverviewInput, provider: &Provider) -> Vec<f64> {
    let sent = |name: &str| evidence.sent_before.get(name).map_or(&[][..], Vec::as_slice);
    let others = evidence.others_of_quota(provider).map(|other| sent(other.name.as_str()));
    others.fold(sent(provider.name.as_str()).to_vec(), |sum, other| {
        sum.iter().zip(other).map(|(first, second)| first + second).collect()
    })
}

/// While the provider refuses requests, its own limit decides, and that of the row says nothing. Providers of one quota
/// share its pauses.
fn throttled(evidence: &OverviewInput, provider: &Provider, state: ProviderState) -> Option<SendingState> {
    let own = evidence.throttling_of(provider.name.as_str());
    let of_others = || evidence.others_of_quota(provider).map(|other| evidence.throttling_of(other.name.as_str()));
    // The pause of a 429 in force: no later 429 came meanwhile.
    let began_pause = |of: Throttling| of.requests > 0 && evidence.at_ms - of.last_at_ms <= PAUSE_MAX_MS;
    let is_throttled = match state {
        ProviderState::PausedByProvider => began_pause(own) || of_others().any(began_pause),
        ProviderState::Throttled | ProviderState::WaitingForLimit | ProviderState::Running | ProviderState::Idle => {
            own.keep_coming || of_others().any(|other| other.keep_coming)
        }
        _ => false,
    };
    is_throttled.then_some(SendingState::Throttled { passed_per_s: own.passed_per_s })
}

fn flow(status: &ProviderStatus) -> SendingState {
    match status.state {
        ProviderState::Disabled => SendingState::Disabled,
        ProviderState::Paused | ProviderState::Held => SendingState::Paused,
        ProviderState::NoWorker | ProviderState::Draining => SendingState::Unknown(MissingInput::Worker),
        ProviderState::BackendUnavailable => SendingState::Unknown(MissingInput::Backend),
        ProviderState::Misconfigured => SendingState::Unknown(MissingInput::Configuration),
        ProviderState::BreakerOpen | ProviderState::Probing => SendingState::BreakerOpen,
        ProviderState::Cold | ProviderState::PausedByProvider => {
            SendingState::StartsIn(Duration::from_millis(status.ends_in_ms.unwrap_or(0)))
        }
        // The estimate itself covers limits.
        ProviderState::Closed
        | ProviderState::Throttled
        | ProviderState::Blocked
        | ProviderState::WaitingForLimit
        | ProviderState::Running
        | ProviderState::Idle => SendingState::StartsIn(Duration::ZERO),
    }
}

/// Waiting jobs. Providers of one quota share its limits, so their backlogs are added. At most half of the backlog
/// counts as sent since the count, because new jobs have come too.
fn waiting(provider: &Provider, counts: &QuotaCounts<'_>, sent: u64) -> WaitingJobs {
    let jobs = counts.sum(ProviderCounts::waiting);
    let reconciliation = counts.own.reconciliation.as_ref();
    WaitingJobs {
        jobs: if counts.own.waiting() == 0 { 0 } else { jobs - sent.min(jobs / 2) },
        missing: counts.own.missing(),
        delayed: reconciliation.map_or(0, |account| account.delayed),
        last_due_in: reconciliation.and_then(|account| account.delayed_for).unwrap_or_default(),
        // A job that an account rule blocks waits in the backlog, or is delayed again and again, until the rule is
        // removed.
        blocked: counts.own.is_blocked(provider),
    }
}
