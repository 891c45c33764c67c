//! Outlook of a job: the jobs ahead of it, its estimated start, and the limit that delays it. And the earliest start of
//! an account's next payment, for `limits peek --account`.
//!
//! There is no estimated start if it cannot be computed: for closed limits, and if the ledger cannot report the usage.
//! In the backlog, the start is the latest of three: by the limits of the provider and the jobs before it, by its
//! account's own limits and the jobs of its account before it, and the end of the block.

use std::time::Duration;

use super::forecast::{ForecastInput, forecast_start};
use super::{
    BacklogPlace, ClaimState, Facts, FlowBlock, GatePosition, JobFacts, LaneFacts, PermitRefusal, cost_of_part,
};
use crate::domain::limit::{Rule, Scope};
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::wait_reason::{BlockReason, WaitReason};

/// Why there is no estimate without a process.
const UNASKED: &str = "no running worker was asked";

/// A start within this time counts as now.
pub const NOW: Duration = Duration::from_millis(20);

/// Estimated start of a job, the limit that delays it, and the jobs ahead.
pub struct Outlook {
    pub queue: QueueView,
    /// The estimated start is not now.
    pub waits: bool,
    pub limited_by: Option<String>,
}

/// What is said about a job's start, and about the jobs ahead of it.
#[derive(Clone, Copy, Default)]
pub struct QueueView {
    /// `None`: there is no estimate.
    pub starts_in: Option<Duration>,
    /// Why there is no estimate, where that is known.
    pub start_unknown: Option<&'static str>,
    pub jobs_ahead: Option<u64>,
    /// Whether `jobs_ahead` was counted in the queue that the job is in.
    pub exact: bool,
}

/// The jobs ahead of a job.
struct JobsAhead {
    jobs: u64,
    /// Their total cost.
    cost: u64,
    /// They were counted in the queue that the job is in.
    exact: bool,
}

fn jobs_ahead(facts: &Facts) -> JobsAhead {
    let before = &facts.ahead;
    let ahead = |jobs, cost, exact| JobsAhead { jobs, cost, exact };
    match &facts.claim {
        ClaimState::AskedWorker { position: Some(position), .. } => ahead(position.before, position.cost_before, true),
        ClaimState::AwaitingEgress { position: bucket, .. } => ahead(bucket.before, bucket.cost_before, true),
        // Between two steps: the job has left one queue and not joined the next.
        ClaimState::AskedWorker { position: None, .. } => ahead(0, 0, false),
        // The lane's queue is behind this job already.
        ClaimState::OtherWorker { .. } => {
            ahead(before.jobs.min(before.active), cost_of_part(before.active, before.jobs, before.cost), false)
        }
        // The place is read by itself, and the two are shown side by side.
        ClaimState::Unclaimed => {
            let in_flow = facts.backlog.as_ref().map_or(0, |place| place.before_in_flow);
            ahead(before.jobs.max(in_flow), before.cost.max(in_flow), false)
        }
    }
}

pub fn outlook(facts: &Facts, job: &JobFacts, kind: CallKind) -> Outlook {
    let position = gate_position(facts);
    let JobsAhead { jobs: before, cost: cost_before, exact } = jobs_ahead(facts);
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    // A job in a bucket has a known egress time, and a job at the gate has left its bucket.
    let passes_buckets = matches!(facts.claim, ClaimState::Unclaimed | ClaimState::OtherWorker { .. });
    let egress = facts.row.provider.as_ref().filter(|_| passes_buckets);
    let jobs_per_second = egress.map(|row| row.egress_per_second() * f64::from(facts.ahead.workers.max(1)));
    let ahead = ForecastInput { jobs_before: before, cost_before, cost, kind, jobs_per_second };
    let estimate = match (&facts.row.spec, &facts.limiter.recent_usage) {
        (Some(spec), Some(past)) => {
            forecast_start(spec, facts.now_micros(), past, &ahead).map(|start| EstimatedStart {
                wait: start.wait,
                limited_by: start.limited_by.map(|index| spec.limit_name(index).to_owned()),
            })
        }
        _ => None,
    };
    let (estimate, mut start_unknown) = match &facts.backlog {
        Some(place) => match start_in_backlog(facts, job, place, estimate, kind) {
            Ok(start) => (Some(start), None),
            Err(why) => (None, Some(why)),
        },
        None => (estimate, None),
    };
    let announced = refused_limit(position.and_then(|position| position.refused.as_ref()))
        .or_else(|| refused_limit(facts.limiter.block.as_ref()));
    let (mut starts_in, by) = estimate.map(|start| (start.wait, start.limited_by)).unzip();
    let mut by: Option<String> = by.flatten();
    if let Some((name, refused)) = announced.filter(|_| start_unknown.is_none()) {
        // The limiter's announcement takes precedence over the estimate: for the first in the queue it is the start.
        let first = before == 0 && position.is_some();
        starts_in = Some(if first { refused.wait } else { starts_in.unwrap_or_default().max(refused.wait) });
        by = by.or_else(|| Some(name.to_owned()));
    }
    if let ClaimState::AwaitingEgress { position: bucket, .. } = &facts.claim
        && starts_in.is_some_and(|start| start <= bucket.leaves_in)
    {
        (starts_in, by) = (Some(bucket.leaves_in), None);
    }
    if facts.is_delayed(job) {
        starts_in = starts_in.map(|start| start.max(facts.until(job.wake_at)));
        by = by.or_else(|| delaying_limit(job).map(str::to_owned));
    }
    // No instant is known at which a request in flight ends.
    let limit = facts.row.spec.as_ref().zip(by.as_deref());
    let counts_in_flight = limit.is_some_and(|(spec, name)| spec.counts_in_flight(name));
    let starts_in = starts_in.filter(|_| !counts_in_flight);
    if counts_in_flight && facts.backlog.is_some() {
        start_unknown = Some(IN_FLIGHT);
    }
    let waits = starts_in.is_none_or(|start| start > NOW);
    // It is not known whether the lane sends at all.
    let starts_in = starts_in.filter(|_| facts.lane != LaneFacts::NotAsked);
    if facts.lane == LaneFacts::NotAsked {
        start_unknown = Some(UNASKED);
    }
    let queue = QueueView { starts_in, start_unknown, jobs_ahead: Some(before), exact };
    Outlook { queue, waits, limited_by: by }
}

/// The limit that delayed this job, if one did.
pub fn delaying_limit(job: &JobFacts) -> Option<&str> {
    job.wait_reason.as_ref()?.limit()
}

pub fn gate_position(facts: &Facts) -> Option<&GatePosition> {
    match &facts.claim {
        ClaimState::AskedWorker { position, .. } => position.as_ref(),
        _ => None,
    }
}

pub fn refused_limit(refused: Option<&PermitRefusal>) -> Option<(&str, &PermitRefusal)> {
    refused.and_then(|refused| match &refused.reason {
        BlockReason::Limit(name) => Some((name.as_str(), refused)),
        _ => None,
    })
}

/// Why no start is known while the provider tests an account.
const TESTED_FIRST: &str =
    "when the block ends, one payment of the account is sent, and its response decides about the others";
/// Why no start is known where the lane keeps the order of accounts.
const IN_ORDER: &str = "the payment of its account before it must be decided first";
const NO_USAGE: &str = "the ledger did not report the recent requests";
const CLOSED: &str = "the limits, as they are now, never allow it";
/// Why no start is known where a limit of requests in flight decides.
const IN_FLIGHT: &str = "nothing names the instant at which a request in flight ends";

/// An estimated start, and the limit that decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EstimatedStart {
    pub wait: Duration,
    pub limited_by: Option<String>,
}

/// Estimated start of a job of the backlog, given the one by the limits of the provider alone.
fn start_in_backlog(
    facts: &Facts,
    job: &JobFacts,
    place: &BacklogPlace,
    by_provider: Option<EstimatedStart>,
    kind: CallKind,
) -> Result<EstimatedStart, &'static str> {
    let block = place.block.as_ref();
    match block.map(|block| &block.wait.reason) {
        Some(WaitReason::Misconfigured | WaitReason::RejectedStreak) => return Err(TESTED_FIRST),
        Some(WaitReason::AccountBlocked) => return Err("a rule of the provider blocks the account"),
        _ => {}
    }
    if place.account_holder.is_some() {
        return Err(IN_ORDER);
    }
    let (Some(spec), Some(_)) = (&facts.row.spec, &facts.limiter.recent_usage) else { return Err(NO_USAGE) };
    let by_provider = by_provider.ok_or(CLOSED)?;
    let by_account = by_account(facts, job, place, spec, kind)?;
    let by_block = block
        .map(|block| EstimatedStart { wait: block.left, limited_by: block.wait.reason.limit().map(str::to_owned) });
    let others = [by_account, by_block].into_iter().flatten();
    Ok(others.fold(by_provider, |latest, other| if other.wait > latest.wait { other } else { latest }))
}

/// Estimated start by the limits of its account; `Ok(None)`: no limit counts the account.
fn by_account(
    facts: &Facts,
    job: &JobFacts,
    place: &BacklogPlace,
    spec: &QuotaSpec,
    kind: CallKind,
) -> Result<Option<EstimatedStart>, &'static str> {
    let Some(own) = job.account.as_deref().and_then(|account| account_spec(spec, account, kind)) else {
        return Ok(None);
    };
    let usage = place.account_usage.as_ref().ok_or(NO_USAGE)?;
    let ahead = ForecastInput {
        jobs_before: place.before_in_flow.saturating_add(place.account_ahead),
        cost_before: place.account_cost_ahead,
        cost: if kind == CallKind::Charge { job.cost } else { 1 },
        kind,
        jobs_per_second: None,
    };
    let start = forecast_start(&own, facts.now_micros(), usage, &ahead).ok_or(CLOSED)?;
    let limited_by = start.limited_by.map(|index| own.limit_name(index).to_owned());
    Ok(Some(EstimatedStart { wait: start.wait, limited_by }))
}

/// The limits that count each account, as the account has them, as a quota of their own; `None`: none counts it.
fn account_spec(spec: &QuotaSpec, account: &str, kind: CallKind) -> Option<QuotaSpec> {
    let subjects = spec.subjects(Some(account), None).ok()?;
    let own = subjects.first()?.limits.iter().filter(|own| !own.exempt);
    let limits: Vec<_> = own
        .filter_map(|own| Some(spec.limits.get(own.index)?.with_subject_limit(own)))
        .filter(|limit| !limit.shadow && kind.is_counted_by(limit.applies_to))
        .map(|mut limit| {
            limit.scope = Scope::Provider;
            limit
        })
        .collect();
    let none = limits.is_empty();
    (!none).then(|| QuotaSpec { limits, account_rules: Vec::new(), pacing: None, ..spec.clone() })
}

/// What the account's next payment depends on.
#[derive(Clone, Debug, Default)]
pub struct NextStartInput {
    /// Payments of the account in the lane's backlog.
    pub waiting: u64,
    /// An operator paused the provider.
    pub paused: bool,
    /// The rule of the quota that blocks or refuses the account, if one does.
    pub rule: Option<Rule>,
    /// The block of each of its flows that have payments; `None`: the flow is not blocked.
    pub blocks: Vec<Option<FlowBlock>>,
    /// The enforced limits that count its charges.
    pub limits: Vec<LimitWait>,
}

/// The next permit of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitWait {
    pub name: String,
    /// Time until a permit of cost 1 may start; `None`: not known, or never.
    pub retry_after: Option<Duration>,
    pub is_closed: bool,
}

/// When the account's next payment starts at the earliest. It is a lower bound, not an estimate: other payments of the
/// lane may come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStart {
    NothingWaits,
    /// Not before this time has passed; zero: now. With what it waits for, if it waits.
    In {
        wait: Duration,
        reason: Option<WaitReason>,
    },
    NotWhilePaused,
    /// A rule of the provider blocks the account.
    NotWhileBlocked,
    /// A rule of the quota refuses the account: its payments end as declined.
    Refused,
    /// The limit is 0.
    Never {
        limit: String,
    },
    /// The limit counts requests in flight, and nothing names the instant at which one ends.
    WhenRequestEnds {
        limit: String,
    },
}

impl NextStartInput {
    pub fn next_start(&self) -> NextStart {
        if self.waiting == 0 {
            return NextStart::NothingWaits;
        }
        match self.rule {
            Some(Rule::Refuse) => return NextStart::Refused,
            Some(Rule::Blocked) => return NextStart::NotWhileBlocked,
            _ => {}
        }
        if let Some(closed) = self.limits.iter().find(|limit| limit.is_closed) {
            return NextStart::Never { limit: closed.name.clone() };
        }
        if self.paused {
            return NextStart::NotWhilePaused;
        }
        let unknown = self.limits.iter().find(|limit| limit.retry_after.is_none());
        if let Some(in_flight) = unknown {
            return NextStart::WhenRequestEnds { limit: in_flight.name.clone() };
        }
        let by_block = self.blocks.iter().map(|block| {
            let reason = block.as_ref().map(|block| block.wait.reason.clone());
            (block.as_ref().map_or(Duration::ZERO, |block| block.left), reason)
        });
        let by_limits = self
            .limits
            .iter()
            .map(|limit| (limit.retry_after.unwrap_or_default(), Some(WaitReason::Limit(limit.name.clone()))));
        // The first of its flows may go, and each limit has to let it pass.
        let first = by_block.min_by_key(|(wait, _)| *wait);
        let latest = first.into_iter().chain(by_limits).max_by_key(|(wait, _)| *wait);
        let (wait, reason) = latest.unwrap_or_default();
        NextStart::In { wait, reason: reason.filter(|_| !wait.is_zero()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::wait_reason::Wait;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn next_start_is_the_latest_of_block_and_limits() {
        let block = |left, reason: WaitReason| Some(FlowBlock { wait: Wait::from(reason), left: ms(left) });
        let own = |left| block(left, WaitReason::Limit("own".to_owned()));
        let limit = |name: &str, retry_after: Option<u64>| LimitWait {
            name: name.to_owned(),
            retry_after: retry_after.map(ms),
            is_closed: false,
        };
        let closed = LimitWait { is_closed: true, ..limit("all", None) };
        let waits = |blocks, limits| NextStartInput { waiting: 3, blocks, limits, ..NextStartInput::default() };
        let after =
            |wait, name: &str| NextStart::In { wait: ms(wait), reason: Some(WaitReason::Limit(name.to_owned())) };
        let now = NextStart::In { wait: Duration::ZERO, reason: None };
        let free = || waits(vec![None], vec![limit("all", Some(0))]);
        for (case, input, wanted) in [
            ("nothing", NextStartInput { waiting: 0, paused: true, ..free() }, NextStart::NothingWaits),
            ("free", free(), now.clone()),
            ("no limit is known", waits(vec![None], Vec::new()), now),
            ("blocked by its limit", waits(vec![own(5_000)], vec![limit("all", Some(0))]), after(5_000, "own")),
            (
                "the first of its flows",
                waits(vec![own(5_000), own(2_000)], vec![limit("all", Some(0))]),
                after(2_000, "own"),
            ),
            (
                "one of its flows is free",
                waits(vec![own(5_000), None], vec![limit("all", Some(900))]),
                after(900, "all"),
            ),
            (
                "the lane is full for longer",
                waits(vec![own(5_000)], vec![limit("all", Some(9_000))]),
                after(9_000, "all"),
            ),
            (
                "refused by the provider",
                waits(vec![block(30_000, WaitReason::Misconfigured)], vec![limit("all", Some(0))]),
                NextStart::In { wait: ms(30_000), reason: Some(WaitReason::Misconfigured) },
            ),
            ("paused", NextStartInput { paused: true, ..free() }, NextStart::NotWhilePaused),
            ("blocked", NextStartInput { rule: Some(Rule::Blocked), ..free() }, NextStart::NotWhileBlocked),
            ("refused", NextStartInput { rule: Some(Rule::Refuse), paused: true, ..free() }, NextStart::Refused),
            (
                "another rule",
                NextStartInput { rule: Some(Rule::Exempt), ..free() },
                NextStart::In { wait: ms(0), reason: None },
            ),
            (
                "closed",
                waits(vec![None], vec![limit("own", Some(3)), closed]),
                NextStart::Never { limit: "all".to_owned() },
            ),
            (
                "requests in flight",
                waits(vec![own(5_000)], vec![limit("slots", None)]),
                NextStart::WhenRequestEnds { limit: "slots".to_owned() },
            ),
        ] {
            assert_eq!(input.next_start(), wanted, "{case}");
        }
    }
}
