//! Jobs that wait, or have a request on the wire: gate by gate, until one does not let pass.
//!
//! Refuses to say that a job waits for one thing while another holds it first: the order is that of [`super::GATES`].

use std::time::Duration;

use super::facts::{Facts, Hand, JobFacts, LaneFacts, Refused, Refuser};
use super::limit::Outlook;
use super::{Explanation, StandsAt, Verdict, limit, line_up, parked, put_down_before, recorded, words};
use crate::domain::decision::CallKind;
use crate::domain::disposition::{History, Next, Step, before_request};
use crate::domain::time::EpochMs;

pub(super) fn waits(facts: &Facts, job: &JobFacts) -> Explanation {
    let next = next_step(facts, job);
    let kind = if matches!(next, Some(Step::Ask)) { CallKind::Lookup } else { CallKind::Charge };
    let outlook = limit::outlook(facts, job, kind);
    let verdicts = vec![
        ("recorded", recorded(facts, job)),
        ("provider", provider(facts, job)),
        ("time", time(facts, job, &outlook)),
        ("lane", lane(facts)),
        ("limiter", limiter(facts, job)),
        ("account", limit::account(facts, job, kind, &outlook)),
        ("limit", limit::limit(facts, job, kind, &outlook)),
        ("turn", limit::turn(facts, job, &outlook)),
        ("sent", Verdict::passed("")),
        ("outcome", Verdict::passed("")),
    ];
    let (gates, stands_at) = line_up(verdicts);
    let (stands_at, words) = stands_at.unzip();
    let words = words.unwrap_or_default();
    let not_before = stands_at.as_ref().and_then(|at| at.turn_in.max(at.held_for));
    let mut summary = match job.state.as_str() {
        "unknown" => unknown(job, next.as_ref(), &words),
        _ if facts.job.is_none() => format!("published, not recorded yet; {words}"),
        _ => words,
    };
    if let (Some(expires_at), "waiting") = (job.expires_at, job.state.as_str())
        && facts.until(expires_at) <= not_before.unwrap_or_default()
    {
        summary = format!("{summary}; it expires before, {}", words::when(expires_at, facts.now));
    }
    let state = if facts.job.is_none() { "queued" } else { job.state.as_str() };
    Explanation { state: state.to_owned(), provider: Some(job.provider.clone()), summary, gates, stands_at }
}

/// A request has been written down and no answer yet.
pub(super) fn on_the_wire(facts: &Facts, job: &JobFacts) -> Explanation {
    let (number, began_at) = job.requests.last().map_or((1, job.updated_at), |last| (last.number, last.began_at));
    let since = words::span(facts.since(began_at));
    let began = words::clock(began_at, facts.now);
    let summary = match &facts.hand {
        Hand::Nobody => format!(
            "request {number} has been on the wire since {began} ({since}), and its worker is lost: whoever takes the job \
             next holds its outcome for unknown"
        ),
        Hand::Elsewhere { worker } | Hand::InBucket { worker, .. } | Hand::Here { worker, .. } => {
            let most = facts.row.provider.as_ref().map_or_else(String::new, |provider| {
                format!("; its answer is waited for at most {}", words::span(provider.timeout))
            });
            format!("request {number} is on the wire since {began} ({since}), in hand of worker {worker}{most}")
        }
    };
    let mut verdicts = vec![("recorded", recorded(facts, job))];
    let on_the_way = ["provider", "time", "lane", "limiter", "account", "limit", "turn"];
    verdicts.extend(on_the_way.map(|name| {
        let put_down = job.requests.last().filter(|_| name == "time").and_then(|it| put_down_before(facts, job, it));
        (name, put_down.unwrap_or_else(|| Verdict::passed(format!("passed for request {number}"))))
    }));
    verdicts.push(("sent", Verdict::Passed(Some(began_at), format!("request {number} began at {began}"))));
    verdicts.push(("outcome", Verdict::stands("outcome", summary.clone())));
    let (gates, stands_at) = line_up(verdicts);
    let stands_at = stands_at.map(|(at, _)| at);
    Explanation { state: job.state.clone(), provider: Some(job.provider.clone()), summary, gates, stands_at }
}

/// What is done with a job of unknown outcome, and when.
fn unknown(job: &JobFacts, next: Option<&Step>, words: &str) -> String {
    let reason = job.reason.as_deref().unwrap_or("no answer told");
    let next = match next {
        Some(Step::Charge) => "next, the same request under the same key".to_owned(),
        Some(Step::Ask) => "next, the provider is asked what became of it".to_owned(),
        Some(Step::Put(Next::Settle { reason, .. })) => format!("next, a person decides ({reason})"),
        Some(Step::Put(Next::Again { reason, .. })) => format!("next, it waits again ({reason})"),
        None => "what is next depends on its provider's row".to_owned(),
    };
    format!("maybe charged: the outcome of its last request is unknown ({reason}); {next}; {words}")
}

/// What will be done with it when it is taken next; `None` without a row that says.
fn next_step(facts: &Facts, job: &JobFacts) -> Option<Step> {
    let policy = facts.row.provider.as_ref()?.retry_policy();
    let wait = facts.until(job.wake_at);
    let began = job.revived_at.unwrap_or(job.created_at).max(job.not_before.unwrap_or_default());
    let at = |instant: EpochMs| facts.since(instant) + wait;
    let charges = u32::try_from(job.requests.len()).unwrap_or(u32::MAX).saturating_sub(job.lookups);
    let history = History {
        attempts: job.attempts,
        requests: charges,
        lookups: job.lookups,
        resend: job.resend,
        unknown: job.state == "unknown",
        age: at(began),
        first_sent_age: job.first_sent_at.map(at),
        unknown_age: job.unknown_since.map(at),
        refusal_round: 1,
        lost_holders: job.lost_holders,
        probe: false,
    };
    let expired = job.expires_at.is_some_and(|expires_at| facts.until(expires_at) <= wait);
    Some(before_request(&history, &policy, expired))
}

fn provider(facts: &Facts, job: &JobFacts) -> Verdict {
    let (name, problems) = (&job.provider, facts.row.problems.join("; "));
    let Some(provider) = &facts.row.provider else {
        return Verdict::stands(
            "provider",
            match problems.as_str() {
                "" => format!("there is no provider row {name}: `sluicegate provider apply FILE` adds one"),
                problems => format!("the row of provider {name} cannot be meant: {problems}"),
            },
        );
    };
    if !provider.enabled {
        return Verdict::stands("provider", format!("provider {name} is disabled: its row says `enabled = false`"));
    }
    if provider.paused {
        let words = format!("provider {name} is paused: `sluicegate provider resume {name}` lets its jobs go on");
        return Verdict::stands("provider", words);
    }
    if facts.row.spec.is_none() {
        let quota = &provider.quota;
        let words = format!("another row of quota {quota} cannot be meant, so what {name} may send is not known");
        return Verdict::stands("provider", words);
    }
    Verdict::passed(match problems.as_str() {
        "" => format!("{name} is enabled"),
        problems => format!("{name} is enabled by its last good row; the one that is there now is bad: {problems}"),
    })
}

fn time(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> Verdict {
    if !is_parked(facts, job) {
        let came_at = job.wake_at.min(facts.now);
        return Verdict::Passed(Some(came_at), format!("its time came {}", words::when(came_at, facts.now)));
    }
    let until = words::when(job.wake_at, facts.now);
    let reason = job.reason.as_deref().unwrap_or_default();
    let by_limiter = limit::parked_for(job).is_some() || limit::parked_as_blocked(job);
    if by_limiter || parked::is_by_limiter(reason) || parked_with_its_lane(facts, reason) {
        return Verdict::passed(format!("parked until {until}, for what is named below"));
    }
    let words = match job.not_before {
        Some(not_before) if not_before >= job.wake_at => format!("its `not_before` is {until}"),
        _ if reason.is_empty() => format!("parked until {until}"),
        _ => format!("parked until {until}: {reason}"),
    };
    // It comes back at the end of its lane's queue.
    let behind = match outlook.before {
        0 => String::new(),
        before => format!("; then about {before} before it{}", limit::turn_words(facts, outlook.turn_in)),
    };
    let (turn_in, before_it) = (outlook.turn_in, Some(outlook.before));
    let held_for = Some(facts.until(job.wake_at));
    let at = StandsAt { gate: "time", turn_in, held_for, before_it, ..StandsAt::default() };
    Verdict::Stands(Box::new(at), format!("{words}{behind}"))
}

/// Whether it is parked for what its lane rests for now: the lane's cause says more.
fn parked_with_its_lane(facts: &Facts, reason: &str) -> bool {
    match &facts.lane {
        LaneFacts::Stopped { cause, .. } => reason == cause || reason.starts_with(parked::UNBUILDABLE),
        LaneFacts::Resting { cause, .. } => reason == cause,
        LaneFacts::NotAsked | LaneFacts::Absent | LaneFacts::Running | LaneFacts::Probing { .. } => false,
    }
}

/// In a delay queue, or in the ledger alone, until its time.
pub(super) fn is_parked(facts: &Facts, job: &JobFacts) -> bool {
    facts.hand == Hand::Nobody && job.wake_at > facts.now
}

fn stands_for(gate: &'static str, words: impl Into<String>, wait: Duration) -> Verdict {
    let at = StandsAt { gate, held_for: Some(wait), ..StandsAt::default() };
    Verdict::Stands(Box::new(at), words.into())
}

fn lane(facts: &Facts) -> Verdict {
    let until = |ends_in: Duration| words::when(later(facts.now, ends_in), facts.now);
    let of_the_limiter = |cause: &str| parked::limit_of(cause).is_some() || parked::is_by_limiter(cause);
    match &facts.lane {
        LaneFacts::NotAsked => Verdict::passed("not known: no running process was asked"),
        LaneFacts::Absent => {
            Verdict::stands("lane", "this worker has no lane for its provider (yet): its log says why")
        }
        LaneFacts::Running => Verdict::passed("takes jobs and sends them"),
        LaneFacts::Resting { cause, .. } if of_the_limiter(cause) => Verdict::passed(format!("takes no more: {cause}")),
        LaneFacts::Resting { cause, ends_in } if facts.hand == Hand::Nobody => {
            stands_for("lane", format!("the lane takes no more jobs until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::Resting { .. } => Verdict::passed("takes no more, but has this one"),
        LaneFacts::Stopped { cause, ends_in } => {
            stands_for("lane", format!("the lane sends nothing until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::Probing { cause } => Verdict::stands(
            "lane",
            format!("one job at a time is sent, to see whether its provider is up again ({cause})"),
        ),
    }
}

fn limiter(facts: &Facts, job: &JobFacts) -> Verdict {
    let of_place = match &facts.hand {
        Hand::Here { place: Some(place), .. } => place.refused.as_ref(),
        _ => None,
    };
    for refused in [of_place, facts.limiter.standing.as_ref()].into_iter().flatten() {
        if let Some(words) = refused_by_limiter(facts, job, refused) {
            return stands_for("limiter", words, refused.wait);
        }
    }
    if let Some(why) = &facts.limiter.away {
        return Verdict::stands("limiter", format!("nothing is granted while the limiter cannot be asked: {why}"));
    }
    match &job.reason {
        Some(reason) if is_parked(facts, job) && parked::is_by_limiter(reason) => {
            let words = format!("{reason}; it is looked at again {}", words::when(job.wake_at, facts.now));
            stands_for("limiter", words, facts.until(job.wake_at))
        }
        _ if facts.limiter.uses.is_empty() => Verdict::passed("not asked; what is told of limits is from the ledger"),
        _ => Verdict::passed("grants"),
    }
}

/// Why the limiter grants nobody anything; `None` when it is a limit, or something of the job's own, that refuses.
fn refused_by_limiter(facts: &Facts, job: &JobFacts, refused: &Refused) -> Option<String> {
    let earliest = words::when(later(facts.now, refused.wait), facts.now);
    Some(match &refused.by {
        Refuser::Cold => format!(
            "the limiter has lost its state and grants nothing until what may still count is known; it is asked again \
             {earliest}"
        ),
        Refuser::NeedsHistory => format!(
            "the limiter did not count what was used of a limit before, and the ledger is asked; the limiter is asked again \
             {earliest}"
        ),
        Refuser::Paused => format!("{} asked for a pause: nothing is sent before {earliest}", job.provider),
        Refuser::Away(why) => format!("nothing is granted while the limiter's store is away: {why}"),
        Refuser::StaleSettings => "the limiter knows newer settings, which this worker is loading".to_owned(),
        Refuser::Stopping => "the worker that has it is stopping and gives it back".to_owned(),
        Refuser::Limit(_) | Refuser::TooCostly | Refuser::Blocked => return None,
    })
}

pub(super) fn later(now: EpochMs, wait: Duration) -> EpochMs {
    EpochMs(now.0.saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)))
}
