//! Jobs that wait for no gate any more: why, since when, and what a person can do.
//!
//! Refuses to name a command that would be refused: each belongs to its state.

use super::facts::{Facts, JobFacts};
use super::{BlockedAt, CHECKS, Explanation, JobCheck, delayed_before, format, recorded, until_blocked};
use crate::domain::explain::CheckResult;

pub(super) fn explain_finished(facts: &Facts, job: &JobFacts) -> Explanation {
    let id = &facts.id;
    let since = format::instant(job.updated_at, facts.now);
    let because = job.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    let requests = match job.requests.len() {
        0 => "nothing was ever sent".to_owned(),
        many => format!("after {}", format::count(many as u64, "request")),
    };
    let by_hand = job.manual_change.as_ref().map(|by| {
        let because = by.reason.as_deref().map(|because| format!(" ({because})")).unwrap_or_default();
        format!("; changed by {}{because}", by.operator)
    });
    let by_hand = by_hand.unwrap_or_default();
    let what = match job.state.as_str() {
        "succeeded" => {
            let reference = job.reference.as_deref().map(|reference| format!(" as {reference}")).unwrap_or_default();
            format!("charged{reference}, {since}, {requests}{because}{by_hand}")
        }
        "declined" => format!("declined for good, {since}, {requests}{because}{by_hand}; nothing was charged"),
        "expired" => {
            format!("expired {since}, {requests}{because}; surely not charged; publish a new payment to charge")
        }
        "cancelled" => format!("cancelled {since}, {requests}{because}{by_hand}; surely not charged"),
        "dead" => format!(
            "given up {since}, {requests}{because}; surely not charged: `sluicegate dlq replay {id}` tries again, \
             `sluicegate dlq discard {id} --yes` ends it"
        ),
        "review" if job.requests.is_empty() => format!(
            "waits for a person since {since}, {requests}{because}; surely not charged: mend what that names and then \
             `sluicegate jobs resolve {id} --as resend`, or end it with `--as declined`"
        ),
        "review" => format!(
            "waits for a person since {since}, {requests}{because}; look at the provider, then `sluicegate jobs resolve \
             {id} --as succeeded` (or `declined`, or `resend` if it was surely not charged)"
        ),
        other => format!("is `{other}` since {since}"),
    };
    let event = match job.event {
        Some(Some(at)) => format!("; its event was published {}", format::instant(at, facts.now)),
        Some(None) => "; its event waits to be published".to_owned(),
        None => String::new(),
    };
    let summary = format!("{what}{event}");
    let (gates, stands_at) = gates(facts, job, &summary);
    Explanation {
        state: job.state.clone(),
        provider: Some(job.provider.clone()),
        summary,
        checks: gates,
        blocked_at: stands_at,
    }
}

fn gates(facts: &Facts, job: &JobFacts, summary: &str) -> (Vec<JobCheck>, Option<BlockedAt>) {
    let mut verdicts = vec![("recorded", recorded(facts, job))];
    let last = job.requests.last();
    if let Some(last) = last {
        let on_the_way = CHECKS.iter().skip(1).take_while(|name| **name != "sent");
        verdicts.extend(on_the_way.map(|name| {
            let put_down = if *name == "time" { delayed_before(facts, job, last) } else { None };
            (*name, put_down.unwrap_or_else(|| CheckResult::passed("passed for its last request")))
        }));
        let words = format!("request {} left {}", last.number, format::instant(last.began_at, facts.now));
        verdicts.push(("sent", CheckResult::Passed(Some(last.began_at), words)));
    }
    let outcome = if job.state == "review" {
        CheckResult::blocked("outcome", summary)
    } else {
        CheckResult::Passed(Some(job.updated_at), job.state.clone())
    };
    verdicts.push(("outcome", outcome));
    let (gates, stands_at) = until_blocked(verdicts);
    (gates, stands_at.map(|(at, _)| at))
}
