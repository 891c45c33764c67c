//! Explanation of finished jobs: why they are finished, since when, and what an operator can do.
//!
//! Each command that a sentence names is one that accepts the job's state.

use super::facts::{Facts, JobFacts};
use super::{BlockedAt, CHECKS, Explanation, JobCheck, delayed_before, format, recorded, until_blocked};
use crate::domain::explain::CheckResult;
use crate::domain::outcome::ACCOUNT_REFUSED;

pub(super) fn explain_finished(facts: &Facts, job: &JobFacts) -> Explanation {
    let id = &facts.id;
    let since = format::instant(job.updated_at, facts.now);
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
        Some(Some(at)) => format!("; its event was published at {}", format::instant(at, facts.now)),
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
        let text = format!("request {} was sent at {}", last.number, format::instant(last.began_at, facts.now));
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
