//! Explanation of one job: the checks that it has passed, the one that blocks it, and its estimated start.
//!
//! Each sentence is based on a fact ([`facts`]), and each estimated start on the limiter's own state machine
//! ([`forecast`]). A backend that could not be asked is named as unknown. The operator's next step is named as the
//! command to type.

use std::time::Duration;

use self::facts::{Facts, JobFacts, LaneQueue, MessageSearch, SentRequest};
use super::time::EpochMs;
use super::wait_reason::past_sentence;

mod backlog;
pub mod facts;
mod finished;
pub mod forecast;
pub mod format;
mod limit;
pub mod next_start;
mod pending;
#[cfg(test)]
mod tests;

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
enum CheckResult {
    Passed(Option<EpochMs>, String),
    /// Passed as most jobs do.
    Routine(String),
    Blocked(Box<BlockedAt>, String),
}

impl CheckResult {
    fn passed(text: impl Into<String>) -> Self {
        Self::Passed(None, text.into())
    }

    fn routine(text: impl Into<String>) -> Self {
        Self::Routine(text.into())
    }

    fn blocked(check: &'static str, text: impl Into<String>) -> Self {
        Self::Blocked(Box::new(BlockedAt { check, ..BlockedAt::default() }), text.into())
    }
}

/// Explains one job from its facts.
pub fn explain(facts: &Facts) -> Explanation {
    match (&facts.job, &facts.unrecorded) {
        (None, None) => unrecorded(facts),
        (None, Some(job)) => pending::explain_waiting(facts, job),
        (Some(job), _) => match job.state.as_str() {
            "waiting" | "unknown" => pending::explain_waiting(facts, job),
            "sending" => pending::explain_in_flight(facts, job),
            _ => finished::explain_finished(facts, job),
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
            format::instant(rejected.at, facts.now),
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
        let clears = format::clear_time_text(&lane.clears, facts.now);
        format!("{} ({}{clears})", lane.provider, format::count(lane.ready, "message"))
    };
    let lanes: Vec<String> = lanes.iter().map(lane).collect();
    format!("; if it was published, its message waits in the queue of {}; otherwise {LOST}", lanes.join(", or of "))
}

/// The checks up to the first that blocks. Later checks are marked as not reached.
fn until_blocked(results: Vec<(&'static str, CheckResult)>) -> (Vec<JobCheck>, Option<(BlockedAt, String)>) {
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
fn delayed_before(facts: &Facts, job: &JobFacts, request: &SentRequest) -> Option<CheckResult> {
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
fn recorded(facts: &Facts, job: &JobFacts) -> CheckResult {
    if facts.job.is_none() {
        return CheckResult::passed(
            "not yet: its message is published, and the ledger records it when a worker takes it",
        );
    }
    let text = format!("in the ledger since {}", format::instant(job.created_at, facts.now));
    CheckResult::Passed(Some(job.created_at), text)
}
