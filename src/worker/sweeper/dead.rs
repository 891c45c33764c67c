//! What the broker gave up on is judged again, by the ledger.
//!
//! Refuses to lose it and refuses to go round for ever: a message is published again a few times, each with a fresh
//! count of deliveries; after that its job goes to a person, or the message to `payments.invalid`.

use super::Trouble;
use crate::domain::job::{Invalid, InvalidReason, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::Written;
use crate::ledger::upkeep::Standing;
use crate::queue::message::DecodeError;
use crate::queue::{DeadLetter, DeathCause, Destination, Outgoing, Receipt, headers};
use crate::worker::Worker;
use crate::worker::intake::rejection;
use crate::worker::late::publish_in_time;
use crate::worker::newer_version::{self, Newer};
use crate::worker::park::Copy;
use crate::worker::reading::read;
use crate::worker::settings_watch::Known;

/// How often a message is published again. Each round is a thousand deliveries, so that one which comes back after
/// three of them is not the victim of an outage.
pub const ROUNDS_MAX: u32 = 3;
/// Dead letters that one sweep judges at most.
const BATCH: usize = 100;
/// Those among them that cannot be judged yet: each keeps a channel open until the sweep ends.
const NOT_YET_MAX: usize = 16;
const NO_JOB: &str = "dead message is no job";
const GIVEN_UP: &str = "the broker gave up on its message again and again; workers may die of it";

/// What becomes of one dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// Nothing is left to do.
    Done,
    /// To its lane again, for this round.
    Again(u32),
    /// The ledger has its job, and nobody takes its lane: its provider has no row.
    NoProvider,
    /// Its job goes to a person.
    Review,
    /// It can never be a job.
    Invalid(Invalid),
}

/// How a message came to be a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Death {
    cause: DeathCause,
    /// How often it was published again before.
    rounds: u32,
    /// Its provider has a row.
    has_row: bool,
}

/// Judges a message that can be read, by what the ledger knows and how it came here.
fn verdict(standing: Standing, Death { cause, rounds, has_row }: Death) -> Verdict {
    match standing {
        Standing::Open if cause == DeathCause::NoQueue && !has_row => Verdict::NoProvider,
        Standing::Open | Standing::NotRecorded if cause == DeathCause::NoQueue => Verdict::Again(rounds),
        Standing::Settled | Standing::Superseded => Verdict::Done,
        Standing::Conflict => {
            Verdict::Invalid(Invalid::new(InvalidReason::Conflict, "id: recorded before with other content"))
        }
        Standing::Open | Standing::NotRecorded if rounds < ROUNDS_MAX => Verdict::Again(rounds + 1),
        Standing::Open => Verdict::Review,
        Standing::NotRecorded => Verdict::Invalid(Invalid::new(InvalidReason::Undeliverable, GIVEN_UP)),
    }
}

/// A header that cannot be read was not written by us; it counts as none.
fn rounds(letter: &DeadLetter) -> u32 {
    letter.properties.headers.get(headers::DEAD_ROUNDS).and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Judges what is there. What cannot be judged yet is kept until the end, because a letter that is handed back is the
/// next one again; then it goes back for another sweep.
pub async fn judge_all(worker: &Worker, known: &Known) -> Result<(), Trouble> {
    let mut not_yet = Vec::new();
    let judged = judge_each(worker, known, &mut not_yet).await;
    for receipt in not_yet {
        hand_back(receipt).await;
    }
    judged
}

/// One that meets with trouble keeps those behind it from nothing.
async fn judge_each(worker: &Worker, known: &Known, not_yet: &mut Vec<Box<dyn Receipt>>) -> Result<(), Trouble> {
    let mut judged = Ok(());
    for _ in 0..BATCH {
        if not_yet.len() >= NOT_YET_MAX {
            break;
        }
        let Some(letter) = worker.engines.queue.take_dead().await? else { break };
        match carry_out(worker, known, &letter).await {
            Ok(true) => letter.receipt.ack().await?,
            Ok(false) => not_yet.push(letter.receipt),
            Err(error) => {
                not_yet.push(letter.receipt);
                judged = judged.and(Err(error));
            }
        }
    }
    judged
}

async fn hand_back(receipt: Box<dyn Receipt>) {
    if let Err(error) = receipt.hand_back().await {
        tracing::debug!(%error, "dead letter not handed back; the broker will do it");
    }
}

/// Whether the letter is done with.
async fn carry_out(worker: &Worker, known: &Known, letter: &DeadLetter) -> Result<bool, Trouble> {
    let Some(lane) = &letter.lane else {
        let unknown = "the broker does not say which lane gave it up";
        return reject(worker, letter, &Invalid::new(InvalidReason::Undeliverable, unknown), None).await;
    };
    let rounds = rounds(letter);
    // What the lane's row says of it is judged by the lane, when the message comes back to it.
    let decoded = match read(worker, &letter.body, lane, None).await? {
        Ok(decoded) => decoded,
        Err(DecodeError::Invalid { invalid, claimed_id }) => return reject(worker, letter, &invalid, claimed_id).await,
        Err(DecodeError::NewerVersion(version)) => return wait_for_newer(worker, known, letter, (lane, version)).await,
    };
    let id = &decoded.job.id;
    let standing = {
        let copy = headers::copy_number(&letter.properties);
        worker.engines.upkeep.standing(&decoded.job, decoded.hash, copy).await?
    };
    let death = Death { cause: letter.cause, rounds, has_row: known.providers.contains_key(lane.as_str()) };
    match verdict(standing, death) {
        Verdict::Done => Ok(true),
        Verdict::NoProvider => {
            tracing::warn!(job = %id, provider = %lane, "its provider has no row; the job waits in the ledger for one");
            Ok(true)
        }
        Verdict::Again(round) => {
            match letter.cause {
                DeathCause::GivenUp => {
                    tracing::error!(job = %id, provider = %lane, round, "the broker gave up on a message; it is published again");
                }
                DeathCause::NoQueue => {
                    tracing::warn!(job = %id, provider = %lane, "a delayed message found no lane; it is published again");
                }
            }
            again(worker, letter, lane, round).await
        }
        Verdict::Review => {
            tracing::error!(job = %id, provider = %lane, GIVEN_UP);
            let written = worker.engines.upkeep.set_aside(id, GIVEN_UP).await?;
            worker.outbox.left();
            // Somebody has it in hand, or has just settled it: the next look will tell.
            Ok(written == Written::Kept)
        }
        Verdict::Invalid(invalid) => reject(worker, letter, &invalid, Some(id.clone())).await,
    }
}

/// As a lane does, by the same header.
async fn wait_for_newer(
    worker: &Worker,
    known: &Known,
    letter: &DeadLetter,
    (lane, version): (&ProviderName, u64),
) -> Result<bool, Trouble> {
    let max_age = known.providers.get(lane.as_str()).map(|row| row.max_age);
    let properties = match newer_version::judge(&letter.properties, version, max_age) {
        Newer::Waits(properties) => properties,
        Newer::TooOld(invalid) => return reject(worker, letter, &invalid, None).await,
    };
    let reason = InvalidReason::NewerVersion.code();
    if worker.log_throttle.admits(lane.as_str(), newer_version::WAITS, reason) {
        tracing::error!(provider = %lane, version, "{}", newer_version::WAITS);
    }
    let destination = Destination::Delay { provider: lane.clone(), step: newer_version::LOOK_AGAIN };
    publish(worker, lane, Outgoing { destination, body: letter.body.clone(), properties }).await
}

async fn again(worker: &Worker, letter: &DeadLetter, lane: &ProviderName, round: u32) -> Result<bool, Trouble> {
    let mut properties = letter.properties.clone();
    if round > 0 {
        properties.headers.insert(headers::DEAD_ROUNDS.to_owned(), round.to_string());
    }
    publish(
        worker,
        lane,
        Outgoing { destination: Destination::Lane(lane.clone()), body: letter.body.clone(), properties },
    )
    .await
}

async fn publish(worker: &Worker, lane: &ProviderName, outgoing: Outgoing) -> Result<bool, Trouble> {
    if worker.late.holds(lane) {
        return Ok(false);
    }
    publish_in_time(worker, lane, outgoing).await?;
    Ok(true)
}

async fn reject(worker: &Worker, letter: &DeadLetter, invalid: &Invalid, id: Option<JobId>) -> Result<bool, Trouble> {
    let (reason, lane) = (invalid.reason.code(), letter.lane.as_ref().map_or("", ProviderName::as_str));
    if worker.log_throttle.admits(lane, NO_JOB, reason) {
        tracing::error!(provider = lane, reason, detail = invalid.detail, "{NO_JOB}");
    }
    let Some(provider) = letter.lane.clone().or_else(|| ProviderName::new("dead").ok()) else { return Ok(false) };
    let copy = Copy { provider, body: letter.body.clone(), properties: letter.properties.clone() };
    let (outgoing, row) = rejection(&copy, invalid, id);
    publish_in_time(worker, &copy.provider, outgoing).await?;
    worker.engines.ledger.reject(&row).await?;
    if let Some(lane) = letter.lane.as_ref().and_then(|lane| worker.meter.find(lane)) {
        lane.rejected(reason);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_standing_leads_where_the_table_says() {
        let invalid = |verdict: &Verdict| match verdict {
            Verdict::Invalid(invalid) => Some(invalid.reason.code()),
            _ => None,
        };
        for rounds in 0..=ROUNDS_MAX + 1 {
            let last = rounds >= ROUNDS_MAX;
            let death = Death { cause: DeathCause::GivenUp, rounds, has_row: true };
            for has_row in [true, false] {
                let death = Death { has_row, ..death };
                assert_eq!(verdict(Standing::Settled, death), Verdict::Done);
                assert_eq!(verdict(Standing::Superseded, death), Verdict::Done);
                assert_eq!(invalid(&verdict(Standing::Conflict, death)), Some("conflict"));
                let open = if last { Verdict::Review } else { Verdict::Again(rounds + 1) };
                assert_eq!(verdict(Standing::Open, death), open);
            }
            match verdict(Standing::NotRecorded, death) {
                Verdict::Again(round) => assert!(!last && round == rounds + 1),
                other => assert_eq!((last, invalid(&other)), (true, Some("undeliverable"))),
            }
            // A lane without a queue is no fault of the message: it is no round.
            let unrouted = Death { cause: DeathCause::NoQueue, ..death };
            assert_eq!(verdict(Standing::Open, unrouted), Verdict::Again(rounds));
            assert_eq!(verdict(Standing::NotRecorded, unrouted), Verdict::Again(rounds));
            assert_eq!(verdict(Standing::Open, Death { has_row: false, ..unrouted }), Verdict::NoProvider);
            assert_eq!(verdict(Standing::Settled, Death { has_row: false, ..unrouted }), Verdict::Done);
        }
    }
}
