//! The search for a payment that is not in the ledger yet: in a lane's queue, or active in this process.
//!
//! If the broker does not allow a search, the result lists the queues that may hold the payment.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::facts::{FactSources, QUERY_TIMEOUT, position_in_lane};
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::explain::facts::{ClaimState, JobFacts, LaneQueue, MessageSearch};
use crate::domain::job::{Job, JobId};
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::time::EpochMs;
use crate::fleet::pace::clear_time;
use crate::queue::message::decode_recorded;
use crate::queue::{FoundMessage, SearchResult};

/// Name of the worker that holds a payment and has not written its own name to the ledger.
const ASKED_WORKER: &str = "that was asked";
/// Most lanes whose queues are listed.
const LANES_MAX: usize = 20;

/// The result of the search.
#[derive(Default)]
pub struct UnrecordedJob {
    pub lane: Option<ProviderName>,
    pub job: Option<JobFacts>,
    pub claim: Option<ClaimState>,
    /// Messages ahead of it in its lane's queue.
    pub messages_ahead: Option<u64>,
    pub ready_in: Duration,
    pub message_search: MessageSearch,
}

/// Searches the active jobs of the process, then the lanes' queues.
pub async fn find_unrecorded(sources: &FactSources<'_>, id: &JobId) -> UnrecordedJob {
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
    let claim = here.map(|(_, claim)| claim).or_else(|| found.as_ref().map(queued_claim));
    UnrecordedJob {
        job: Some(facts_from_message(found.as_ref(), &lane)),
        claim,
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

/// The facts in its message; only the lane if the message is unreadable.
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

/// Sets the times of the job by the ledger's clock.
pub fn with_current_times(job: JobFacts, ready_in: Duration, now: EpochMs) -> JobFacts {
    let ready_at = now.0.saturating_add(i64::try_from(ready_in.as_millis()).unwrap_or(i64::MAX));
    let wake_at = EpochMs(ready_at).max(job.not_before.unwrap_or_default());
    JobFacts { created_at: now, updated_at: now, wake_at, ..job }
}

/// The lanes whose queues have messages; `None` if the broker does not report all of them.
async fn lanes(sources: &FactSources<'_>) -> Option<Vec<LaneQueue>> {
    let mut held = Vec::new();
    for row in sources.settings.providers.values().take(LANES_MAX) {
        let ready = sources.queue?.depth(&row.name).await.ok()?.unwrap_or(0);
        held.extend((ready > 0).then_some((row, ready)));
    }
    let input = match sources.collector {
        Some(collector) => Some(collector.input().await),
        None => None,
    };
    let clears = |row: &Provider| match &input {
        // The counts may be older than the message.
        _ if !row.enabled => ClearTime::NotWhileDisabled,
        _ if row.paused => ClearTime::NotWhilePaused,
        Some(input) => match clear_time(input, row) {
            ClearTime::In(Duration::ZERO) => ClearTime::Unknown(MissingInput::Queue),
            clears => clears,
        },
        None => ClearTime::Unknown(MissingInput::Worker),
    };
    let lane =
        |(row, ready): (&Arc<Provider>, u64)| LaneQueue { provider: row.name.to_string(), ready, clears: clears(row) };
    Some(held.into_iter().map(lane).collect())
}
