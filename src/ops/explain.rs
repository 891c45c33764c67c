//! The handler of `GET /api/v1/jobs/{id}/explain`: why a job is in its state, from live data.
//!
//! The command line uses the same code without a running process. `facts` gathers the data, and `domain::explain` draws
//! the conclusions. A payment that is not in the ledger yet is searched among the active jobs of this process. A broker
//! does not allow a search, so the result lists the queues that may hold the payment.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use utoipa::ToSchema;

use self::facts::{QUERY_TIMEOUT, position_in_lane};
use super::OpsState;
use super::flows::FlowBlockOverview;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::explain::{
    BacklogPlace, ClaimState, Explanation, Facts, JobFacts, LaneQueue, MessageSearch, explain,
};
use crate::domain::job::JobId;
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::time::{EpochMs, millis_down, millis_up};
use crate::domain::wait_reason::WaitReason;
use crate::fleet::estimate::clear_time;
use crate::ledger::LedgerError;
use crate::ledger::operator::DatabaseTime;
use crate::queue::Queue;

mod cutoff;
mod facts;

pub use self::cutoff::ExplainedCutoff;
pub use facts::{FactSources, gather_facts};

/// An explanation as `/api/v1/jobs/{id}/explain` and `jobs explain --json` show it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainResponse {
    pub id: String,
    pub state: String,
    pub provider: Option<String>,
    /// Code of the reason for which the payment waits, and the limit that it names.
    pub wait_reason: Option<String>,
    pub wait_limit: Option<String>,
    pub summary: String,
    /// `process`: by a running worker, with its lanes and gates; `ledger`: without one.
    pub explained_from: String,
    pub checks: Vec<ExplainedCheck>,
    pub blocked_at: Option<ExplainedBlock>,
    /// Its place in the backlog of its lane; `null`: it is not there.
    #[serde(default)]
    pub backlog: Option<ExplainedPlace>,
    /// The next cut-off of its provider, if the payment waits and its start is known to be before or after it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cutoff: Option<ExplainedCutoff>,
}

/// The place of a payment among those of its account and priority in the backlog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedPlace {
    /// `null`: payments without an account.
    pub account: Option<String>,
    /// `null`: payments of unknown outcome.
    pub priority: Option<u8>,
    /// 1: it is sent next of them.
    pub position: u64,
    pub waiting: u64,
    pub blocked: Option<FlowBlockOverview>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedCheck {
    pub name: String,
    pub passed: bool,
    /// It passed as most payments do: `jobs explain` counts such checks unless `--all` is given.
    #[serde(default)]
    pub is_routine: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    pub text: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedBlock {
    pub check: String,
    pub limit: Option<String>,
    pub allows: Option<String>,
    pub used: Option<u64>,
    pub starts_at: Option<String>,
    pub starts_in_ms: Option<u64>,
    /// Why there is no estimated start, where that is known.
    #[serde(default)]
    pub start_unknown: Option<String>,
    pub jobs_ahead: Option<u64>,
    pub exact: bool,
}

/// The checks that a payment has passed, the one that it waits for, and the estimated start.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}/explain",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment")),
    responses(
        (status = 200, description = "Also for an id that is not in the ledger", body = ExplainResponse),
        (status = 400, description = "The id is invalid", body = ErrorBody),
    )
)]
pub async fn show(
    State(state): State<OpsState>,
    Path(id): Path<String>,
) -> Result<JsonResponse<ExplainResponse>, ApiError> {
    let id = JobId::new(id).map_err(|problem| ApiError::bad_request(format!("id {problem}")))?;
    let progress = state.worker_status.borrow().clone();
    let sources = FactSources {
        ledger: &state.reads,
        settings: &progress.settings,
        queue: state.operator_context.queue.as_deref(),
        limiter_facts: Some(state.limiter.as_ref()),
        process: Some(&progress),
        collector: Some(state.collector.as_ref()),
    };
    explain_job(&sources, &id).await.map(JsonResponse).map_err(ApiError::unavailable)
}

/// Explains one job.
pub async fn explain_job(sources: &FactSources<'_>, id: &JobId) -> Result<ExplainResponse, LedgerError> {
    let facts = gather_facts(sources, id).await?;
    let from = if sources.process.is_some() { "process" } else { "ledger" };
    let mut response = to_response(id, &facts, explain(&facts), from);
    response.cutoff = cutoff::explained_cutoff(sources, &facts, response.blocked_at.as_ref()).await;
    if let Some(cutoff) = response.cutoff.as_ref().filter(|cutoff| cutoff.is_missed) {
        response.summary = format!("{}; it misses the cut-off at {}", response.summary, cutoff.rule);
    }
    Ok(response)
}

fn to_response(id: &JobId, facts: &Facts, explanation: Explanation, from: &str) -> ExplainResponse {
    let text = |at: EpochMs| DatabaseTime(at.0).to_string();
    let wait = facts.job.as_ref().and_then(|job| job.wait_reason.as_ref());
    ExplainResponse {
        id: id.as_str().to_owned(),
        state: explanation.state,
        provider: explanation.provider,
        wait_reason: wait.map(|reason| reason.code().to_owned()),
        wait_limit: wait.and_then(WaitReason::limit).map(str::to_owned),
        summary: explanation.summary,
        explained_from: from.to_owned(),
        checks: explanation
            .checks
            .into_iter()
            .map(|check| ExplainedCheck {
                name: check.name.to_owned(),
                passed: check.passed,
                is_routine: check.is_routine,
                at: check.at.map(text),
                text: check.text,
            })
            .collect(),
        blocked_at: explanation.blocked_at.map(|at| ExplainedBlock {
            check: at.check.to_owned(),
            limit: at.limit,
            allows: at.allows,
            used: at.used,
            starts_at: at.starts_in.map(|wait| text(facts.now.plus(wait))),
            starts_in_ms: at.starts_in.map(millis_down),
            start_unknown: at.start_unknown.map(str::to_owned),
            jobs_ahead: at.jobs_ahead,
            exact: at.exact,
        }),
        backlog: facts.backlog.as_ref().map(|place| explained_place(facts, place)),
        cutoff: None,
    }
}

fn explained_place(facts: &Facts, place: &BacklogPlace) -> ExplainedPlace {
    let position = place.before_in_flow.saturating_add(1);
    let blocked = place.block.as_ref().map(|block| {
        let left_ms = millis_up(block.left);
        let until = facts.now.plus(Duration::from_millis(left_ms));
        FlowBlockOverview::new(&block.wait, DatabaseTime(until.0), left_ms)
    });
    ExplainedPlace {
        account: facts.job.as_ref().and_then(|job| job.account.clone()),
        priority: place.priority,
        position,
        // The count and the position are read one after the other.
        waiting: place.waiting_in_flow.max(position),
        blocked,
    }
}

/// Name of the worker that holds a payment and has not written its own name to the ledger.
const ASKED_WORKER: &str = "that was asked";
/// Most lanes whose queues are listed.
const LANES_MAX: usize = 20;

/// What is known of a payment that the ledger does not have.
#[derive(Default)]
struct UnrecordedJob {
    lane: Option<ProviderName>,
    job: Option<JobFacts>,
    claim: Option<ClaimState>,
    message_search: MessageSearch,
}

/// Searches the active jobs of the process; otherwise lists the lanes whose queues may hold the message.
async fn find_unrecorded(sources: &FactSources<'_>, id: &JobId) -> UnrecordedJob {
    if let Some((lane, claim)) = find_active(sources, id).await {
        let provider = lane.as_str().to_owned();
        let job = JobFacts { provider, state: "waiting".to_owned(), cost: 1, ..JobFacts::default() };
        let message_search = MessageSearch::NotAsked;
        return UnrecordedJob { lane: Some(lane), job: Some(job), claim: Some(claim), message_search };
    }
    let message_search = match sources.queue {
        Some(queue) => {
            let lanes = timeout(QUERY_TIMEOUT, lanes(sources, queue)).await.ok().flatten();
            lanes.map_or(MessageSearch::NotAsked, MessageSearch::MayHold)
        }
        None => MessageSearch::NoQueue,
    };
    UnrecordedJob { message_search, ..UnrecordedJob::default() }
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

/// The lanes whose queues have messages; `None` if the broker does not report all of them.
async fn lanes(sources: &FactSources<'_>, queue: &dyn Queue) -> Option<Vec<LaneQueue>> {
    let mut held = Vec::new();
    for row in sources.settings.providers.values().take(LANES_MAX) {
        let ready = queue.depth(&row.name).await.ok()?.unwrap_or(0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::tests::start;

    #[tokio::test]
    async fn explain_needs_the_token() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let ask = async |id: &str, token: &str| {
            let url = format!("{address}/api/v1/jobs/{id}/explain");
            let answer = reqwest::Client::new().get(url).bearer_auth(token).send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        };
        assert_eq!(ask("missing", "let-me-out").await.0, 401);
        let (status, body) = ask("a%20b", "let-me-in").await;
        assert!(status == 400 && body.contains("must be 1 to 64 characters"), "{status} {body}");
        let (status, body) = ask("missing", "let-me-in").await;
        let explained: ExplainResponse = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (status, explained.state.as_str(), explained.explained_from.as_str()),
            (200, "unrecorded", "process")
        );
        assert_eq!((explained.id.as_str(), explained.blocked_at), ("missing", None));
        stop.cancel();
    }
}
