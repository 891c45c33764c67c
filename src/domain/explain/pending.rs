//! Jobs that wait, or have a request on the wire: gate by gate, until one does not let pass.
//!
//! Refuses to say that a job waits for one thing while another holds it first: the order is that of [`super::GATES`].

use std::time::Duration;

use super::facts::{ClaimState, Facts, JobFacts, LaneFacts, PermitRefusal, PermitRefusalReason};
use super::limit::Outlook;
use super::{BlockedAt, CheckResult, Explanation, delayed_before, format, limit, reason, recorded, until_blocked};
use crate::domain::disposition::{AttemptHistory, PreSend, Transition, before_request};
use crate::domain::permit_protocol::CallKind;
use crate::domain::time::EpochMs;

pub(super) fn explain_waiting(facts: &Facts, job: &JobFacts) -> Explanation {
    let next = next_step(facts, job);
    let kind = if matches!(next, Some(PreSend::LookUp)) { CallKind::Lookup } else { CallKind::Charge };
    let outlook = limit::outlook(facts, job, kind);
    let verdicts = vec![
        ("recorded", recorded(facts, job)),
        ("provider", provider(facts, job)),
        ("time", time(facts, job, &outlook)),
        ("lane", lane(facts)),
        ("limiter", limiter(facts, job)),
        ("account", limit::account(facts, job, kind, &outlook)),
        ("limit", limit::limit(facts, job, kind, &outlook)),
        ("turn", limit::scheduling(facts, job, &outlook)),
        ("sent", CheckResult::passed("")),
        ("outcome", CheckResult::passed("")),
    ];
    let (gates, stands_at) = until_blocked(verdicts);
    let (stands_at, words) = stands_at.unzip();
    let words = words.unwrap_or_default();
    let not_before = stands_at.as_ref().and_then(|at| at.starts_in.max(at.held_for));
    let mut summary = match job.state.as_str() {
        "unknown" => unknown_summary(job, next.as_ref(), &words),
        _ if facts.job.is_none() => format!("published, not recorded yet; {words}"),
        _ => words,
    };
    if let (Some(expires_at), "waiting") = (job.expires_at, job.state.as_str())
        && facts.until(expires_at) <= not_before.unwrap_or_default()
    {
        summary = format!("{summary}; it expires before, {}", format::instant(expires_at, facts.now));
    }
    let state = if facts.job.is_none() { "queued" } else { job.state.as_str() };
    Explanation {
        state: state.to_owned(),
        provider: Some(job.provider.clone()),
        summary,
        checks: gates,
        blocked_at: stands_at,
    }
}

/// A request has been written down and no answer yet.
pub(super) fn explain_in_flight(facts: &Facts, job: &JobFacts) -> Explanation {
    let (number, began_at) = job.requests.last().map_or((1, job.updated_at), |last| (last.number, last.began_at));
    let since = format::duration(facts.since(began_at));
    let began = format::clock(began_at, facts.now);
    let summary = match &facts.claim {
        ClaimState::Unclaimed => format!(
            "request {number} has been on the wire since {began} ({since}), and its worker is lost: whoever takes the job \
             next holds its outcome for unknown"
        ),
        ClaimState::OtherWorker { worker }
        | ClaimState::AwaitingEgress { worker, .. }
        | ClaimState::AskedWorker { worker, .. } => {
            let most = facts.row.provider.as_ref().map_or_else(String::new, |provider| {
                format!("; its answer is waited for at most {}", format::duration(provider.timeout))
            });
            format!("request {number} is on the wire since {began} ({since}), in hand of worker {worker}{most}")
        }
    };
    let mut verdicts = vec![("recorded", recorded(facts, job))];
    let on_the_way = ["provider", "time", "lane", "limiter", "account", "limit", "turn"];
    verdicts.extend(on_the_way.map(|name| {
        let put_down = job.requests.last().filter(|_| name == "time").and_then(|it| delayed_before(facts, job, it));
        (name, put_down.unwrap_or_else(|| CheckResult::passed(format!("passed for request {number}"))))
    }));
    verdicts.push(("sent", CheckResult::Passed(Some(began_at), format!("request {number} began at {began}"))));
    verdicts.push(("outcome", CheckResult::blocked("outcome", summary.clone())));
    let (gates, stands_at) = until_blocked(verdicts);
    let stands_at = stands_at.map(|(at, _)| at);
    Explanation {
        state: job.state.clone(),
        provider: Some(job.provider.clone()),
        summary,
        checks: gates,
        blocked_at: stands_at,
    }
}

/// What is done with a job of unknown outcome, and when.
fn unknown_summary(job: &JobFacts, next: Option<&PreSend>, words: &str) -> String {
    let reason = job.reason.as_deref().unwrap_or("no answer told");
    let next = match next {
        Some(PreSend::Charge) => "next, the same request under the same key".to_owned(),
        Some(PreSend::LookUp) => "next, the provider is asked what became of it".to_owned(),
        Some(PreSend::Transition(Transition::Finalize { reason, .. })) => format!("next, a person decides ({reason})"),
        Some(PreSend::Transition(Transition::Retry { reason, .. })) => format!("next, it waits again ({reason})"),
        None => "what is next depends on its provider's row".to_owned(),
    };
    format!("maybe charged: the outcome of its last request is unknown ({reason}); {next}; {words}")
}

/// What will be done with it when it is taken next; `None` without a row that says.
fn next_step(facts: &Facts, job: &JobFacts) -> Option<PreSend> {
    let policy = facts.row.provider.as_ref()?.retry_policy();
    let wait = facts.until(job.wake_at);
    let began = job.revived_at.unwrap_or(job.created_at).max(job.not_before.unwrap_or_default());
    let at = |instant: EpochMs| facts.since(instant) + wait;
    let charges = u32::try_from(job.requests.len()).unwrap_or(u32::MAX).saturating_sub(job.lookups);
    let history = AttemptHistory {
        attempts: job.attempts,
        requests: charges,
        lookups: job.lookups,
        resend: job.resend,
        unknown: job.state == "unknown",
        age: at(began),
        first_sent_age: job.first_sent_at.map(at),
        unknown_age: job.unknown_since.map(at),
        throttle_generation: 1,
        lost_holders: job.lost_holders,
        probe: false,
    };
    let expired = job.expires_at.is_some_and(|expires_at| facts.until(expires_at) <= wait);
    Some(before_request(&history, &policy, expired))
}

fn provider(facts: &Facts, job: &JobFacts) -> CheckResult {
    let (name, problems) = (&job.provider, facts.row.problems.join("; "));
    let Some(provider) = &facts.row.provider else {
        return CheckResult::blocked(
            "provider",
            match problems.as_str() {
                "" => format!("there is no provider row {name}: `sluicegate provider apply FILE` adds one"),
                problems => format!("the row of provider {name} cannot be meant: {problems}"),
            },
        );
    };
    if !provider.enabled {
        return CheckResult::blocked(
            "provider",
            format!("provider {name} is disabled: its row says `enabled = false`"),
        );
    }
    if provider.paused {
        let words = format!("provider {name} is paused: `sluicegate provider resume {name}` lets its jobs go on");
        return CheckResult::blocked("provider", words);
    }
    if facts.row.spec.is_none() {
        let quota = &provider.quota;
        let words = format!("another row of quota {quota} cannot be meant, so what {name} may send is not known");
        return CheckResult::blocked("provider", words);
    }
    CheckResult::passed(match problems.as_str() {
        "" => format!("{name} is enabled"),
        problems => format!("{name} is enabled by its last good row; the one that is there now is bad: {problems}"),
    })
}

fn time(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> CheckResult {
    if !is_delayed(facts, job) {
        let came_at = job.wake_at.min(facts.now);
        return CheckResult::Passed(Some(came_at), format!("its time came {}", format::instant(came_at, facts.now)));
    }
    let until = format::instant(job.wake_at, facts.now);
    let reason = job.reason.as_deref().unwrap_or_default();
    let by_limiter = limit::delaying_limit(job).is_some() || limit::delayed_as_blocked(job);
    if by_limiter || reason::is_limiter_wide(reason) || delayed_with_lane(facts, reason) {
        return CheckResult::passed(format!("parked until {until}, for what is named below"));
    }
    let words = match job.not_before {
        Some(not_before) if not_before >= job.wake_at => format!("its `not_before` is {until}"),
        _ if reason.is_empty() => format!("parked until {until}"),
        _ => format!("parked until {until}: {reason}"),
    };
    // It comes back at the end of its lane's queue.
    let behind = match outlook.jobs_ahead {
        0 => String::new(),
        before => format!("; then about {before} before it{}", limit::start_text(facts, outlook.starts_in)),
    };
    let (turn_in, before_it) = (outlook.starts_in, Some(outlook.jobs_ahead));
    let held_for = Some(facts.until(job.wake_at));
    let at = BlockedAt { check: "time", starts_in: turn_in, held_for, jobs_ahead: before_it, ..BlockedAt::default() };
    CheckResult::Blocked(Box::new(at), format!("{words}{behind}"))
}

/// Whether it is parked for what its lane rests for now: the lane's cause says more.
fn delayed_with_lane(facts: &Facts, reason: &str) -> bool {
    match &facts.lane {
        LaneFacts::Paused { cause, .. } => reason == cause || reason.starts_with(reason::UNBUILDABLE_PREFIX),
        LaneFacts::IntakePaused { cause, .. } => reason == cause,
        LaneFacts::NotAsked | LaneFacts::Absent | LaneFacts::Running | LaneFacts::Probing { .. } => false,
    }
}

/// In a delay queue, or in the ledger alone, until its time.
pub(super) fn is_delayed(facts: &Facts, job: &JobFacts) -> bool {
    facts.claim == ClaimState::Unclaimed && job.wake_at > facts.now
}

fn blocked_for(gate: &'static str, words: impl Into<String>, wait: Duration) -> CheckResult {
    let at = BlockedAt { check: gate, held_for: Some(wait), ..BlockedAt::default() };
    CheckResult::Blocked(Box::new(at), words.into())
}

fn lane(facts: &Facts) -> CheckResult {
    let until = |ends_in: Duration| format::instant(later(facts.now, ends_in), facts.now);
    let of_the_limiter = |cause: &str| reason::parse_limit(cause).is_some() || reason::is_limiter_wide(cause);
    match &facts.lane {
        LaneFacts::NotAsked => CheckResult::passed("not known: no running process was asked"),
        LaneFacts::Absent => {
            CheckResult::blocked("lane", "this worker has no lane for its provider (yet): its log says why")
        }
        LaneFacts::Running => CheckResult::passed("takes jobs and sends them"),
        LaneFacts::IntakePaused { cause, .. } if of_the_limiter(cause) => {
            CheckResult::passed(format!("takes no more: {cause}"))
        }
        LaneFacts::IntakePaused { cause, ends_in } if facts.claim == ClaimState::Unclaimed => {
            blocked_for("lane", format!("the lane takes no more jobs until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::IntakePaused { .. } => CheckResult::passed("takes no more, but has this one"),
        LaneFacts::Paused { cause, ends_in } => {
            blocked_for("lane", format!("the lane sends nothing until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::Probing { cause } => CheckResult::blocked(
            "lane",
            format!("one job at a time is sent, to see whether its provider is up again ({cause})"),
        ),
    }
}

fn limiter(facts: &Facts, job: &JobFacts) -> CheckResult {
    let of_place = match &facts.claim {
        ClaimState::AskedWorker { position: Some(place), .. } => place.refused.as_ref(),
        _ => None,
    };
    for refused in [of_place, facts.limiter.block.as_ref()].into_iter().flatten() {
        if let Some(words) = refused_by_limiter(facts, job, refused) {
            return blocked_for("limiter", words, refused.wait);
        }
    }
    if let Some(why) = &facts.limiter.unavailable {
        return CheckResult::blocked("limiter", format!("nothing is granted while the limiter cannot be asked: {why}"));
    }
    match &job.reason {
        Some(reason) if is_delayed(facts, job) && reason::is_limiter_wide(reason) => {
            let words = format!("{reason}; it is looked at again {}", format::instant(job.wake_at, facts.now));
            blocked_for("limiter", words, facts.until(job.wake_at))
        }
        _ if facts.limiter.uses.is_empty() => {
            CheckResult::passed("not asked; what is told of limits is from the ledger")
        }
        _ => CheckResult::passed("grants"),
    }
}

/// Why the limiter grants nobody anything; `None` when it is a limit, or something of the job's own, that refuses.
fn refused_by_limiter(facts: &Facts, job: &JobFacts, refused: &PermitRefusal) -> Option<String> {
    let earliest = format::instant(later(facts.now, refused.wait), facts.now);
    Some(match &refused.reason {
        PermitRefusalReason::Cold => format!(
            "the limiter has lost its state and grants nothing until what may still count is known; it is asked again \
             {earliest}"
        ),
        PermitRefusalReason::NeedsHistory => format!(
            "the limiter did not count what was used of a limit before, and the ledger is asked; the limiter is asked again \
             {earliest}"
        ),
        PermitRefusalReason::Paused => format!("{} asked for a pause: nothing is sent before {earliest}", job.provider),
        PermitRefusalReason::StoreUnavailable(why) => {
            format!("nothing is granted while the limiter's store is away: {why}")
        }
        PermitRefusalReason::StaleSettings => {
            "the limiter knows newer settings, which this worker is loading".to_owned()
        }
        PermitRefusalReason::Stopping => "the worker that has it is stopping and gives it back".to_owned(),
        PermitRefusalReason::Limit(_) | PermitRefusalReason::Oversized | PermitRefusalReason::Blocked => return None,
    })
}

pub(super) fn later(now: EpochMs, wait: Duration) -> EpochMs {
    EpochMs(now.0.saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)))
}
