//! Limits that a job waits for, and its place among other jobs: `600 used, estimated start …, 37 ahead of it`.
//!
//! There is no estimated start if it cannot be computed: for closed limits, and if the ledger cannot report the usage.

use std::time::Duration;

use super::backlog::{self, EstimatedStart};
use super::facts::{ClaimState, Facts, GatePosition, JobFacts, LaneFacts, PermitRefusal, PermitRefusalReason};
use super::forecast::{self, ForecastInput};
use super::pending::{is_delayed, later};
use super::{BlockedAt, CheckResult, format};
use crate::domain::limit::{Algorithm, AppliesTo, Scope, limit_text};
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::{LimitSpec, PACING, QuotaSpec};
use crate::domain::wait_reason::WaitReason;

/// Why there is no estimate without a process.
const UNASKED: &str = "no running worker was asked";

/// A start within this time counts as now.
const NOW: Duration = Duration::from_millis(20);

/// Estimated start of a job, the limit that delays it, and the jobs ahead.
pub(super) struct Outlook {
    /// `None`: there is no estimate.
    pub starts_in: Option<Duration>,
    /// The estimated start is not now.
    waits: bool,
    pub limited_by: Option<String>,
    /// Why there is no estimate, where that is known.
    start_unknown: Option<&'static str>,
    pub jobs_ahead: u64,
    /// Whether `jobs_ahead` was counted in the queue that the job is in.
    pub exact: bool,
}

impl Outlook {
    fn queue(&self) -> QueueView {
        QueueView {
            starts_in: self.starts_in,
            start_unknown: self.start_unknown,
            jobs_ahead: Some(self.jobs_ahead),
            exact: self.exact,
        }
    }
}

/// What is said about a job's start, and about the jobs ahead of it.
#[derive(Clone, Copy, Default)]
struct QueueView {
    starts_in: Option<Duration>,
    start_unknown: Option<&'static str>,
    jobs_ahead: Option<u64>,
    exact: bool,
}

/// The limit that delayed this job, if one did.
pub(super) fn delaying_limit(job: &JobFacts) -> Option<&str> {
    job.wait_reason.as_ref()?.limit()
}

pub(super) fn delayed_as_blocked(job: &JobFacts) -> bool {
    job.wait_reason == Some(WaitReason::AccountBlocked)
}

fn gate_position(facts: &Facts) -> Option<&GatePosition> {
    match &facts.claim {
        ClaimState::AskedWorker { position, .. } => position.as_ref(),
        _ => None,
    }
}

fn refused_limit(refused: Option<&PermitRefusal>) -> Option<(&str, &PermitRefusal)> {
    refused.and_then(|refused| match &refused.reason {
        PermitRefusalReason::Limit(name) => Some((name.as_str(), refused)),
        _ => None,
    })
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
        ClaimState::AwaitingEgress { position: bucket, .. } => ahead(bucket.before, bucket.before, true),
        // Between two steps: the job has left one queue and not joined the next.
        ClaimState::AskedWorker { position: None, .. } => ahead(0, 0, false),
        // The lane's queue is behind this job already.
        ClaimState::OtherWorker { .. } => ahead(before.jobs.min(before.active), before.cost.min(before.active), false),
        ClaimState::Unclaimed => ahead(before.jobs, before.cost, false),
    }
}

pub(super) fn outlook(facts: &Facts, job: &JobFacts, kind: CallKind) -> Outlook {
    let position = gate_position(facts);
    let JobsAhead { jobs: before, cost: cost_before, exact } = jobs_ahead(facts);
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    // A job in a bucket has a known egress time, and a job at the gate has left its bucket.
    let passes_buckets = matches!(facts.claim, ClaimState::Unclaimed | ClaimState::OtherWorker { .. });
    let egress = facts.row.provider.as_ref().filter(|_| passes_buckets);
    let jobs_per_second = egress.map(|row| row.egress_per_second() * f64::from(facts.ahead.workers.max(1)));
    let ahead = ForecastInput { cost_before, cost, kind, jobs_per_second };
    let estimate = match (&facts.row.spec, &facts.limiter.recent_usage) {
        (Some(spec), Some(past)) => {
            forecast::forecast_start(spec, facts.now_micros(), past, &ahead).map(|start| EstimatedStart {
                wait: start.wait,
                limited_by: start.limited_by.map(|index| spec.limit_name(index).to_owned()),
            })
        }
        _ => None,
    };
    let (estimate, mut start_unknown) = match &facts.backlog {
        Some(place) => match backlog::start(facts, job, place, estimate, kind) {
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
    if is_delayed(facts, job) {
        starts_in = starts_in.map(|start| start.max(facts.until(job.wake_at)));
        by = by.or_else(|| delaying_limit(job).map(str::to_owned));
    }
    // No instant is known at which a request in flight ends.
    let limit = facts.row.spec.as_ref().zip(by.as_deref());
    let counts_in_flight = limit.is_some_and(|(spec, name)| spec.counts_in_flight(name));
    let starts_in = starts_in.filter(|_| !counts_in_flight);
    if counts_in_flight && facts.backlog.is_some() {
        start_unknown = Some(backlog::IN_FLIGHT);
    }
    let waits = starts_in.is_none_or(|start| start > NOW);
    // It is not known whether the lane sends at all.
    let starts_in = starts_in.filter(|_| facts.lane != LaneFacts::NotAsked);
    if facts.lane == LaneFacts::NotAsked {
        start_unknown = Some(UNASKED);
    }
    Outlook { starts_in, waits, limited_by: by, start_unknown, jobs_ahead: before, exact }
}

/// Check of the rules and limits of the job's account and reference.
pub(super) fn account(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
    let Some(spec) = &facts.row.spec else { return CheckResult::passed("not known") };
    let name = job.account.as_deref().unwrap_or_default();
    if spec.subjects(job.account.as_deref(), None).is_err() {
        let text = format!(
            "account {name} is blocked by a rule of {}: its jobs are not sent while the rule exists",
            job.provider
        );
        return CheckResult::blocked("account", text);
    }
    if kind == CallKind::Charge && spec.refuses_charges_of(job.account.as_deref()) {
        let own = facts.row.provider.as_ref().is_some_and(|row| row.refuses_account(job.account.as_deref()));
        let text = if own {
            format!("account {name} is refused by a rule of {}: its jobs end as declined", job.provider)
        } else {
            format!("account {name} is refused by another provider of the quota: its jobs are not sent")
        };
        return CheckResult::blocked("account", text);
    }
    let its_own = |limit: &str| own_limit(spec, limit, kind);
    let subjects = spec.subjects(job.account.as_deref(), job.reference.as_deref()).unwrap_or_default();
    if kind == CallKind::Charge
        && let Some((limit, most)) = spec.tightest_limit(kind, &subjects)
        && most > 0
        && job.cost > most
        && its_own(&limit).is_some()
    {
        return CheckResult::blocked("account", oversized_text(job.cost, &format!("its own limit {limit}"), most));
    }
    let at_the_gate = gate_position(facts).filter(|position| position.by_own_limit);
    if let Some((limit, refused)) = refused_limit(at_the_gate.and_then(|position| position.refused.as_ref()))
        && let Some(own) = its_own(limit)
    {
        let jobs_ahead = at_the_gate.map(|position| position.before);
        let queue = QueueView { starts_in: Some(refused.wait), jobs_ahead, exact: true, ..outlook.queue() };
        return blocked_by_limit("account", facts, job, own, queue);
    }
    if let Some(blocked) = blocked_in_backlog(facts, job, outlook, its_own) {
        return blocked;
    }
    if is_delayed(facts, job)
        && let Some(own) = delaying_limit(job).and_then(its_own)
    {
        return blocked_by_limit("account", facts, job, own, QueueView { exact: false, ..outlook.queue() });
    }
    let full = facts.limiter.uses.iter().find(|usage| usage.used >= usage.capacity && its_own(&usage.name).is_some());
    match full.and_then(|usage| its_own(&usage.name)) {
        Some(own) if gate_position(facts).is_none() => {
            let start_unknown = outlook.start_unknown;
            blocked_by_limit("account", facts, job, own, QueueView { start_unknown, ..QueueView::default() })
        }
        _ => CheckResult::routine("no rule or limit of its account or reference blocks it"),
    }
}

/// Check of the flow of a job of the backlog: its block, or the limit of its account that decides its start. `None`:
/// it is not in the backlog, and otherwise neither is the reason that it waits.
fn blocked_in_backlog<'a>(
    facts: &Facts,
    job: &JobFacts,
    outlook: &Outlook,
    its_own: impl Fn(&str) -> Option<&'a LimitSpec>,
) -> Option<CheckResult> {
    let place = facts.backlog.as_ref()?;
    let Some(block) = &place.block else {
        let deciding = outlook.limited_by.as_deref().filter(|_| outlook.waits);
        let own = deciding.and_then(its_own)?;
        return Some(blocked_by_limit("account", facts, job, own, outlook.queue()));
    };
    let held_for = Some(block.left);
    if let Some(own) = block.wait.reason.limit().and_then(its_own) {
        let CheckResult::Blocked(at, text) = blocked_by_limit("account", facts, job, own, outlook.queue()) else {
            return None;
        };
        return Some(CheckResult::Blocked(Box::new(BlockedAt { held_for, ..*at }), text));
    }
    let queue = outlook.queue();
    let text = format!("{}{}", block.wait, queue_text(facts, &queue));
    let limit = block.wait.reason.limit().map(str::to_owned);
    let at = BlockedAt { check: "account", limit, held_for, ..blocked_at(&queue) };
    Some(CheckResult::Blocked(Box::new(at), text))
}

fn blocked_at(queue: &QueueView) -> BlockedAt {
    BlockedAt {
        starts_in: queue.starts_in,
        start_unknown: queue.start_unknown,
        jobs_ahead: queue.jobs_ahead,
        exact: queue.exact,
        ..BlockedAt::default()
    }
}

fn oversized_text(cost: u32, limit: &str, at_once: u32) -> String {
    format!("its cost of {cost} exceeds {limit}, which allows {at_once} at once: it waits until the limit is raised")
}

fn own_limit<'a>(spec: &'a QuotaSpec, name: &str, kind: CallKind) -> Option<&'a LimitSpec> {
    let counts = |limit: &&LimitSpec| {
        limit.scope != Scope::Provider && !limit.shadow && limit.name == name && applies(limit.applies_to, kind)
    };
    spec.limits.iter().find(counts)
}

pub(super) fn applies(applies_to: AppliesTo, kind: CallKind) -> bool {
    match applies_to {
        AppliesTo::All => true,
        AppliesTo::Charge => kind == CallKind::Charge,
        AppliesTo::Lookup => kind == CallKind::Lookup,
    }
}

/// Check of the limits that count all calls of the quota.
pub(super) fn limit(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
    let Some(spec) = &facts.row.spec else { return CheckResult::passed("not known") };
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    let most = spec.cost_max(kind, &[]);
    let closed = |limit: &&LimitSpec| limit.max_requests == 0 && !limit.shadow && applies(limit.applies_to, kind);
    if let Some(closed) = spec.limits.iter().find(closed).filter(|_| most == 0) {
        let text = format!(
            "limit {} of {} is {}: nothing is sent; `sluicegate limits set {} {} {}` opens it",
            closed.name,
            job.provider,
            allows_text(closed),
            job.provider,
            closed.name,
            if is_in_flight(closed) { "'N at once'" } else { "N/DURATION" }
        );
        return CheckResult::blocked("limit", text);
    }
    if cost > most {
        return CheckResult::blocked("limit", oversized_text(cost, "the smallest limit", most));
    }
    let named = outlook.limited_by.as_deref().filter(|_| outlook.waits);
    match named.and_then(|name| spec.limits.iter().find(|limit| limit.name == name)) {
        Some(refusing) => blocked_by_limit("limit", facts, job, refusing, outlook.queue()),
        None if named == Some(PACING) => {
            let queue = outlook.queue();
            let text = format!("waits for the even pacing of {}{}", job.provider, queue_text(facts, &queue));
            CheckResult::Blocked(Box::new(BlockedAt { check: "limit", ..blocked_at(&queue) }), text)
        }
        // Delayed by a limit that its row no longer has: it still waits until its wake time.
        None if named.is_some() && is_delayed(facts, job) => {
            let until = format::instant(job.wake_at, facts.now);
            let text = format!("delayed until {until} by a limit that was removed");
            let at = BlockedAt { check: "limit", starts_in: outlook.starts_in, ..BlockedAt::default() };
            CheckResult::Blocked(Box::new(at), text)
        }
        None => CheckResult::routine("every limit has capacity for it and the jobs ahead of it"),
    }
}

/// Check of a job that no limit refuses: the jobs ahead, and where the job is.
pub(super) fn scheduling(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> CheckResult {
    let view = outlook.queue();
    let queue = queue_text(facts, &QueueView { starts_in: view.starts_in.filter(|start| *start > NOW), ..view });
    let queue = queue.trim_start_matches([',', ';', ' ', ':']);
    let home = if facts.backlog.is_some() { "backlog" } else { "queue" };
    let text = match &facts.claim {
        ClaimState::AskedWorker { worker, position: Some(_) } => {
            format!("active at worker {worker}, in the wait queue for a permit: {queue}")
        }
        ClaimState::AwaitingEgress { worker, .. } => {
            let rate = facts.row.provider.as_ref().map_or(0.0, |row| row.egress_per_second());
            format!("active at worker {worker}, in the leaky bucket ({rate:.1} per second): {queue}")
        }
        ClaimState::AskedWorker { worker, position: None } => {
            format!("active at worker {worker}, between two steps: {queue}")
        }
        ClaimState::OtherWorker { worker } => {
            format!("active at worker {worker}, which was not asked; estimated from the ledger and the limits: {queue}")
        }
        ClaimState::Unclaimed if facts.lane == LaneFacts::NotAsked && facts.ahead.workers == 0 => format!(
            "in the {home} of lane {}, and no worker holds a job of it (is `sluicegate run` running?): {queue}",
            job.provider
        ),
        ClaimState::Unclaimed if facts.backlog.is_some() => {
            format!("in the backlog of lane {}: {queue}", job.provider)
        }
        ClaimState::Unclaimed => {
            format!("in the queue of lane {}, waits for a worker with free prefetch: {queue}", job.provider)
        }
    };
    CheckResult::Blocked(Box::new(BlockedAt { check: "queue", ..blocked_at(&view) }), text)
}

fn blocked_by_limit(
    check: &'static str,
    facts: &Facts,
    job: &JobFacts,
    limit: &LimitSpec,
    queue: QueueView,
) -> CheckResult {
    let used = facts.used(&limit.name);
    let counted_for = match limit.scope {
        Scope::Provider => job.provider.clone(),
        Scope::Account => {
            format!("{}, counted for account {}", job.provider, job.account.as_deref().unwrap_or_default())
        }
        Scope::Reference => format!("{}, counted for its reference", job.provider),
    };
    let allows = allows_text(limit);
    let used_text = match used {
        None => "usage unknown".to_owned(),
        Some(used) if is_in_flight(limit) => format!("until one of {used} requests in flight ends"),
        Some(used) => format!("{used} used"),
    };
    // Nothing names the instant at which a request ends.
    let starts_in = queue.starts_in.filter(|_| !is_in_flight(limit));
    let queue = QueueView { starts_in, ..queue };
    let text =
        format!("waits for limit {} of {counted_for} ({allows}): {used_text}{}", limit.name, queue_text(facts, &queue));
    let at = BlockedAt {
        check,
        limit: Some(limit.name.clone()),
        allows: Some(limit_text(limit.max_requests, limit.window)),
        used,
        ..blocked_at(&queue)
    };
    CheckResult::Blocked(Box::new(at), text)
}

fn is_in_flight(limit: &LimitSpec) -> bool {
    limit.algorithm == Algorithm::Concurrency
}

/// `100 per 60 s`, `5 at once`.
fn allows_text(limit: &LimitSpec) -> String {
    if is_in_flight(limit) {
        return limit_text(limit.max_requests, limit.window);
    }
    format!("{} per {}", limit.max_requests, format::window(limit.window))
}

/// `, estimated start 14:03:21 UTC (in 12.4 s), 37 ahead of it`.
fn queue_text(facts: &Facts, queue: &QueueView) -> String {
    let ahead = queue.jobs_ahead.map(|jobs| match (jobs, queue.exact) {
        (0, _) => ", none ahead of it".to_owned(),
        (_, true) => format!(", {jobs} ahead of it"),
        (_, false) => format!(", about {jobs} ahead of it"),
    });
    let start = start_text(facts, queue.starts_in);
    let unknown = queue.start_unknown.map(|why| format!("; estimated start unknown: {why}"));
    [Some(start), ahead, unknown].into_iter().flatten().collect()
}

/// `, estimated start 14:03:21 UTC (in 12.4 s)`, if that is known.
pub(super) fn start_text(facts: &Facts, starts_in: Option<Duration>) -> String {
    let start =
        starts_in.map(|wait| format!(", estimated start {}", format::instant(later(facts.now, wait), facts.now)));
    start.unwrap_or_default()
}
