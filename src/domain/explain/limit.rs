//! The limits that a job waits for, and its turn among the others: `600 used, its turn about …; 37 before it`.
//!
//! Refuses to announce a turn that it cannot reckon: closed limits and a ledger that cannot tell have none.

use std::time::Duration;

use super::facts::{ClaimState, Facts, GatePosition, JobFacts, LaneFacts, PermitRefusal, PermitRefusalReason};
use super::forecast::{self, ForecastInput};
use super::pending::{is_delayed, later};
use super::{BlockedAt, CheckResult, format, reason};
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota_spec::{LimitSpec, PACING, QuotaSpec};
use crate::domain::time::format_duration;

/// Below this a turn is now.
const NOW: Duration = Duration::from_millis(20);

/// When its turn comes, who refuses until then, and who goes before.
pub(super) struct Outlook {
    /// `None`: it cannot be reckoned.
    pub starts_in: Option<Duration>,
    /// Its turn is not now.
    waits: bool,
    pub limited_by: Option<String>,
    pub jobs_ahead: u64,
    /// Whether `before` is counted in the line that it stands in.
    pub exact: bool,
}

/// The limit that has parked this job, if one has.
pub(super) fn delaying_limit(job: &JobFacts) -> Option<&str> {
    reason::parse_limit(job.reason.as_deref()?)
}

pub(super) fn delayed_as_blocked(job: &JobFacts) -> bool {
    job.reason.as_deref().is_some_and(reason::is_blocked)
}

fn gate_position(facts: &Facts) -> Option<&GatePosition> {
    match &facts.claim {
        ClaimState::AskedWorker { position: place, .. } => place.as_ref(),
        _ => None,
    }
}

fn refused_limit(refused: Option<&PermitRefusal>) -> Option<(&str, &PermitRefusal)> {
    refused.and_then(|refused| match &refused.reason {
        PermitRefusalReason::Limit(name) => Some((name.as_str(), refused)),
        _ => None,
    })
}

/// Who goes before it: how many, their costs together, and whether they are counted in its line.
fn jobs_ahead(facts: &Facts) -> (u64, u64, bool) {
    let before = &facts.ahead;
    match &facts.claim {
        ClaimState::AskedWorker { position: Some(place), .. } => (place.before, place.cost_before, true),
        ClaimState::AwaitingEgress { position: bucket, .. } => (bucket.before, bucket.before, true),
        // Between two steps: it has left one line and not joined the next.
        ClaimState::AskedWorker { position: None, .. } => (0, 0, false),
        // The queue is behind it already.
        ClaimState::OtherWorker { .. } => (before.jobs.min(before.active), before.cost.min(before.active), false),
        ClaimState::Unclaimed => (before.jobs, before.cost, false),
    }
}

pub(super) fn outlook(facts: &Facts, job: &JobFacts, kind: CallKind) -> Outlook {
    let place = gate_position(facts);
    let (before, cost_before, exact) = jobs_ahead(facts);
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    // Of those in a bucket it is known when they leave; whoever stands at the gate has left it.
    let passes_buckets = matches!(facts.claim, ClaimState::Unclaimed | ClaimState::OtherWorker { .. });
    let outflow = facts.row.provider.as_ref().filter(|_| passes_buckets);
    let jobs_per_second = outflow.map(|row| row.egress_per_second() * f64::from(facts.ahead.workers.max(1)));
    let ahead = ForecastInput { cost_before, cost, kind, jobs_per_second };
    let reckoned = match (&facts.row.spec, &facts.limiter.recent_usage) {
        (Some(spec), Some(past)) => forecast::forecast_start(spec, facts.now_micros(), past, &ahead)
            .map(|turn| (turn.wait, turn.limited_by.map(|index| spec.limit_name(index).to_owned()))),
        _ => None,
    };
    let announced =
        refused_limit(place.and_then(|it| it.refused.as_ref())).or_else(|| refused_limit(facts.limiter.block.as_ref()));
    let (mut turn_in, mut by) = reckoned.unzip();
    let mut by: Option<String> = by.take().flatten();
    if let Some((name, refused)) = announced {
        // What the limiter announced goes before what was reckoned: for the first in line it is the turn.
        let first = before == 0 && place.is_some();
        turn_in = Some(if first { refused.wait } else { turn_in.unwrap_or_default().max(refused.wait) });
        by = by.or_else(|| Some(name.to_owned()));
    }
    if let ClaimState::AwaitingEgress { position: bucket, .. } = &facts.claim
        && turn_in.is_some_and(|turn| turn <= bucket.leaves_in)
    {
        (turn_in, by) = (Some(bucket.leaves_in), None);
    }
    if is_delayed(facts, job) {
        turn_in = turn_in.map(|turn| turn.max(facts.until(job.wake_at)));
        by = by.or_else(|| delaying_limit(job).map(str::to_owned));
    }
    let waits = turn_in.is_none_or(|turn| turn > NOW);
    // Whether its lane sends at all was not asked.
    let turn_in = turn_in.filter(|_| facts.lane != LaneFacts::NotAsked);
    Outlook { starts_in: turn_in, waits, limited_by: by, jobs_ahead: before, exact }
}

/// What counts its own account or reference alone.
pub(super) fn account(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
    let Some(spec) = &facts.row.spec else { return CheckResult::passed("not known") };
    let name = job.account.as_deref().unwrap_or_default();
    if spec.subjects(job.account.as_deref(), None).is_err() {
        let words = format!(
            "account {name} is blocked by a rule of {}: nothing of it is sent while the rule is there",
            job.provider
        );
        return CheckResult::blocked("account", words);
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
    let at_the_gate = gate_position(facts).filter(|it| it.by_own_limit);
    if let Some((limit, refused)) = refused_limit(at_the_gate.and_then(|it| it.refused.as_ref()))
        && let Some(own) = its_own(limit)
    {
        let before = at_the_gate.map(|it| it.before);
        return blocked_by_limit("account", facts, job, own, (Some(refused.wait), before, true));
    }
    if is_delayed(facts, job)
        && let Some(own) = delaying_limit(job).and_then(its_own)
    {
        return blocked_by_limit("account", facts, job, own, (outlook.starts_in, Some(outlook.jobs_ahead), false));
    }
    let full = facts.limiter.uses.iter().find(|it| it.used >= it.capacity && its_own(&it.name).is_some());
    match full.and_then(|it| its_own(&it.name)) {
        Some(own) if gate_position(facts).is_none() => {
            blocked_by_limit("account", facts, job, own, (None, None, false))
        }
        _ => CheckResult::passed("no rule or limit of its own holds it"),
    }
}

fn oversized_text(cost: u32, limit: &str, at_once: u32) -> String {
    format!("its cost of {cost} exceeds {limit}, which admits {at_once} at once: it waits until that is raised")
}

fn own_limit<'a>(spec: &'a QuotaSpec, name: &str, kind: CallKind) -> Option<&'a LimitSpec> {
    let counts = |limit: &&LimitSpec| {
        limit.scope != Scope::Provider && !limit.shadow && limit.name == name && applies(limit.applies_to, kind)
    };
    spec.limits.iter().find(counts)
}

fn applies(applies_to: AppliesTo, kind: CallKind) -> bool {
    match applies_to {
        AppliesTo::All => true,
        AppliesTo::Charge => kind == CallKind::Charge,
        AppliesTo::Lookup => kind == CallKind::Lookup,
    }
}

/// What counts everybody's calls.
pub(super) fn limit(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> CheckResult {
    let Some(spec) = &facts.row.spec else { return CheckResult::passed("not known") };
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    let most = spec.cost_max(kind, &[]);
    let closed = |limit: &&LimitSpec| limit.max_requests == 0 && !limit.shadow && applies(limit.applies_to, kind);
    if let Some(closed) = spec.limits.iter().find(closed).filter(|_| most == 0) {
        let words = format!(
            "limit {} of {} is closed (0 per {}): `sluicegate limits set {} {} N/DURATION` opens it",
            closed.name,
            job.provider,
            format::window(closed.window),
            job.provider,
            closed.name
        );
        return CheckResult::blocked("limit", words);
    }
    if cost > most {
        return CheckResult::blocked("limit", oversized_text(cost, "the smallest limit", most));
    }
    let named = outlook.limited_by.as_deref().filter(|_| outlook.waits);
    match named.and_then(|name| spec.limits.iter().find(|limit| limit.name == name)) {
        Some(refusing) => blocked_by_limit(
            "limit",
            facts,
            job,
            refusing,
            (outlook.starts_in, Some(outlook.jobs_ahead), outlook.exact),
        ),
        None if named == Some(PACING) => {
            let turn = queue_text(facts, outlook.starts_in, Some(outlook.jobs_ahead), outlook.exact);
            let words = format!("waits for the even pacing of {}{turn}", job.provider);
            let (turn_in, before_it) = (outlook.starts_in, Some(outlook.jobs_ahead));
            let at = BlockedAt {
                check: "limit",
                starts_in: turn_in,
                jobs_ahead: before_it,
                exact: outlook.exact,
                ..BlockedAt::default()
            };
            CheckResult::Blocked(Box::new(at), words)
        }
        // Parked by a limit that its row no longer has: its time comes all the same.
        None if named.is_some() && is_delayed(facts, job) => {
            let until = format::instant(job.wake_at, facts.now);
            let words = format!("parked until {until} by a limit that is no longer there");
            let at = BlockedAt { check: "limit", starts_in: outlook.starts_in, ..BlockedAt::default() };
            CheckResult::Blocked(Box::new(at), words)
        }
        None => CheckResult::passed("every limit has room for it and for those before it"),
    }
}

/// Nothing refuses it: who goes before it, and where it is.
pub(super) fn scheduling(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> CheckResult {
    let before =
        queue_text(facts, outlook.starts_in.filter(|turn| *turn > NOW), Some(outlook.jobs_ahead), outlook.exact);
    let before = before.trim_start_matches([',', ';', ' ', ':']);
    let words = match &facts.claim {
        ClaimState::AskedWorker { worker, position: Some(_) } => {
            format!("in hand of worker {worker}, in line for its permit: {before}")
        }
        ClaimState::AwaitingEgress { worker, .. } => {
            let rate = facts.row.provider.as_ref().map_or(0.0, |row| row.egress_per_second());
            format!(
                "in hand of worker {worker}, waits for its place in the steady outflow ({rate:.1} per second): {before}"
            )
        }
        ClaimState::AskedWorker { worker, position: None } => {
            format!("in hand of worker {worker}, between two steps: {before}")
        }
        ClaimState::OtherWorker { worker } => {
            format!("in hand of worker {worker}, which was not asked; by the ledger and the limits: {before}")
        }
        ClaimState::Unclaimed if facts.lane == LaneFacts::NotAsked && facts.ahead.workers == 0 => format!(
            "in the queue of lane {}, and no worker has anything of it in hand (is `sluicegate run` up?): {before}",
            job.provider
        ),
        ClaimState::Unclaimed => {
            format!("in the queue of lane {}, for the next worker with a free place: {before}", job.provider)
        }
    };
    let turn_in = outlook.starts_in;
    let at = BlockedAt {
        check: "turn",
        starts_in: turn_in,
        jobs_ahead: Some(outlook.jobs_ahead),
        exact: outlook.exact,
        ..BlockedAt::default()
    };
    CheckResult::Blocked(Box::new(at), words)
}

fn blocked_by_limit(
    gate: &'static str,
    facts: &Facts,
    job: &JobFacts,
    limit: &LimitSpec,
    (turn_in, before_it, exact): (Option<Duration>, Option<u64>, bool),
) -> CheckResult {
    let used = facts.used(&limit.name);
    let whose = match limit.scope {
        Scope::Provider => job.provider.clone(),
        Scope::Account => {
            format!("{}, counted for account {}", job.provider, job.account.as_deref().unwrap_or_default())
        }
        Scope::Reference => format!("{}, counted for its reference", job.provider),
    };
    let allows = format!("{} per {}", limit.max_requests, format::window(limit.window));
    let used_words = used.map_or_else(|| "its use is not known".to_owned(), |used| format!("{used} used"));
    let turn = queue_text(facts, turn_in, before_it, exact);
    let words = format!("waits for limit {} of {whose} ({allows}): {used_words}{turn}", limit.name);
    let at = BlockedAt {
        check: gate,
        limit: Some(limit.name.clone()),
        allows: Some(format!("{}/{}", limit.max_requests, format_duration(limit.window))),
        used,
        starts_in: turn_in,
        held_for: None,
        jobs_ahead: before_it,
        exact,
    };
    CheckResult::Blocked(Box::new(at), words)
}

/// `, its turn about 14:03:21 UTC (in 12.4 s); 37 before it`.
fn queue_text(facts: &Facts, turn_in: Option<Duration>, before_it: Option<u64>, exact: bool) -> String {
    let before = before_it.map(|before| match (before, exact) {
        (0, _) => "; nobody before it".to_owned(),
        (_, true) => format!("; {before} before it"),
        (_, false) => format!("; about {before} before it"),
    });
    let unasked = if facts.lane == LaneFacts::NotAsked { "; no running worker was asked for its turn" } else { "" };
    format!("{}{}{unasked}", start_text(facts, turn_in), before.unwrap_or_default())
}

/// `, its turn about 14:03:21 UTC (in 12.4 s)`, where that is known.
pub(super) fn start_text(facts: &Facts, turn_in: Option<Duration>) -> String {
    let turn = turn_in.map(|wait| format!(", its turn about {}", format::instant(later(facts.now, wait), facts.now)));
    turn.unwrap_or_default()
}
