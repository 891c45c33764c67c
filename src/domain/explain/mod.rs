//! Why a job is where it is: the gates that it has passed, the one that it stands at, and when its turn comes.
//!
//! Refuses to guess: each word comes from a fact ([`facts`]), each turn from the limiter's own state machine ([`turn`]), and
//! what could not be asked is said to be unknown. A person's next step is named as the command to type.

use std::time::Duration;

use self::facts::{Facts, JobFacts, LaneQueue, Lanes, Request};
use super::time::EpochMs;

mod ended;
pub mod facts;
mod limit;
mod open;
pub mod parked;
#[cfg(test)]
mod tests;
pub mod turn;
pub mod words;

/// The gates in the order in which they are looked at; the first that does not let the job pass is the one it stands at.
pub const GATES: [&str; 10] =
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
    pub gates: Vec<Gate>,
    /// `None`: there is none that it waits for.
    pub stands_at: Option<StandsAt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gate {
    pub name: &'static str,
    pub passed: bool,
    pub at: Option<EpochMs>,
    pub words: String,
}

/// The gate that a job stands at, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StandsAt {
    pub gate: &'static str,
    pub limit: Option<String>,
    /// As limits are written: `600/1m`.
    pub allows: Option<String>,
    pub used: Option<u64>,
    /// From now until its turn, where that can be reckoned.
    pub turn_in: Option<Duration>,
    /// From now until what holds it may be over; its turn is not before.
    pub held_for: Option<Duration>,
    /// Jobs that are served before it.
    pub before_it: Option<u64>,
    /// Whether `before_it` is counted in the line that it stands in; else it is reckoned from the ledger and the queue.
    pub exact: bool,
}

/// What one gate says of a job.
enum Verdict {
    Passed(Option<EpochMs>, String),
    Stands(Box<StandsAt>, String),
}

impl Verdict {
    fn passed(words: impl Into<String>) -> Self {
        Self::Passed(None, words.into())
    }

    fn stands(gate: &'static str, words: impl Into<String>) -> Self {
        Self::Stands(Box::new(StandsAt { gate, ..StandsAt::default() }), words.into())
    }
}

/// Explains one job from what is known.
#[must_use]
pub fn explain(facts: &Facts) -> Explanation {
    match (&facts.job, &facts.unrecorded) {
        (None, None) => unrecorded(facts),
        (None, Some(job)) => open::waits(facts, job),
        (Some(job), _) => match job.state.as_str() {
            "waiting" | "unknown" => open::waits(facts, job),
            "sending" => open::on_the_wire(facts, job),
            _ => ended::ended(facts, job),
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
            words::when(rejected.at, facts.now),
        ),
        None => format!("the ledger has no job {id}{}", may_be(facts)),
    };
    Explanation { state: "unrecorded".to_owned(), provider: None, summary, gates: Vec::new(), stands_at: None }
}

/// Where else its message may be.
fn may_be(facts: &Facts) -> String {
    const LOST: &str = "its message can never be a job and its id could not be read (payments.invalid), or it was never \
                        published";
    let lanes = match &facts.lanes {
        Lanes::NotAsked => {
            return format!(
                ": it is still in its lane's queue, where no worker has taken it yet (`sluicegate status` tells how many \
                 there are), or {LOST}"
            );
        }
        Lanes::Searched => return format!(", and no lane's queue has its message: {LOST}"),
        Lanes::Hold(lanes) if lanes.is_empty() => return format!(", and no lane's queue holds a message: {LOST}"),
        Lanes::Hold(lanes) => lanes,
    };
    let lane = |lane: &LaneQueue| {
        let clears = words::clears(&lane.clears, facts.now);
        format!("lane {} ({} there, {clears})", lane.provider, lane.ready)
    };
    let lanes: Vec<String> = lanes.iter().map(lane).collect();
    format!(": it is still in its lane's queue, if that is {}, or {LOST}", lanes.join(", or "))
}

/// The gates up to the first that does not let pass; those behind it have not been reached.
fn line_up(verdicts: Vec<(&'static str, Verdict)>) -> (Vec<Gate>, Option<(StandsAt, String)>) {
    let mut stands_at = None;
    let mut gates = Vec::with_capacity(GATES.len());
    for (name, verdict) in verdicts {
        let gate = match verdict {
            _ if stands_at.is_some() => Gate { name, passed: false, at: None, words: "not reached".to_owned() },
            Verdict::Passed(at, words) => Gate { name, passed: true, at, words },
            Verdict::Stands(at, words) => {
                stands_at = Some((*at, words.clone()));
                Gate { name, passed: false, at: None, words }
            }
        };
        gates.push(gate);
    }
    (gates, stands_at)
}

/// `time`, for a job whose request has left: how long it was put down before, and for what.
fn put_down_before(facts: &Facts, job: &JobFacts, request: &Request) -> Option<Verdict> {
    let waited = job.waited.as_ref().filter(|waited| waited.request == request.number)?;
    let span_ms = u64::try_from(request.began_at.0.saturating_sub(waited.since.0)).unwrap_or(0);
    let span = words::span(Duration::from_millis(span_ms));
    let (from, to) = (words::clock(waited.since, facts.now), words::clock(request.began_at, facts.now));
    let words = format!("{} from {from} to {to} ({span})", words::in_the_past(&waited.reason));
    Some(Verdict::Passed(Some(waited.since), words))
}

/// `recorded`, for a job that is.
fn recorded(facts: &Facts, job: &JobFacts) -> Verdict {
    if facts.job.is_none() {
        return Verdict::passed("not yet: its message is published, and the ledger records it when it is taken");
    }
    let words = format!("the ledger has it since {}", words::when(job.created_at, facts.now));
    Verdict::Passed(Some(job.created_at), words)
}
