//! Explanation of a job by its state: it waits, has a request in flight, or is finished. Check by check, up to the one
//! that blocks.
//!
//! The order of the checks is that of [`super::CHECKS`], so the first block is the one that is named.

use std::time::Duration;

use super::check::{
    BlockedAt, CHECKS, CheckResult, Explanation, account, delayed_before, limit, recorded, scheduling, start_text,
    until_blocked,
};
use super::outlook::{Outlook, delaying_limit, outlook};
use super::{AccountHolder, BacklogPlace, ClaimState, Facts, JobFacts, LaneFacts, PermitRefusal};
use crate::domain::disposition::{AttemptHistory, PreSend, SendObstacle, Transition, before_request};
use crate::domain::format;
use crate::domain::outcome::ACCOUNT_REFUSED;
use crate::domain::permit_protocol::CallKind;
use crate::domain::time::EpochMs;
use crate::domain::wait_reason::{BlockReason, Wait, WaitReason};

pub fn explain_waiting(facts: &Facts, job: &JobFacts) -> Explanation {
    let next = next_step(facts, job);
    let kind = if matches!(next, Some(PreSend::LookUp)) { CallKind::Lookup } else { CallKind::Charge };
    let outlook = outlook(facts, job, kind);
    let results = vec![
        ("recorded", recorded(facts, job)),
        ("provider", provider(facts, job)),
        ("time", time(facts, job, &outlook)),
        ("lane", lane(facts)),
        ("limiter", limiter(facts, job)),
        ("account", account(facts, job, kind, &outlook)),
        ("limit", limit(facts, job, kind, &outlook)),
        ("queue", scheduling(facts, job, &outlook)),
        ("sent", CheckResult::routine("")),
        ("outcome", CheckResult::routine("")),
    ];
    let (checks, blocked) = until_blocked(results);
    let (blocked_at, text) = blocked.unzip();
    let text = text.unwrap_or_default();
    let not_before = blocked_at.as_ref().and_then(|at| at.starts_in.max(at.held_for));
    let mut summary = match job.state.as_str() {
        "unknown" => unknown_summary(job, next.as_ref(), &text),
        _ if facts.job.is_none() => format!("published, not recorded yet; {text}"),
        _ => text,
    };
    if let (Some(expires_at), "waiting") = (job.expires_at, job.state.as_str())
        && facts.until(expires_at) <= not_before.unwrap_or_default()
    {
        summary = format!("{summary}; it expires before that, {}", facts.instant(expires_at));
    }
    if let Some(place) = &facts.backlog {
        summary = format!("{summary}; it is {}", place_text(facts, job, place));
    }
    let state = if facts.job.is_none() { "queued" } else { job.state.as_str() };
    Explanation { state: state.to_owned(), provider: Some(job.provider.clone()), summary, checks, blocked_at }
}

/// Explains a job whose request was sent and has no response yet.
pub fn explain_in_flight(facts: &Facts, job: &JobFacts) -> Explanation {
    let (number, began_at) = job.requests.last().map_or((1, job.updated_at), |last| (last.number, last.began_at));
    let since = format::duration(facts.since(began_at));
    let began = format::clock(began_at, facts.now);
    let summary = match &facts.claim {
        ClaimState::Unclaimed => format!(
            "request {number} is in flight since {began} ({since}), and its worker is lost: the worker that takes the \
             job next records the outcome as unknown"
        ),
        ClaimState::OtherWorker { worker }
        | ClaimState::AwaitingEgress { worker, .. }
        | ClaimState::AskedWorker { worker, .. } => {
            let timeout = facts.row.provider.as_ref().map_or_else(String::new, |provider| {
                format!("; the response timeout is {}", format::duration(provider.timeout))
            });
            format!("request {number} is in flight since {began} ({since}) at worker {worker}{timeout}")
        }
    };
    let mut results = passed_before(facts, job, &format!("passed for request {number}"));
    results.push(("sent", CheckResult::Passed(Some(began_at), format!("request {number} began at {began}"))));
    results.push(("outcome", CheckResult::blocked("outcome", summary.clone())));
    conclude(job, summary, results)
}

/// The checks before the last request of a job, which has passed them.
fn passed_before(facts: &Facts, job: &JobFacts, text: &str) -> Vec<(&'static str, CheckResult)> {
    let earlier = CHECKS.into_iter().skip(1).take_while(|name| *name != "sent");
    let check = |name| {
        let delayed = job.requests.last().filter(|_| name == "time").and_then(|last| delayed_before(facts, job, last));
        (name, delayed.unwrap_or_else(|| CheckResult::routine(text)))
    };
    [("recorded", recorded(facts, job))].into_iter().chain(earlier.map(check)).collect()
}

fn conclude(job: &JobFacts, summary: String, results: Vec<(&'static str, CheckResult)>) -> Explanation {
    let (checks, blocked) = until_blocked(results);
    let (state, provider) = (job.state.clone(), Some(job.provider.clone()));
    Explanation { state, provider, summary, checks, blocked_at: blocked.map(|(at, _)| at) }
}

/// Explains a job that is in a final state, dead or in manual review.
pub fn explain_finished(facts: &Facts, job: &JobFacts) -> Explanation {
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
    let event = match job.is_event_published {
        Some(true) => "; its event is published",
        Some(false) => "; its event is not published yet",
        None => "",
    };
    let summary = format!("{what}{event}");
    let mut results = match job.requests.last() {
        Some(last) => {
            let text = format!("request {} was sent at {}", last.number, facts.instant(last.began_at));
            let mut passed = passed_before(facts, job, "passed for its last request");
            passed.push(("sent", CheckResult::Passed(Some(last.began_at), text)));
            passed
        }
        None => vec![("recorded", recorded(facts, job))],
    };
    let outcome = match job.state.as_str() {
        "review" => CheckResult::blocked("outcome", summary.as_str()),
        state => CheckResult::Passed(Some(job.updated_at), state.to_owned()),
    };
    results.push(("outcome", outcome));
    conclude(job, summary, results)
}

/// Summary of a job with unknown outcome: the next step, and what it waits for.
fn unknown_summary(job: &JobFacts, next: Option<&PreSend>, text: &str) -> String {
    let reason = job.reason.as_deref().unwrap_or("no reason recorded");
    let next = match next {
        Some(PreSend::Charge) => "next, the same request is sent under the same key".to_owned(),
        Some(PreSend::LookUp) => "next, the provider is asked for the outcome (look-up)".to_owned(),
        Some(PreSend::Transition(Transition::Finalize { reason, .. })) => format!("next, manual review ({reason})"),
        Some(PreSend::Transition(Transition::Retry { reason, .. })) => format!("next, it waits again ({reason})"),
        Some(PreSend::Transition(Transition::SucceedInPart(_))) | None => {
            "the next step depends on its provider's row".to_owned()
        }
    };
    format!("outcome unknown: the payment may have been charged ({reason}); {next}; {text}")
}

/// Next step when a worker takes the job; `None` without a valid row.
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
        lost_holders: job.lost_holders,
        ..AttemptHistory::default()
    };
    let expired = job.expires_at.is_some_and(|expires_at| facts.until(expires_at) <= wait);
    let provider = facts.row.provider.as_ref()?;
    let refused = provider.refuses_account(job.account.as_deref());
    let currency = job.currency.as_deref();
    let unsupported = currency.and_then(|currency| provider.amounts.convert(job.amount, currency).err());
    Some(before_request(&history, &policy, SendObstacle::of(refused, expired, unsupported)))
}

fn provider(facts: &Facts, job: &JobFacts) -> CheckResult {
    let (name, problems) = (&job.provider, facts.row.problems.join("; "));
    let Some(provider) = &facts.row.provider else {
        return CheckResult::blocked(
            "provider",
            match problems.as_str() {
                "" => format!("there is no provider row {name}: `sluicegate provider apply FILE` adds one"),
                problems => format!("the row of provider {name} is invalid: {problems}"),
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
        let text = format!("provider {name} is paused: `sluicegate provider resume {name}` resumes it");
        return CheckResult::blocked("provider", text);
    }
    if facts.row.spec.is_none() {
        let quota = &provider.quota;
        let text = format!("another row of quota {quota} is invalid, so the limits of {name} are not known");
        return CheckResult::blocked("provider", text);
    }
    match problems.as_str() {
        "" => CheckResult::routine(format!("{name} is enabled")),
        problems => CheckResult::passed(format!(
            "{name} is enabled by its last valid row; the current row is invalid: {problems}"
        )),
    }
}

fn time(facts: &Facts, job: &JobFacts, outlook: &Outlook) -> CheckResult {
    if facts.backlog.as_ref().is_some_and(|place| place.block.is_some()) {
        return CheckResult::passed("its account's payments are blocked, for a reason named below");
    }
    if !facts.is_delayed(job) {
        let came_at = job.wake_at.min(facts.now);
        return CheckResult::Passed(Some(came_at), format!("due since {}", facts.instant(came_at)));
    }
    let until = facts.instant(job.wake_at);
    let reason = job.reason.as_deref().unwrap_or_default();
    let by_limiter = delaying_limit(job).is_some() || job.wait_reason == Some(WaitReason::AccountBlocked);
    if by_limiter || is_limiter_wide(job) || delayed_with_lane(facts, job) {
        return CheckResult::passed(format!("delayed until {until}, for a reason named below"));
    }
    let text = match job.not_before {
        Some(not_before) if not_before >= job.wake_at => format!("its `not_before` is {until}"),
        _ if reason.is_empty() => format!("delayed until {until}"),
        _ => format!("delayed until {until}: {reason}"),
    };
    // A delayed job returns to the end of its lane's queue.
    let queue = match outlook.queue.jobs_ahead {
        None | Some(0) => String::new(),
        Some(ahead) => format!("; then about {ahead} ahead of it{}", start_text(facts, outlook.queue.starts_in)),
    };
    let (starts_in, jobs_ahead) = (outlook.queue.starts_in, outlook.queue.jobs_ahead);
    let held_for = Some(facts.until(job.wake_at));
    let at = BlockedAt { check: "time", starts_in, held_for, jobs_ahead, ..BlockedAt::default() };
    CheckResult::Blocked(Box::new(at), format!("{text}{queue}"))
}

fn is_limiter_wide(job: &JobFacts) -> bool {
    job.wait_reason.as_ref().is_some_and(WaitReason::is_limiter_wide)
}

/// Whether the job is delayed for the reason that pauses its lane now: then the lane's cause says more.
fn delayed_with_lane(facts: &Facts, job: &JobFacts) -> bool {
    match &facts.lane {
        LaneFacts::Paused { cause, .. } | LaneFacts::ClaimsPaused { cause, .. } => {
            job.wait_reason.as_ref() == Some(&cause.reason)
        }
        LaneFacts::Held { .. } => job.wait_reason == Some(WaitReason::LaneHeld),
        LaneFacts::NotAsked | LaneFacts::Absent | LaneFacts::Running | LaneFacts::Probing { .. } => false,
    }
}

fn blocked_for(check_name: &'static str, text: impl Into<String>, wait: Duration) -> CheckResult {
    let at = BlockedAt { check: check_name, held_for: Some(wait), ..BlockedAt::default() };
    CheckResult::Blocked(Box::new(at), text.into())
}

fn lane(facts: &Facts) -> CheckResult {
    // A look-up needs no message, and a job of the backlog has none.
    let needs_message = facts.claim == ClaimState::Unclaimed
        && facts.backlog.is_none()
        && facts.job.as_ref().is_none_or(|job| job.state == "waiting");
    if let Some(why) = facts.queue_problem.as_ref().filter(|_| needs_message) {
        return CheckResult::blocked("lane", format!("no worker takes it until the queue answers: {why}"));
    }
    let until = |ends_in: Duration| facts.instant_in(ends_in);
    let by_limiter = |cause: &Wait| cause.reason.limit().is_some() || cause.reason.is_limiter_wide();
    match &facts.lane {
        LaneFacts::NotAsked => CheckResult::passed("not known: no running process was asked"),
        LaneFacts::Absent => CheckResult::blocked("lane", "this worker has no lane for its provider: its log says why"),
        LaneFacts::Running => CheckResult::routine("takes jobs and sends them"),
        LaneFacts::ClaimsPaused { cause, .. } if by_limiter(cause) => {
            CheckResult::passed(format!("starts no more jobs: {cause}"))
        }
        LaneFacts::ClaimsPaused { cause, ends_in } if facts.claim == ClaimState::Unclaimed => {
            blocked_for("lane", format!("the lane starts no more jobs until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::ClaimsPaused { .. } => CheckResult::passed("starts no more jobs, but has this one"),
        LaneFacts::Paused { cause, ends_in } => {
            blocked_for("lane", format!("the lane sends nothing until {}: {cause}", until(*ends_in)), *ends_in)
        }
        LaneFacts::Held { cause } => CheckResult::blocked(
            "lane",
            format!(
                "the lane starts no charge until an operator releases it (`provider resume --release-hold`): {cause}"
            ),
        ),
        LaneFacts::Probing { cause } => {
            CheckResult::blocked("lane", format!("testing the provider with one payment at a time ({cause})"))
        }
    }
}

fn limiter(facts: &Facts, job: &JobFacts) -> CheckResult {
    let by_position = match &facts.claim {
        ClaimState::AskedWorker { position: Some(position), .. } => position.refused.as_ref(),
        _ => None,
    };
    for refused in [by_position, facts.limiter.block.as_ref()].into_iter().flatten() {
        if let Some(text) = refused_by_limiter(facts, job, refused) {
            return blocked_for("limiter", text, refused.wait);
        }
    }
    if let Some(why) = &facts.limiter.unavailable {
        return CheckResult::blocked(
            "limiter",
            format!("no permit is granted while the limiter is unavailable: {}", without_name(why)),
        );
    }
    match &job.reason {
        Some(reason) if facts.is_delayed(job) && is_limiter_wide(job) => {
            let text = format!("{reason}; it is checked again {}", facts.instant(job.wake_at));
            blocked_for("limiter", text, facts.until(job.wake_at))
        }
        _ if facts.limiter.uses.is_empty() => CheckResult::passed("not asked; usage is from the ledger"),
        _ => CheckResult::routine("grants permits"),
    }
}

/// A problem of the limiter store, for a sentence that names the store.
fn without_name(problem: &str) -> &str {
    problem.strip_prefix("limiter store unavailable: ").unwrap_or(problem)
}

/// Sentence for a limiter that grants no permit to any job; `None` if a limit or the job itself is the reason.
fn refused_by_limiter(facts: &Facts, job: &JobFacts, refused: &PermitRefusal) -> Option<String> {
    let earliest = facts.instant_in(refused.wait);
    Some(match &refused.reason {
        BlockReason::Cold => format!(
            "the limiter starts cold: no permit is granted until earlier requests are read from the ledger or have \
             aged out; next try {earliest}"
        ),
        BlockReason::NeedsHistory => {
            format!("the limiter did not count earlier usage of a limit, so the ledger is read; next try {earliest}")
        }
        BlockReason::Paused => format!("{} asked for a pause: nothing is sent before {earliest}", job.provider),
        BlockReason::StoreUnavailable(why) => {
            format!("no permit is granted while the limiter store is unavailable: {}", without_name(why))
        }
        BlockReason::StaleSettings => "the limiter knows newer settings, which this worker is loading".to_owned(),
        BlockReason::Stopping => "its worker is stopping and requeues it".to_owned(),
        BlockReason::Limit(_) | BlockReason::Oversized { .. } | BlockReason::AccountBlocked { .. } => return None,
    })
}

/// `payment invoice-7 of its account, whose request is in flight`.
fn holder_text(AccountHolder { id, state }: &AccountHolder) -> String {
    let what = match state.as_str() {
        "sending" => "whose request is in flight".to_owned(),
        "unknown" => "whose outcome is unknown".to_owned(),
        "review" => format!("which is in manual review (`sluicegate jobs resolve {id}` ends that)"),
        _ => "which is not decided".to_owned(),
    };
    format!("payment {id} of its account, {what}")
}

/// `the 17th of 230 waiting payments of account shop with priority 0`, and until when they are blocked.
fn place_text(facts: &Facts, job: &JobFacts, place: &BacklogPlace) -> String {
    let account = match &job.account {
        Some(account) => format!("of account {account}"),
        None => "without an account".to_owned(),
    };
    let class = match place.priority {
        Some(priority) => format!("with priority {priority}"),
        None => "of unknown outcome".to_owned(),
    };
    // The count and the position are read one after the other.
    let position = place.before_in_flow.saturating_add(1);
    let text = match place.waiting_in_flow.max(position) {
        1 => format!("the only waiting payment {account} {class}"),
        waiting => format!("the {} of {waiting} waiting payments {account} {class}", format::ordinal(position)),
    };
    let text = match &place.account_holder {
        Some(holder) => format!("{text}, held by {}", holder_text(holder)),
        None => text,
    };
    match &place.block {
        // A rule has no end: the block is one of several in a row.
        Some(block) if block.wait.reason == WaitReason::AccountBlocked => {
            format!("{text}, blocked while the rule exists")
        }
        Some(block) => format!("{text}, blocked until {}", facts.instant_in(block.left)),
        None => text,
    }
}
