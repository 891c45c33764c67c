//! The limits that a job waits for, and its turn among the others: `600 used, its turn about …; 37 before it`.
//!
//! Refuses to announce a turn that it cannot reckon: closed limits and a ledger that cannot tell have none.

use std::time::Duration;

use super::facts::{Facts, Hand, JobFacts, LaneFacts, Place, Refused, Refuser};
use super::open::{is_parked, later};
use super::turn::{self, Ahead};
use super::{StandsAt, Verdict, parked, words};
use crate::domain::decision::CallKind;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::quota_spec::{LimitSpec, PACING, QuotaSpec};
use crate::domain::time::format_duration;

/// Below this a turn is now.
const NOW: Duration = Duration::from_millis(20);

/// When its turn comes, who refuses until then, and who goes before.
pub(super) struct Outlook {
    /// `None`: it cannot be reckoned.
    pub turn_in: Option<Duration>,
    /// Its turn is not now.
    waits: bool,
    pub by: Option<String>,
    pub before: u64,
    /// Whether `before` is counted in the line that it stands in.
    pub exact: bool,
}

/// The limit that has parked this job, if one has.
pub(super) fn parked_for(job: &JobFacts) -> Option<&str> {
    parked::limit_of(job.reason.as_deref()?)
}

pub(super) fn parked_as_blocked(job: &JobFacts) -> bool {
    job.reason.as_deref().is_some_and(parked::is_by_rule)
}

fn place(facts: &Facts) -> Option<&Place> {
    match &facts.hand {
        Hand::Here { place, .. } => place.as_ref(),
        _ => None,
    }
}

fn refused_limit(refused: Option<&Refused>) -> Option<(&str, &Refused)> {
    refused.and_then(|refused| match &refused.by {
        Refuser::Limit(name) => Some((name.as_str(), refused)),
        _ => None,
    })
}

/// Who goes before it: how many, their costs together, and whether they are counted in its line.
fn ahead(facts: &Facts) -> (u64, u64, bool) {
    let before = &facts.before;
    match &facts.hand {
        Hand::Here { place: Some(place), .. } => (place.before, place.cost_before, true),
        Hand::InBucket { bucket, .. } => (bucket.before, bucket.before, true),
        // Between two steps: it has left one line and not joined the next.
        Hand::Here { place: None, .. } => (0, 0, false),
        // The queue is behind it already.
        Hand::Elsewhere { .. } => (before.jobs.min(before.in_hand), before.cost.min(before.in_hand), false),
        Hand::Nobody => (before.jobs, before.cost, false),
    }
}

pub(super) fn outlook(facts: &Facts, job: &JobFacts, kind: CallKind) -> Outlook {
    let place = place(facts);
    let (before, cost_before, exact) = ahead(facts);
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    // Of those in a bucket it is known when they leave; whoever stands at the gate has left it.
    let passes_buckets = matches!(facts.hand, Hand::Nobody | Hand::Elsewhere { .. });
    let outflow = facts.row.provider.as_ref().filter(|_| passes_buckets);
    let jobs_per_second = outflow.map(|row| row.outflow_per_second() * f64::from(facts.before.workers.max(1)));
    let ahead = Ahead { cost_before, cost, kind, jobs_per_second };
    let reckoned = match (&facts.row.spec, &facts.limiter.past) {
        (Some(spec), Some(past)) => turn::turn(spec, facts.micros(), past, &ahead)
            .map(|turn| (turn.wait, turn.by.map(|index| spec.limit_name(index).to_owned()))),
        _ => None,
    };
    let announced = refused_limit(place.and_then(|it| it.refused.as_ref()))
        .or_else(|| refused_limit(facts.limiter.standing.as_ref()));
    let (mut turn_in, mut by) = reckoned.unzip();
    let mut by: Option<String> = by.take().flatten();
    if let Some((name, refused)) = announced {
        // What the limiter announced goes before what was reckoned: for the first in line it is the turn.
        let first = before == 0 && place.is_some();
        turn_in = Some(if first { refused.wait } else { turn_in.unwrap_or_default().max(refused.wait) });
        by = by.or_else(|| Some(name.to_owned()));
    }
    if let Hand::InBucket { bucket, .. } = &facts.hand
        && turn_in.is_some_and(|turn| turn <= bucket.leaves_in)
    {
        (turn_in, by) = (Some(bucket.leaves_in), None);
    }
    if is_parked(facts, job) {
        turn_in = turn_in.map(|turn| turn.max(facts.until(job.wake_at)));
        by = by.or_else(|| parked_for(job).map(str::to_owned));
    }
    let waits = turn_in.is_none_or(|turn| turn > NOW);
    // Whether its lane sends at all was not asked.
    let turn_in = turn_in.filter(|_| facts.lane != LaneFacts::NotAsked);
    Outlook { turn_in, waits, by, before, exact }
}

/// What counts its own account or reference alone.
pub(super) fn account(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> Verdict {
    let Some(spec) = &facts.row.spec else { return Verdict::passed("not known") };
    let name = job.account.as_deref().unwrap_or_default();
    if spec.subjects(job.account.as_deref(), None).is_err() {
        let words = format!(
            "account {name} is blocked by a rule of {}: nothing of it is sent while the rule is there",
            job.provider
        );
        return Verdict::stands("account", words);
    }
    let its_own = |limit: &str| own_limit(spec, limit, kind);
    let subjects = spec.subjects(job.account.as_deref(), job.reference.as_deref()).unwrap_or_default();
    if kind == CallKind::Charge
        && let Some((limit, most)) = spec.narrowest(kind, &subjects)
        && most > 0
        && job.cost > most
        && its_own(&limit).is_some()
    {
        return Verdict::stands("account", exceeds(job.cost, &format!("its own limit {limit}"), most));
    }
    let at_the_gate = place(facts).filter(|it| it.of_its_own);
    if let Some((limit, refused)) = refused_limit(at_the_gate.and_then(|it| it.refused.as_ref()))
        && let Some(own) = its_own(limit)
    {
        let before = at_the_gate.map(|it| it.before);
        return stands("account", facts, job, own, (Some(refused.wait), before, true));
    }
    if is_parked(facts, job)
        && let Some(own) = parked_for(job).and_then(its_own)
    {
        return stands("account", facts, job, own, (outlook.turn_in, Some(outlook.before), false));
    }
    let full = facts.limiter.uses.iter().find(|it| it.used >= it.capacity && its_own(&it.name).is_some());
    match full.and_then(|it| its_own(&it.name)) {
        Some(own) if place(facts).is_none() => stands("account", facts, job, own, (None, None, false)),
        _ => Verdict::passed("no rule or limit of its own holds it"),
    }
}

fn exceeds(cost: u32, limit: &str, at_once: u32) -> String {
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
pub(super) fn limit(facts: &Facts, job: &JobFacts, kind: CallKind, outlook: &Outlook) -> Verdict {
    let Some(spec) = &facts.row.spec else { return Verdict::passed("not known") };
    let cost = if kind == CallKind::Charge { job.cost } else { 1 };
    let most = spec.cost_max(kind, &[]);
    let closed = |limit: &&LimitSpec| limit.max_requests == 0 && !limit.shadow && applies(limit.applies_to, kind);
    if let Some(closed) = spec.limits.iter().find(closed).filter(|_| most == 0) {
        let words = format!(
            "limit {} of {} is closed (0 per {}): `sluicegate limits set {} {} N/DURATION` opens it",
            closed.name,
            job.provider,
            words::window(closed.window),
            job.provider,
            closed.name
        );
        return Verdict::stands("limit", words);
    }
    if cost > most {
        return Verdict::stands("limit", exceeds(cost, "the smallest limit", most));
    }
    let named = outlook.by.as_deref().filter(|_| outlook.waits);
    match named.and_then(|name| spec.limits.iter().find(|limit| limit.name == name)) {
        Some(refusing) => stands("limit", facts, job, refusing, (outlook.turn_in, Some(outlook.before), outlook.exact)),
        None if named == Some(PACING) => {
            let turn = line_words(facts, outlook.turn_in, Some(outlook.before), outlook.exact);
            let words = format!("waits for the even pacing of {}{turn}", job.provider);
            let (turn_in, before_it) = (outlook.turn_in, Some(outlook.before));
            let at = StandsAt { gate: "limit", turn_in, before_it, exact: outlook.exact, ..StandsAt::default() };
            Verdict::Stands(Box::new(at), words)
        }
        // Parked by a limit that its row no longer has: its time comes all the same.
        None if named.is_some() && is_parked(facts, job) => {
            let until = words::when(job.wake_at, facts.now);
            let words = format!("parked until {until} by a limit that is no longer there");
            let at = StandsAt { gate: "limit", turn_in: outlook.turn_in, ..StandsAt::default() };
            Verdict::Stands(Box::new(at), words)
        }
        None => Verdict::passed("every limit has room for it and for those before it"),
    }
}

/// Nothing refuses it: who goes before it, and where it is.
pub(super) fn turn(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> Verdict {
    let before = line_words(facts, outlook.turn_in.filter(|turn| *turn > NOW), Some(outlook.before), outlook.exact);
    let before = before.trim_start_matches([',', ';', ' ', ':']);
    let words = match &facts.hand {
        Hand::Here { worker, place: Some(_) } => {
            format!("in hand of worker {worker}, in line for its permit: {before}")
        }
        Hand::InBucket { worker, .. } => {
            let rate = facts.row.provider.as_ref().map_or(0.0, |row| row.outflow_per_second());
            format!(
                "in hand of worker {worker}, waits for its place in the steady outflow ({rate:.1} per second): {before}"
            )
        }
        Hand::Here { worker, place: None } => format!("in hand of worker {worker}, between two steps: {before}"),
        Hand::Elsewhere { worker } => {
            format!("in hand of worker {worker}, which was not asked; by the ledger and the limits: {before}")
        }
        Hand::Nobody if facts.lane == LaneFacts::NotAsked && facts.before.workers == 0 => format!(
            "in the queue of lane {}, and no worker has anything of it in hand (is `sluicegate run` up?): {before}",
            job.provider
        ),
        Hand::Nobody => {
            format!("in the queue of lane {}, for the next worker with a free place: {before}", job.provider)
        }
    };
    let turn_in = outlook.turn_in;
    let at = StandsAt {
        gate: "turn",
        turn_in,
        before_it: Some(outlook.before),
        exact: outlook.exact,
        ..StandsAt::default()
    };
    Verdict::Stands(Box::new(at), words)
}

fn stands(
    gate: &'static str,
    facts: &Facts,
    job: &JobFacts,
    limit: &LimitSpec,
    (turn_in, before_it, exact): (Option<Duration>, Option<u64>, bool),
) -> Verdict {
    let used = facts.used(&limit.name);
    let whose = match limit.scope {
        Scope::Provider => job.provider.clone(),
        Scope::Account => {
            format!("{}, counted for account {}", job.provider, job.account.as_deref().unwrap_or_default())
        }
        Scope::Reference => format!("{}, counted for its reference", job.provider),
    };
    let allows = format!("{} per {}", limit.max_requests, words::window(limit.window));
    let used_words = used.map_or_else(|| "its use is not known".to_owned(), |used| format!("{used} used"));
    let turn = line_words(facts, turn_in, before_it, exact);
    let words = format!("waits for limit {} of {whose} ({allows}): {used_words}{turn}", limit.name);
    let at = StandsAt {
        gate,
        limit: Some(limit.name.clone()),
        allows: Some(format!("{}/{}", limit.max_requests, format_duration(limit.window))),
        used,
        turn_in,
        held_for: None,
        before_it,
        exact,
    };
    Verdict::Stands(Box::new(at), words)
}

/// `, its turn about 14:03:21 UTC (in 12.4 s); 37 before it`.
fn line_words(facts: &Facts, turn_in: Option<Duration>, before_it: Option<u64>, exact: bool) -> String {
    let before = before_it.map(|before| match (before, exact) {
        (0, _) => "; nobody before it".to_owned(),
        (_, true) => format!("; {before} before it"),
        (_, false) => format!("; about {before} before it"),
    });
    let unasked = if facts.lane == LaneFacts::NotAsked { "; no running worker was asked for its turn" } else { "" };
    format!("{}{}{unasked}", turn_words(facts, turn_in), before.unwrap_or_default())
}

/// `, its turn about 14:03:21 UTC (in 12.4 s)`, where that is known.
pub(super) fn turn_words(facts: &Facts, turn_in: Option<Duration>) -> String {
    let turn = turn_in.map(|wait| format!(", its turn about {}", words::when(later(facts.now, wait), facts.now)));
    turn.unwrap_or_default()
}
