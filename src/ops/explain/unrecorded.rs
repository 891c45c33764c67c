//! A payment that the ledger does not know yet: its message in a lane's queue, or in this process's hands.
//!
//! Refuses to guess a lane: where the broker lets nobody look, it is told what each lane holds.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::facts::{FactSources, QUERY_TIMEOUT, position_in_lane};
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::explain::facts::{ClaimState, JobFacts, LaneQueue, MessageSearch};
use crate::domain::job::{Job, JobId};
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::time::EpochMs;
use crate::fleet::clears::clear_time;
use crate::queue::message::decode_recorded;
use crate::queue::{FoundMessage, SearchResult};

/// How a worker is called that has a payment in hand and has not written its name to the ledger.
const ASKED_WORKER: &str = "that was asked";
/// Most lanes whose queues are told of.
const LANES_MAX: usize = 20;

/// What was found of it.
#[derive(Default)]
pub(super) struct UnrecordedJob {
    pub lane: Option<ProviderName>,
    pub job: Option<JobFacts>,
    pub claim: Option<ClaimState>,
    /// Messages before it in its lane's queue.
    pub messages_ahead: Option<u64>,
    pub ready_in: Duration,
    pub message_search: MessageSearch,
}

/// Looks in the process's hands, then in the lanes' queues.
pub(super) async fn find_unrecorded(sources: &FactSources<'_>, id: &JobId) -> UnrecordedJob {
    let here = find_active(sources, id).await;
    let search = match sources.queue {
        Some(queue) => timeout(QUERY_TIMEOUT, queue.find(id)).await.ok().and_then(Result::ok),
        None => None,
    };
    let found = match search {
        Some(SearchResult::Found(found)) => Some(found),
        _ if here.is_some() => None,
        Some(SearchResult::NotFound) => {
            return UnrecordedJob { message_search: MessageSearch::Searched, ..UnrecordedJob::default() };
        }
        Some(SearchResult::Unsupported) => {
            let lanes = timeout(QUERY_TIMEOUT, lanes(sources)).await.ok().flatten();
            return UnrecordedJob {
                message_search: lanes.map_or(MessageSearch::NotAsked, MessageSearch::MayHold),
                ..UnrecordedJob::default()
            };
        }
        None => return UnrecordedJob::default(),
    };
    let Some(lane) = here.as_ref().map(|(lane, _)| lane).or(found.as_ref().map(|found| &found.lane)).cloned() else {
        return UnrecordedJob::default();
    };
    let hand = here.map(|(_, hand)| hand).or_else(|| found.as_ref().map(queued_claim));
    UnrecordedJob {
        job: Some(facts_from_message(found.as_ref(), &lane)),
        claim: hand,
        messages_ahead: found.as_ref().map(|found| found.messages_ahead),
        ready_in: found.map(|found| found.ready_in).unwrap_or_default(),
        lane: Some(lane),
        message_search: MessageSearch::NotAsked,
    }
}

fn queued_claim(found: &FoundMessage) -> ClaimState {
    if found.is_delivered {
        ClaimState::AskedWorker { worker: ASKED_WORKER.to_owned(), position: None }
    } else {
        ClaimState::Unclaimed
    }
}

async fn find_active(sources: &FactSources<'_>, id: &JobId) -> Option<(ProviderName, ClaimState)> {
    let process = sources.process?;
    for lane in process.lanes.keys() {
        if let Some(hand) = position_in_lane(process, lane, ASKED_WORKER, id).await {
            return Some((lane.clone(), hand));
        }
    }
    None
}

/// What its message says; of one that says nothing readable, its lane alone.
fn facts_from_message(found: Option<&FoundMessage>, lane: &ProviderName) -> JobFacts {
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
pub(super) fn with_current_times(job: JobFacts, ready_in: Duration, now: EpochMs) -> JobFacts {
    let ready_at = now.0.saturating_add(i64::try_from(ready_in.as_millis()).unwrap_or(i64::MAX));
    let wake_at = EpochMs(ready_at).max(job.not_before.unwrap_or_default());
    JobFacts { created_at: now, updated_at: now, wake_at, ..job }
}

/// The lanes that hold messages; `None`: the broker does not tell of all.
async fn lanes(sources: &FactSources<'_>) -> Option<Vec<LaneQueue>> {
    let mut held = Vec::new();
    for row in sources.settings.providers.values().take(LANES_MAX) {
        let ready = sources.queue?.depth(&row.name).await.ok()?.unwrap_or(0);
        held.extend((ready > 0).then_some((row, ready)));
    }
    let evidence = match sources.collector {
        Some(lookout) => Some(lookout.input().await),
        None => None,
    };
    let clears = |row: &Provider| match &evidence {
        Some(evidence) => clear_time(evidence, row),
        None => ClearTime::Unknown(MissingInput::Worker),
    };
    let lane =
        |(row, ready): (&Arc<Provider>, u64)| LaneQueue { provider: row.name.to_string(), ready, clears: clears(row) };
    Some(held.into_iter().map(lane).collect())
}
