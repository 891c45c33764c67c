//! Checks of a job, in their order, and the one that blocks it; above all those of the limits that it waits for, and of
//! its place among other jobs: `600 used, estimated start …, 37 ahead of it`.

use std::time::Duration;

use super::outlook::{NOW, Outlook, QueueView, delaying_limit, gate_position, refused_limit};
use super::{ClaimState, Facts, JobFacts, LaneFacts, SentRequest};
use crate::domain::format;
use crate::domain::limit::{Algorithm, Scope, limit_text};
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::{LimitSpec, PACING, QuotaSpec};
use crate::domain::time::EpochMs;
use crate::domain::wait_reason::past_sentence;

/// The checks in their order. A job is blocked at the first that does not let it pass.
pub const CHECKS: [&str; 10] =
    ["recorded", "provider", "time", "lane", "limiter", "account", "limit", "queue", "sent", "outcome"];

/// Explanation of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The job's state in the ledger. `queued`: its message was found and is not recorded yet. `unrecorded`: neither is
    /// known.
    pub state: String,
    pub provider: Option<String>,
    /// One sentence.
    pub summary: String,
    /// In the order of [`CHECKS`]; empty for a job that the ledger does not know.
    pub checks: Vec<JobCheck>,
    /// `None`: no check blocks it.
    pub blocked_at: Option<BlockedAt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCheck {
    pub name: &'static str,
    pub passed: bool,
    /// It passed as most jobs do; short outputs count such checks.
    pub is_routine: bool,
    pub at: Option<EpochMs>,
    pub text: String,
}

/// The check that blocks a job, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockedAt {
    pub check: &'static str,
    pub limit: Option<String>,
    /// The limit as operators write it: `600/1m`.
    pub allows: Option<String>,
    pub used: Option<u64>,
    /// Time from now to the estimated start, if there is an estimate.
    pub starts_in: Option<Duration>,
    /// Why there is no estimated start, where that is known.
    pub start_unknown: Option<&'static str>,
    /// Time from now until the block may end; the start is not before.
    pub held_for: Option<Duration>,
    /// Jobs that are served before it.
    pub jobs_ahead: Option<u64>,
    /// Whether `jobs_ahead` was counted in the queue that the job is in; else it is estimated from the ledger and the
    /// lane's queue.
    pub exact: bool,
}

/// Result of one check.
pub enum CheckResult {
    Passed(Option<EpochMs>, String),
    /// Passed as most jobs do.
    Routine(String),
    Blocked(Box<BlockedAt>, String),
}

impl CheckResult {
    pub fn passed(text: impl Into<String>) -> Self {
        Self::Passed(None, text.into())
    }

    pub fn routine(text: impl Into<String>) -> Self {
        Self::Routine(text.into())
    }

    pub fn blocked(check: &'static str, text: impl Into<String>) -> Self {
        Self::Blocked(Box::new(BlockedAt { check, ..BlockedAt::default() }), text.into())
    }
}

/// The checks up to the first that blocks. Later checks are marked as not reached.
pub fn until_blocked(results: Vec<(&'static str, CheckResult)>) -> (Vec<JobCheck>, Option<(BlockedAt, String)>) {
    let mut blocked = None;
    let mut checks = Vec::with_capacity(CHECKS.len());
    for (name, result) in results {
        let (passed, is_routine, at, text) = match result {
            _ if blocked.is_some() => (false, false, None, "not reached".to_owned()),
            CheckResult::Passed(at, text) => (true, false, at, text),
            CheckResult::Routine(text) => (true, true, None, text),
            CheckResult::Blocked(at, text) => {
                blocked = Some((*at, text.clone()));
                (false, false, None, text)
            }
        };
        checks.push(JobCheck { name, passed, is_routine, at, text });
    }
    (checks, blocked)
}

/// Check `time` of a job whose request was sent: how long it was delayed before, and why.
pub fn delayed_before(facts: &Facts, job: &JobFacts, request: &SentRequest) -> Option<CheckResult> {
    let waited = job.last_delay.as_ref().filter(|waited| waited.request == request.number)?;
    let span_ms = u64::try_from(request.began_at.0.saturating_sub(waited.since.0)).unwrap_or(0);
    let span = format::duration(Duration::from_millis(span_ms));
    let (from, to) = (format::clock(waited.since, facts.now), format::clock(request.began_at, facts.now));
    let text = format!(
        "{} from {from} to {to} ({span})",
        past_sentence(&waited.reason.reason, waited.reason.detail.as_deref())
    );
    Some(CheckResult::Passed(Some(waited.since), text))
}

/// Check `recorded` of a job that the ledger has or whose message was found.
pub fn recorded(facts: &Facts, job: &JobFacts) -> CheckResult {
    if facts.job.is_none() {
        return CheckResult::passed(
            "not yet: its message is published, and the ledger records it when a worker takes it",
        );
    }
    let text = format!("in the ledger since {}", facts.instant(job.created_at));
    CheckResult::Passed(Some(job.created_at), text)
}

/// Check of the rules and limits of the job's account and reference.
pub fn account(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
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
        let queue = QueueView { starts_in: Some(refused.wait), jobs_ahead, exact: true, ..outlook.queue };
        return blocked_by_limit("account", facts, job, own, queue);
    }
    if let Some(blocked) = blocked_in_backlog(facts, job, outlook, its_own) {
        return blocked;
    }
    if facts.is_delayed(job)
        && let Some(own) = delaying_limit(job).and_then(its_own)
    {
        return blocked_by_limit("account", facts, job, own, QueueView { exact: false, ..outlook.queue });
    }
    let full = facts.limiter.uses.iter().find(|usage| usage.used >= usage.capacity && its_own(&usage.name).is_some());
    match full.and_then(|usage| its_own(&usage.name)) {
        Some(own) if gate_position(facts).is_none() => {
            let start_unknown = outlook.queue.start_unknown;
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
        return Some(blocked_by_limit("account", facts, job, own, outlook.queue));
    };
    let held_for = Some(block.left);
    if let Some(own) = block.wait.reason.limit().and_then(its_own) {
        let CheckResult::Blocked(at, text) = blocked_by_limit("account", facts, job, own, outlook.queue) else {
            return None;
        };
        return Some(CheckResult::Blocked(Box::new(BlockedAt { held_for, ..*at }), text));
    }
    let queue = outlook.queue;
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
        limit.scope != Scope::Provider && !limit.shadow && limit.name == name && kind.is_counted_by(limit.applies_to)
    };
    spec.limits.iter().find(counts)
}

/// Check of the limits that count all calls of the quota.
pub fn limit(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
    let Some(spec) = &facts.row.spec else { return CheckResult::passed("not known") };
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    let most = spec.cost_max(kind, &[]);
    let closed = |limit: &&LimitSpec| limit.max_requests == 0 && !limit.shadow && kind.is_counted_by(limit.applies_to);
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
        Some(refusing) => blocked_by_limit("limit", facts, job, refusing, outlook.queue),
        None if named == Some(PACING) => {
            let queue = outlook.queue;
            let text = format!("waits for the even pacing of {}{}", job.provider, queue_text(facts, &queue));
            CheckResult::Blocked(Box::new(BlockedAt { check: "limit", ..blocked_at(&queue) }), text)
        }
        // Delayed by a limit that its row no longer has: it still waits until its wake time.
        None if named.is_some() && facts.is_delayed(job) => {
            let until = facts.instant(job.wake_at);
            let text = format!("delayed until {until} by a limit that was removed");
            let at = BlockedAt { check: "limit", starts_in: outlook.queue.starts_in, ..BlockedAt::default() };
            CheckResult::Blocked(Box::new(at), text)
        }
        None => CheckResult::routine("every limit has capacity for it and the jobs ahead of it"),
    }
}

/// Check of a job that no limit refuses: the jobs ahead, and where the job is.
pub fn scheduling(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> CheckResult {
    let view = outlook.queue;
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
    let passed = if is_passed_by_cheaper(job, limit, used) {
        format!("; it needs {} free slots at once, and cheaper payments pass it", job.cost)
    } else {
        String::new()
    };
    let text = format!(
        "waits for limit {} of {counted_for} ({allows}): {used_text}{passed}{}",
        limit.name,
        queue_text(facts, &queue)
    );
    let at = BlockedAt {
        check,
        limit: Some(limit.name.clone()),
        allows: Some(limit_text(limit.max_requests, limit.window)),
        used,
        ..blocked_at(&queue)
    };
    CheckResult::Blocked(Box::new(at), text)
}

/// Whether the provider's limit has free slots, but fewer than the job costs.
fn is_passed_by_cheaper(job: &JobFacts, limit: &LimitSpec, used: Option<u64>) -> bool {
    let (capacity, cost) = (u64::from(limit.max_requests), u64::from(job.cost));
    let has_too_few = used.is_some_and(|used| used < capacity && used.saturating_add(cost) > capacity);
    limit.scope == Scope::Provider && cost > 1 && has_too_few
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
pub fn start_text(facts: &Facts, starts_in: Option<Duration>) -> String {
    let start = starts_in.map(|wait| format!(", estimated start {}", facts.instant_in(wait)));
    start.unwrap_or_default()
}
