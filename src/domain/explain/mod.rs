//! Explanation of one job: the checks that it has passed, the one that blocks it, and its estimated start.
//!
//! Each sentence is based on a fact ([`facts`]), and each estimated start on the limiter's own state machine
//! ([`forecast`]). A backend that could not be asked is named as unknown. The operator's next step is named as the
//! command to type.

use std::time::Duration;

use self::check::{CheckResult, delayed_before, recorded, until_blocked};
use self::facts::{Facts, JobFacts, LaneQueue, MessageSearch};
use super::clear_time::ClearTime;
use super::format;
use super::outcome::ACCOUNT_REFUSED;
use super::time::EpochMs;

mod check;
pub mod facts;
pub mod forecast;
mod outlook;
mod pending;
#[cfg(test)]
mod tests;

pub use self::check::{BlockedAt, CHECKS, Explanation, JobCheck};
pub use self::outlook::{LimitWait, NextStart, NextStartInput};

/// Explains one job from its facts.
pub fn explain(facts: &Facts) -> Explanation {
    match (&facts.job, &facts.unrecorded) {
        (None, None) => unrecorded(facts),
        (None, Some(job)) => pending::explain_waiting(facts, job),
        (Some(job), _) => match job.state.as_str() {
            "waiting" | "unknown" => pending::explain_waiting(facts, job),
            "sending" => pending::explain_in_flight(facts, job),
            _ => explain_finished(facts, job),
        },
    }
}

/// Explanation of an id that the ledger does not know.
fn unrecorded(facts: &Facts) -> Explanation {
    let id = &facts.id;
    let summary = match facts.rejected.first() {
        Some(rejected) => format!(
            "{id} on lane {} can never be a job ({}: {}), since {}; publish a corrected message",
            rejected.lane,
            rejected.reason,
            rejected.detail,
            facts.instant(rejected.at),
        ),
        None => format!("the ledger has no job {id}{}", where_message_may_be(facts)),
    };
    Explanation { state: "unrecorded".to_owned(), provider: None, summary, checks: Vec::new(), blocked_at: None }
}

/// The places where its message may be, as part of a sentence.
fn where_message_may_be(facts: &Facts) -> String {
    const LOST: &str = "it was never published, or its message was invalid and its id unreadable (payments.invalid)";
    let lanes = match &facts.message_search {
        MessageSearch::NotAsked => {
            return format!(
                "; if it was published, its message waits in its lane's queue (`sluicegate status` shows how many do); \
                 otherwise {LOST}"
            );
        }
        MessageSearch::Searched => return format!(", and no lane's queue has its message: {LOST}"),
        MessageSearch::MayHold(lanes) if lanes.is_empty() => {
            return format!(", and no lane's queue holds a message: {LOST}");
        }
        MessageSearch::MayHold(lanes) => lanes,
    };
    let lane = |lane: &LaneQueue| {
        let clears = clear_time_text(&lane.clears, facts.now);
        format!("{} ({}{clears})", lane.provider, format::count(lane.ready, "message"))
    };
    let lanes: Vec<String> = lanes.iter().map(lane).collect();
    format!("; if it was published, its message waits in the queue of {}; otherwise {LOST}", lanes.join(", or of "))
}

/// Clear time of a lane's backlog, as the end of a phrase about its messages; empty if it is not known.
fn clear_time_text(clears: &ClearTime, now: EpochMs) -> String {
    let then = |wait: Duration| format::clock(now.plus(wait), now);
    match clears {
        ClearTime::In(wait) => format!(", all sent by about {}", then(*wait)),
        ClearTime::DependsOnAccounts { at_least, .. } => format!(", all sent by {} at the earliest", then(*at_least)),
        ClearTime::Never { limit: Some(limit) } => format!(", nothing is sent: limit {limit} is 0"),
        ClearTime::Never { limit: None } => ", all blocked by an account rule".to_owned(),
        ClearTime::NotWhilePaused => ", paused".to_owned(),
        ClearTime::NotWhileDisabled => ", disabled".to_owned(),
        ClearTime::NotWhileBreakerOpen => ", circuit breaker open".to_owned(),
        ClearTime::Unknown(_) => String::new(),
    }
}

fn explain_finished(facts: &Facts, job: &JobFacts) -> Explanation {
    let id = &facts.id;
    let since = facts.instant(job.updated_at);
    let reason = match job.reason.as_deref() {
        Some(ACCOUNT_REFUSED) if job.requests.is_empty() => ": a rule of its provider refuses its account".to_owned(),
        Some(reason) => format!(": {reason}"),
        None => String::new(),
    };
    let requests = match job.requests.len() {
        0 => "nothing was ever sent".to_owned(),
        requests => format!("after {}", format::count(requests as u64, "request")),
    };
    let by_hand = job.manual_change.as_ref().map(|change| {
        let unquoted = change.reason.as_deref().filter(|_| !change.is_decisive);
        let reason = unquoted.map(|reason| format!(" ({reason})")).unwrap_or_default();
        format!("; changed by {}{reason}", change.operator)
    });
    let by_hand = by_hand.unwrap_or_default();
    let what = match job.state.as_str() {
        "succeeded" => {
            let reference = job.reference.as_deref().map(|reference| format!(" as {reference}")).unwrap_or_default();
            format!("charged{reference} at {since}, {requests}{reason}{by_hand}")
        }
        "declined" => format!("declined at {since}, {requests}{reason}{by_hand}; not charged"),
        "expired" => {
            format!("expired at {since}, {requests}{reason}; confirmed not charged; publish a new payment to charge")
        }
        "cancelled" => format!("cancelled at {since}, {requests}{reason}{by_hand}; confirmed not charged"),
        "dead" => format!(
            "retries exhausted at {since}, {requests}{reason}; confirmed not charged: `sluicegate dlq replay {id}` tries \
             again, `sluicegate dlq discard {id} --yes` ends it"
        ),
        "review" if job.requests.is_empty() => format!(
            "in manual review since {since}, {requests}{reason}; confirmed not charged: fix the cause, then \
             `sluicegate jobs resolve {id} --as resend`, or end it with `--as declined`"
        ),
        "review" => format!(
            "in manual review since {since}, {requests}{reason}; look at the provider, then `sluicegate jobs resolve \
             {id} --as succeeded` (or `declined`, or `resend` if it is confirmed not charged)"
        ),
        other => format!("is `{other}` since {since}"),
    };
    let event = match job.event {
        Some(Some(at)) => format!("; its event was published at {}", facts.instant(at)),
        Some(None) => "; its event is not published yet".to_owned(),
        None => String::new(),
    };
    let summary = format!("{what}{event}");
    let (checks, blocked_at) = checks(facts, job, &summary);
    Explanation { state: job.state.clone(), provider: Some(job.provider.clone()), summary, checks, blocked_at }
}

fn checks(facts: &Facts, job: &JobFacts, summary: &str) -> (Vec<JobCheck>, Option<BlockedAt>) {
    let mut results = vec![("recorded", recorded(facts, job))];
    let last = job.requests.last();
    if let Some(last) = last {
        let earlier = CHECKS.iter().skip(1).take_while(|name| **name != "sent");
        results.extend(earlier.map(|name| {
            let delayed = if *name == "time" { delayed_before(facts, job, last) } else { None };
            (*name, delayed.unwrap_or_else(|| CheckResult::routine("passed for its last request")))
        }));
        let text = format!("request {} was sent at {}", last.number, facts.instant(last.began_at));
        results.push(("sent", CheckResult::Passed(Some(last.began_at), text)));
    }
    let outcome = if job.state == "review" {
        CheckResult::blocked("outcome", summary)
    } else {
        CheckResult::Passed(Some(job.updated_at), job.state.clone())
    };
    results.push(("outcome", outcome));
    let (checks, blocked) = until_blocked(results);
    (checks, blocked.map(|(at, _)| at))
}
