//! Decision table of a job: what to do with it next, and what follows from an outcome, given the job's history.
//!
//! It only returns values; `worker::job` carries them out. `docs/decision-tables.md` shows the same tables. The
//! decisions after a look-up are in [`lookup`]. An unknown outcome is decided by `after_unknown` at once, and by
//! `before_request` when the job is taken again.
//!
//! Two rules hold in every row. A job with any attempt of unknown outcome never becomes `dead` or `expired`. A provider
//! that does not deduplicate never gets the same payment twice, unless the first request was never sent.

use std::time::Duration;

use super::backoff::RetryPolicy;
use super::format::count;
use super::local_fault::LocalFault;
use super::outcome::{ACCOUNT_REFUSED, FinalState, Outcome, PartialCharge, UnknownCause};
use super::sum::UnsupportedSum;
use super::wait_reason::{Wait, WaitReason};

pub mod lookup;

/// Longest wait of a job whose cost exceeds a limit; a raised limit ends it.
pub const OVERSIZED_WAIT: Duration = Duration::from_secs(1_800);

/// Longest wait that a response may impose on one job or lane. After it we ask again.
pub const HONOURED_WAIT_MAX: Duration = Duration::from_secs(15 * 60);
/// Shortest wait after a response that names one which has ended, or cannot be read.
const UNREADABLE_WAIT_MIN: Duration = Duration::from_secs(1);
/// Pause of a lane after a response that says our set-up is wrong, before it tries one more job.
pub const MISCONFIGURED_PAUSE: Duration = Duration::from_secs(30);

/// Time after such a pause in which payments that were refused leave the test to others, if there are any. Those that
/// a paused lane has delayed are back by then.
pub const REFUSED_YIELD: Duration = Duration::from_secs(10);
/// Longest wait of a payment that is refused again and again. It doubles with each refusal.
const REFUSED_WAIT_MAX: Duration = Duration::from_secs(15 * 60);
/// Refusals of one payment after which it goes to review, if another payment passed between each two of them.
pub const REFUSED_ALONE_MAX: u32 = 3;
/// Begins the reason of such a review.
pub const REFUSED_ALONE: &str = "refused_alone";

/// Time for which a lane takes no jobs after a fault of its own process; active jobs continue.
pub const LOCAL_FAULT_PAUSE: Duration = Duration::from_secs(1);
/// Number of workers in a row that may be lost while they hold a job's lease and before they begin a request for it.
/// The job may crash them. An unrelated kill hits a job once or twice, and each loss takes ten seconds to be noticed.
pub const LOST_HOLDERS_MAX: u32 = 5;

/// History of a job before the outcome at hand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptHistory {
    /// Attempts that counted.
    pub attempts: u32,
    /// All requests to charge, counted or not: a repeat that never counts must still wait longer each time.
    pub requests: u32,
    /// All look-ups, whatever they found.
    pub lookups: u32,
    pub resend: Resend,
    /// Whether any earlier attempt may have charged.
    pub unknown: bool,
    /// Time since the job could first be processed: since it was recorded, its `not_before`, or its last replay.
    pub age: Duration,
    /// Time since the first byte that may have been sent; `None`: nothing was ever sent.
    pub first_sent_age: Option<Duration>,
    /// Time since the start of the last charge whose outcome is unknown; `None`: there is none.
    pub unknown_age: Option<Duration>,
    /// Workers lost in a row while they held the job's lease and had begun no request.
    pub lost_holders: u32,
    /// The generation of consecutive 429s ([`super::backoff::ThrottleStreak`]) that a 429 of this request belongs to.
    pub throttle_generation: u32,
    /// This request is a circuit breaker probe: its failure does not count.
    pub probe: bool,
    /// Refusals of this payment, the one at hand included.
    pub refusals: Refusals,
}

/// How often a provider has refused a payment's request as such (address, method, credential), or it could not be built,
/// under the present version of its row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    pub all: u32,
    /// The first one, and each before which another payment of its account has passed since the last one; of those
    /// without an account, another one without.
    pub alone: u32,
}

/// Whether a look-up that found nothing allowed one more request to charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resend {
    #[default]
    Never,
    Granted,
    /// That request may have been sent.
    Used,
}

impl Resend {
    /// The name in the ledger; [`Resend::Never`] has none.
    pub fn from_name(name: Option<&str>) -> Option<Self> {
        match name {
            None => Some(Self::Never),
            Some("granted") => Some(Self::Granted),
            Some("used") => Some(Self::Used),
            Some(_) => None,
        }
    }
}

/// Why no charge may be sent for a job, whatever its history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendObstacle {
    /// Its `expires_at` has passed. A job of unknown outcome does not expire.
    Expired,
    /// A rule of its provider refuses its account.
    AccountRefused,
    /// The provider's row cannot express its sum. An earlier request had another row, and is repeated as it was.
    Unsupported(UnsupportedSum),
}

impl SendObstacle {
    /// The obstacle that decides: a refused account is declined, even if its job has expired.
    pub fn of(account_refused: bool, expired: bool, unsupported: Option<UnsupportedSum>) -> Option<Self> {
        match (account_refused, expired) {
            (true, _) => Some(Self::AccountRefused),
            (false, true) => Some(Self::Expired),
            (false, false) => unsupported.map(Self::Unsupported),
        }
    }
}

/// Decision on a job whose lease was acquired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PreSend {
    /// Send one request to charge: the first, or the frozen one again.
    Charge,
    /// Send one look-up.
    LookUp,
    /// Send nothing.
    Transition(Transition),
}

/// Change of the job's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transition {
    Finalize {
        state: FinalState,
        reason: String,
        reference: Option<String>,
    },
    /// Succeeded with a smaller sum.
    SucceedInPart(PartialCharge),
    /// Try again after the wait. `unknown` keeps the job's state `unknown` instead of `waiting`.
    Retry {
        after: Duration,
        unknown: bool,
        reason: Wait,
    },
}

impl Transition {
    /// The state that ends the job; `None`: it is tried again.
    pub fn final_state(&self) -> Option<FinalState> {
        match self {
            Self::Finalize { state, .. } => Some(*state),
            Self::SucceedInPart(_) => Some(FinalState::Succeeded),
            Self::Retry { .. } => None,
        }
    }

    /// Counts time that has passed since the response towards the wait.
    pub fn shorten(&mut self, passed: Duration) {
        if let Self::Retry { after, .. } = self {
            *after = after.saturating_sub(passed);
        }
    }
}

/// A pause that affects other jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PauseRequest {
    /// Pauses every lane of the quota, in all workers.
    Quota { wait: Duration },
    /// Pauses this process's lane.
    Lane { wait: Duration, cause: Wait },
    /// Stops this process's lane from claiming jobs; active jobs continue, and new ones are recorded.
    Claims { wait: Duration, fault: LocalFault },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disposition {
    pub transition: Transition,
    pub counts_attempt: bool,
    pub pause: Option<PauseRequest>,
}

/// Decides what follows from one request's outcome. `fraction` is a random number in 0..1.
pub fn after_outcome(outcome: &Outcome, history: &AttemptHistory, policy: &RetryPolicy, fraction: f64) -> Disposition {
    let uncounted = |wait: Duration, reason: Wait, pause: Option<PauseRequest>| {
        let transition = retry_or_give_up(wait, history.unknown, reason, history, policy);
        Disposition { transition, counts_attempt: false, pause }
    };
    let step = || policy.backoff.delay(history.requests.saturating_add(1), fraction);
    match outcome {
        Outcome::Accepted { reference } => finalize(FinalState::Succeeded, "accepted", reference.clone()),
        Outcome::PartlyAccepted(charge) => {
            let transition = Transition::SucceedInPart(charge.clone());
            Disposition { transition, counts_attempt: true, pause: None }
        }
        // Never sent again: the provider may have charged the other sum.
        Outcome::Differs { reason, reference } => finalize(FinalState::Review, reason, reference.clone()),
        Outcome::Declined { reason } => finalize(FinalState::Declined, reason, None),
        Outcome::Rejected { reason } => finalize(FinalState::Review, reason, None),
        Outcome::Throttled { retry_after } => {
            let wait = named_wait(*retry_after, || throttle_backoff(history, policy));
            uncounted(wait, WaitReason::Throttled.into(), Some(PauseRequest::Quota { wait }))
        }
        Outcome::Busy { retry_after } => uncounted(named_wait(*retry_after, step), WaitReason::ObjectBusy.into(), None),
        Outcome::Misconfigured { status } => {
            let detail = format!("provider answered {status}: check url, credentials and method");
            after_refusal(Wait::with_detail(WaitReason::Misconfigured, detail), history, policy)
        }
        Outcome::NotSent { cause } => {
            let reason = Wait::with_detail(WaitReason::Retry, cause);
            after_failure(history, policy, fraction, history.unknown, reason, None)
        }
        Outcome::LocalFault(fault) if fault.is_of_setup() => after_refusal(fault.wait(), history, policy),
        Outcome::LocalFault(fault) => {
            let pause = PauseRequest::Claims { wait: LOCAL_FAULT_PAUSE, fault: fault.clone() };
            uncounted(step(), fault.wait(), Some(pause))
        }
        Outcome::InProgress { retry_after } => {
            // The provider answered, so the probe did not fail.
            let history = AttemptHistory { probe: false, ..*history };
            let named = retry_after.map(|wait| named_wait(Some(wait), step));
            let next = after_failure(&history, policy, fraction, true, WaitReason::InProgress.into(), named);
            // The wait is about this payment.
            Disposition { pause: None, ..next }
        }
        Outcome::Unknown { cause, retry_after } => {
            let named = retry_after.map(|wait| named_wait(Some(wait), step));
            after_unknown(*cause, named, history, policy, fraction)
        }
        Outcome::Unconfirmed { refusal, .. } => {
            let history = AttemptHistory { unknown: true, ..*history };
            after_outcome(&Outcome::from(*refusal), &history, policy, fraction)
        }
    }
}

/// The wait that a provider names, bounded; `backoff` without one. A wait of zero has ended or cannot be read. The
/// provider meant to name one, and a job that came back at once would be refused again and again.
fn named_wait(retry_after: Option<Duration>, backoff: impl FnOnce() -> Duration) -> Duration {
    match retry_after {
        Some(wait) if wait.is_zero() => backoff().max(UNREADABLE_WAIT_MIN),
        Some(wait) => wait.min(HONOURED_WAIT_MAX),
        None => backoff(),
    }
}

/// Decides on a payment whose request as such is refused, or cannot be built, for this reason. It waits longer each time.
/// The pause is for the case that it is the lane's trouble.
pub fn after_refusal(reason: Wait, history: &AttemptHistory, policy: &RetryPolicy) -> Disposition {
    let Refusals { all, alone } = history.refusals;
    if alone >= REFUSED_ALONE_MAX {
        let charged = if history.unknown { "the outcome is unknown" } else { "confirmed not charged" };
        let reason = format!(
            "{REFUSED_ALONE}: refused {alone} times, and other payments passed in between; {charged}; {reason}"
        );
        return Disposition { transition: review(&reason), counts_attempt: false, pause: None };
    }
    let pause = PauseRequest::Lane { wait: MISCONFIGURED_PAUSE, cause: reason.clone() };
    let doubled = MISCONFIGURED_PAUSE.saturating_mul(1 << all.saturating_sub(1).min(16)).min(REFUSED_WAIT_MAX);
    let reason = match alone {
        0 | 1 => reason,
        _ => Wait { detail: Some(refused_detail(reason.detail, alone)), ..reason },
    };
    let transition = retry_or_give_up(doubled, history.unknown, reason, history, policy);
    Disposition { transition, counts_attempt: false, pause: Some(pause) }
}

fn refused_detail(detail: Option<String>, alone: u32) -> String {
    let detail = detail.unwrap_or_default();
    format!(
        "{detail}; others pass, so it waits alone, and goes to review at refusal {REFUSED_ALONE_MAX} ({alone} so far)"
    )
}

/// The wait after a 429 that names none. It holds for the whole quota, so it needs no random spread.
fn throttle_backoff(history: &AttemptHistory, policy: &RetryPolicy) -> Duration {
    policy.backoff.delay(history.throttle_generation, 1.0).min(HONOURED_WAIT_MAX)
}

/// Decides what may be sent for a job now. Called when the job is taken, and again when its permit has come.
pub fn before_request(history: &AttemptHistory, policy: &RetryPolicy, obstacle: Option<SendObstacle>) -> PreSend {
    if history.lost_holders >= LOST_HOLDERS_MAX {
        return PreSend::Transition(review(&workers_lost(history)));
    }
    if history.unknown {
        let resend_obstacle = match obstacle {
            Some(SendObstacle::AccountRefused) => Some(UNKNOWN_AND_REFUSED.to_owned()),
            Some(SendObstacle::Expired | SendObstacle::Unsupported(_)) | None => resend_obstacle(history, policy),
        };
        return match resend_obstacle {
            None => PreSend::Charge,
            Some(reason) => review_unless_lookup(history, policy, &reason).map_or(PreSend::LookUp, PreSend::Transition),
        };
    }
    match obstacle {
        Some(SendObstacle::AccountRefused) => PreSend::Transition(end(FinalState::Declined, ACCOUNT_REFUSED)),
        Some(SendObstacle::Expired) => PreSend::Transition(end(FinalState::Expired, "expires_at has passed")),
        Some(SendObstacle::Unsupported(unsupported)) => PreSend::Transition(give_up(false, &describe(unsupported))),
        None if history.age > policy.max_age => PreSend::Transition(give_up(false, TOO_OLD)),
        None => PreSend::Charge,
    }
}

fn describe(unsupported: UnsupportedSum) -> String {
    format!("{}: {}", unsupported.reason().code(), unsupported.describe())
}

/// Next step of a job of unknown outcome that must not be sent again. `None`: ask the provider.
pub fn review_unless_lookup(history: &AttemptHistory, policy: &RetryPolicy, reason: &str) -> Option<Transition> {
    let Some(lookup) = policy.lookup else { return Some(review(reason)) };
    // A look-up that ends is bounded by its result; this bounds those that never end.
    let unknown_age = history.unknown_age.unwrap_or_default();
    let overdue = history.lookups > 0 && history.age > policy.max_age && unknown_age > lookup.give_up_after;
    overdue.then(|| review(&format!("{reason}; {} without an end", count(history.lookups.into(), "look-up"))))
}

fn workers_lost(history: &AttemptHistory) -> String {
    let lost = history.lost_holders;
    let charged = if history.unknown { "the outcome is unknown" } else { "confirmed not charged" };
    format!(
        "{charged}; {lost} workers in a row were lost while they held the job, before a request began: the job may \
         crash them, so check their logs and memory use before you send it again"
    )
}

const UNKNOWN_AND_REFUSED: &str = "the outcome is unknown and a rule refuses its account";
const TOO_OLD: &str = "older than max_age_s";

/// Reason why a job of unknown outcome is not sent again; `None`: it is sent.
fn resend_obstacle(history: &AttemptHistory, policy: &RetryPolicy) -> Option<String> {
    let no = |reason: &str| Some(format!("the outcome is unknown and {reason}"));
    let Some(retention) = policy.idempotency_retention else { return no("the provider does not deduplicate") };
    if history.age > policy.max_age {
        return no(&format!("the job is {TOO_OLD}"));
    }
    if !key_is_remembered(history, retention) {
        return no("the provider may have forgotten the idempotency key");
    }
    if history.resend == Resend::Granted {
        return None;
    }
    (history.attempts >= policy.max_attempts)
        .then(|| format!("the outcome is unknown after {}", count(history.attempts.into(), "attempt")))
}

/// Half of the retention is left for clock differences, queues and a slow request.
fn key_is_remembered(history: &AttemptHistory, retention: Duration) -> bool {
    history.first_sent_age.unwrap_or_default() < retention / 2
}

fn after_unknown(
    cause: UnknownCause,
    named_wait: Option<Duration>,
    history: &AttemptHistory,
    policy: &RetryPolicy,
    fraction: f64,
) -> Disposition {
    let reason = cause.describe();
    if policy.idempotency_retention.is_none() {
        let next = look_up_or_review(&reason, named_wait, policy, fraction);
        let pause = named_wait.map(|wait| named_pause(wait, reason));
        return Disposition { transition: next, counts_attempt: !history.probe, pause };
    }
    let reason = Wait::with_detail(WaitReason::OutcomeUnknown, reason);
    after_failure(history, policy, fraction, true, reason, named_wait)
}

fn after_failure(
    history: &AttemptHistory,
    policy: &RetryPolicy,
    fraction: f64,
    unknown: bool,
    reason: Wait,
    named_wait: Option<Duration>,
) -> Disposition {
    let failed = history.attempts.saturating_add(1);
    let pause = named_wait.map(|wait| named_pause(wait, reason.to_string()));
    let counts_attempt = !history.probe;
    let transition = if counts_attempt && failed >= policy.max_attempts {
        let reason = format!("{reason}; {} made", count(failed.into(), "attempt"));
        if unknown { look_up_or_review(&reason, named_wait, policy, fraction) } else { give_up(false, &reason) }
    } else {
        let after = policy.backoff.delay(failed, fraction).max(named_wait.unwrap_or_default());
        retry_or_give_up(after, unknown, reason, history, policy)
    };
    Disposition { transition, counts_attempt, pause }
}

/// The pause of a lane whose provider named a wait together with this failure.
fn named_pause(wait: Duration, failure: String) -> PauseRequest {
    PauseRequest::Lane { wait, cause: Wait::with_detail(WaitReason::ProviderPaused, failure) }
}

fn retry_or_give_up(
    after: Duration,
    unknown: bool,
    reason: Wait,
    history: &AttemptHistory,
    policy: &RetryPolicy,
) -> Transition {
    // A look-up may come later: it charges nothing.
    if history.age.saturating_add(after) > policy.max_age && !(unknown && policy.lookup.is_some()) {
        return give_up(unknown, &format!("{reason}; the next attempt would come after max_age_s"));
    }
    Transition::Retry { after, unknown, reason }
}

/// A job of unknown outcome that is not sent again: a look-up follows soon, else an operator decides.
fn look_up_or_review(reason: &str, named_wait: Option<Duration>, policy: &RetryPolicy, fraction: f64) -> Transition {
    if policy.lookup.is_none() {
        return review(reason);
    }
    let after = policy.backoff.delay(1, fraction).max(named_wait.unwrap_or_default());
    Transition::Retry { after, unknown: true, reason: Wait::with_detail(WaitReason::Lookup, reason) }
}

fn give_up(unknown: bool, reason: &str) -> Transition {
    end(if unknown { FinalState::Review } else { FinalState::Dead }, reason)
}

fn review(reason: &str) -> Transition {
    end(FinalState::Review, reason)
}

fn end(state: FinalState, reason: &str) -> Transition {
    Transition::Finalize { state, reason: reason.to_owned(), reference: None }
}

fn finalize(state: FinalState, reason: &str, reference: Option<String>) -> Disposition {
    let next = Transition::Finalize { state, reason: reason.to_owned(), reference };
    Disposition { transition: next, counts_attempt: true, pause: None }
}

#[cfg(test)]
mod tests;
