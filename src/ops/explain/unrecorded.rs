//! A payment that the ledger does not know yet: its message in a lane's queue, or in this process's hands.
//!
//! Refuses to guess a lane: where the broker lets nobody look, it is told what each lane holds.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::facts::{LOOK_MAX, Sources, place_in};
use crate::domain::clear_time::{ClearTime, Missing};
use crate::domain::explain::facts::{Hand, JobFacts, LaneQueue, Lanes};
use crate::domain::job::{Job, JobId};
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::time::EpochMs;
use crate::fleet::clears::clear_time;
use crate::queue::message::decode_recorded;
use crate::queue::{Found, Search};

/// How a worker is called that has a payment in hand and has not written its name to the ledger.
const ASKED: &str = "that was asked";
/// Most lanes whose queues are told of.
const LANES_MAX: usize = 20;

/// What was found of it.
#[derive(Default)]
pub(super) struct Sought {
    pub lane: Option<ProviderName>,
    pub job: Option<JobFacts>,
    pub hand: Option<Hand>,
    /// Messages before it in its lane's queue.
    pub before: Option<u64>,
    pub ready_in: Duration,
    pub lanes: Lanes,
}

/// Looks in the process's hands, then in the lanes' queues.
pub(super) async fn sought(sources: &Sources<'_>, id: &JobId) -> Sought {
    let here = in_hand(sources, id).await;
    let search = match sources.queue {
        Some(queue) => timeout(LOOK_MAX, queue.find(id)).await.ok().and_then(Result::ok),
        None => None,
    };
    let found = match search {
        Some(Search::Found(found)) => Some(found),
        _ if here.is_some() => None,
        Some(Search::Nowhere) => return Sought { lanes: Lanes::Searched, ..Sought::default() },
        Some(Search::CannotLook) => {
            let lanes = timeout(LOOK_MAX, lanes(sources)).await.ok().flatten();
            return Sought { lanes: lanes.map_or(Lanes::NotAsked, Lanes::Hold), ..Sought::default() };
        }
        None => return Sought::default(),
    };
    let Some(lane) = here.as_ref().map(|(lane, _)| lane).or(found.as_ref().map(|found| &found.lane)).cloned() else {
        return Sought::default();
    };
    let hand = here.map(|(_, hand)| hand).or_else(|| found.as_ref().map(in_queue));
    Sought {
        job: Some(of_message(found.as_ref(), &lane)),
        hand,
        before: found.as_ref().map(|found| found.before),
        ready_in: found.map(|found| found.ready_in).unwrap_or_default(),
        lane: Some(lane),
        lanes: Lanes::NotAsked,
    }
}

fn in_queue(found: &Found) -> Hand {
    if found.taken { Hand::Here { worker: ASKED.to_owned(), place: None } } else { Hand::Nobody }
}

async fn in_hand(sources: &Sources<'_>, id: &JobId) -> Option<(ProviderName, Hand)> {
    let process = sources.process?;
    for lane in process.lanes.keys() {
        if let Some(hand) = place_in(process, lane, ASKED, id).await {
            return Some((lane.clone(), hand));
        }
    }
    None
}

/// What its message says; of one that says nothing readable, its lane alone.
fn of_message(found: Option<&Found>, lane: &ProviderName) -> JobFacts {
    let plain =
        JobFacts { provider: lane.as_str().to_owned(), state: "waiting".to_owned(), cost: 1, ..JobFacts::default() };
    let Some(Ok(decoded)) = found.map(|found| decode_recorded(&found.body, lane)) else { return plain };
    let Job { account, cost, not_before, expires_at, .. } = decoded.job;
    JobFacts {
        account: account.map(|account| account.as_str().to_owned()),
        cost: u32::from(cost),
        not_before,
        expires_at,
        ..plain
    }
}

/// The same at this instant of the ledger's clock.
pub(super) fn since(job: JobFacts, ready_in: Duration, now: EpochMs) -> JobFacts {
    let ready_at = now.0.saturating_add(i64::try_from(ready_in.as_millis()).unwrap_or(i64::MAX));
    let wake_at = EpochMs(ready_at).max(job.not_before.unwrap_or_default());
    JobFacts { created_at: now, updated_at: now, wake_at, ..job }
}

/// The lanes that hold messages; `None`: the broker does not tell of all.
async fn lanes(sources: &Sources<'_>) -> Option<Vec<LaneQueue>> {
    let mut held = Vec::new();
    for row in sources.known.providers.values().take(LANES_MAX) {
        let ready = sources.queue?.depth(&row.name).await.ok()?.unwrap_or(0);
        held.extend((ready > 0).then_some((row, ready)));
    }
    let evidence = match sources.lookout {
        Some(lookout) => Some(lookout.evidence().await),
        None => None,
    };
    let clears = |row: &Provider| match &evidence {
        Some(evidence) => clear_time(evidence, row),
        None => ClearTime::Unknown(Missing::Worker),
    };
    let lane =
        |(row, ready): (&Arc<Provider>, u64)| LaneQueue { provider: row.name.to_string(), ready, clears: clears(row) };
    Some(held.into_iter().map(lane).collect())
}
