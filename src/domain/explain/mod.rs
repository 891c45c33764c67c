//! Why a job is where it is: the gates that it has passed, the one that it stands at, and when its turn comes.
//!
//! Refuses to guess: each word comes from a fact ([`facts`]), each turn from the limiter's own state machine ([`turn`]), and
//! what could not be asked is said to be unknown. A person's next step is named as the command to type.

use std::time::Duration;

use self::facts::{Facts, JobFacts, LaneQueue, MessageSearch, SentRequest};
use super::time::EpochMs;

pub mod facts;
mod finished;
pub mod forecast;
pub mod format;
mod limit;
mod pending;
pub mod reason;
#[cfg(test)]
mod tests;

/// The gates in the order in which they are looked at; the first that does not let the job pass is the one it stands at.
pub const CHECKS: [&str; 10] =
    ["recorded", "provider", "time", "lane", "limiter", "account", "limit", "turn", "sent", "outcome"];

/// What is told of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The ledger's word; `queued` where its message was found and the ledger does not know it yet; else `unrecorded`.
    pub state: String,
    pub provider: Option<String>,
    /// One sentence.
    pub summary: String,
    /// In the order of [`GATES`]; none for a job that the ledger does not know.
    pub checks: Vec<JobCheck>,
    /// `None`: there is none that it waits for.
    pub blocked_at: Option<BlockedAt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobCheck {
    pub name: &'static str,
    pub passed: bool,
    pub at: Option<EpochMs>,
    pub text: String,
}

/// The gate that a job stands at, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockedAt {
    pub check: &'static str,
    pub limit: Option<String>,
    /// As limits are written: `600/1m`.
    pub allows: Option<String>,
    pub used: Option<u64>,
    /// From now until its turn, where that can be reckoned.
    pub starts_in: Option<Duration>,
    /// From now until what holds it may be over; its turn is not before.
    pub held_for: Option<Duration>,
    /// Jobs that are served before it.
    pub jobs_ahead: Option<u64>,
    /// Whether `before_it` is counted in the line that it stands in; else it is reckoned from the ledger and the queue.
    pub exact: bool,
}

/// What one gate says of a job.
enum CheckResult {
    Passed(Option<EpochMs>, String),
    Blocked(Box<BlockedAt>, String),
}

impl CheckResult {
    fn passed(words: impl Into<String>) -> Self {
        Self::Passed(None, words.into())
    }

    fn blocked(gate: &'static str, words: impl Into<String>) -> Self {
        Self::Blocked(Box::new(BlockedAt { check: gate, ..BlockedAt::default() }), words.into())
    }
}

/// Explains one job from what is known.
#[must_use]
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

/// Where a job may be that the ledger does not know.
fn unrecorded(facts: &Facts) -> Explanation {
    let id = &facts.id;
    let summary = match facts.rejected.first() {
        Some(rejected) => format!(
            "a message with the id {id} on lane {} can never be a job ({}: {}), since {}; it is in the queue of invalid \
             messages (payments.invalid), and a corrected message under this id is taken",
            rejected.lane,
            rejected.reason,
            rejected.detail,
            format::instant(rejected.at, facts.now),
        ),
        None => format!("the ledger has no job {id}{}", where_message_may_be(facts)),
    };
    Explanation { state: "unrecorded".to_owned(), provider: None, summary, checks: Vec::new(), blocked_at: None }
}

/// Where else its message may be.
fn where_message_may_be(facts: &Facts) -> String {
    const LOST: &str = "its message can never be a job and its id could not be read (payments.invalid), or it was never \
                        published";
    let lanes = match &facts.message_search {
        MessageSearch::NotAsked => {
            return format!(
                ": it is still in its lane's queue, where no worker has taken it yet (`sluicegate status` tells how many \
                 there are), or {LOST}"
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
        format!("lane {} ({} there, {clears})", lane.provider, lane.ready)
    };
    let lanes: Vec<String> = lanes.iter().map(lane).collect();
    format!(": it is still in its lane's queue, if that is {}, or {LOST}", lanes.join(", or "))
}

/// The gates up to the first that does not let pass; those behind it have not been reached.
fn until_blocked(verdicts: Vec<(&'static str, CheckResult)>) -> (Vec<JobCheck>, Option<(BlockedAt, String)>) {
    let mut stands_at = None;
    let mut gates = Vec::with_capacity(CHECKS.len());
    for (name, verdict) in verdicts {
        let gate = match verdict {
            _ if stands_at.is_some() => JobCheck { name, passed: false, at: None, text: "not reached".to_owned() },
            CheckResult::Passed(at, words) => JobCheck { name, passed: true, at, text: words },
            CheckResult::Blocked(at, words) => {
                stands_at = Some((*at, words.clone()));
                JobCheck { name, passed: false, at: None, text: words }
            }
        };
        gates.push(gate);
    }
    (gates, stands_at)
}

/// `time`, for a job whose request has left: how long it was put down before, and for what.
fn delayed_before(facts: &Facts, job: &JobFacts, request: &SentRequest) -> Option<CheckResult> {
    let waited = job.last_delay.as_ref().filter(|waited| waited.request == request.number)?;
    let span_ms = u64::try_from(request.began_at.0.saturating_sub(waited.since.0)).unwrap_or(0);
    let span = format::duration(Duration::from_millis(span_ms));
    let (from, to) = (format::clock(waited.since, facts.now), format::clock(request.began_at, facts.now));
    let words = format!("{} from {from} to {to} ({span})", format::past_reason(&waited.reason));
    Some(CheckResult::Passed(Some(waited.since), words))
}

/// `recorded`, for a job that is.
fn recorded(facts: &Facts, job: &JobFacts) -> CheckResult {
    if facts.job.is_none() {
        return CheckResult::passed("not yet: its message is published, and the ledger records it when it is taken");
    }
    let words = format!("the ledger has it since {}", format::instant(job.created_at, facts.now));
    CheckResult::Passed(Some(job.created_at), words)
}
