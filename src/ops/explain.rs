//! `GET /api/v1/jobs/{id}/explain`: why a job is where it is, from live data; and the same without a running process, for
//! the command line.
//!
//! Refuses to be half an answer: an engine that does not answer in time is told as such, and the rest is explained. Gathers
//! facts alone; what follows from them is `domain::explain`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, timeout};
use utoipa::ToSchema;

use self::unrecorded::Sought;
use super::OpsState;
use super::api::problem::ErrorBody;
use crate::domain::decision::PastUse;
use crate::domain::explain::facts::{
    Before, BucketPlace, ByHand, Facts, Hand, JobFacts, LaneFacts, LimitUsed, LimiterFacts, Place, Refused, Refuser,
    Rejected, Request, RowFacts, Waited,
};
use crate::domain::explain::turn::Past;
use crate::domain::explain::{Explanation, explain};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::operator::{At, JobStory, Operator};
use crate::ledger::surroundings::Surroundings;
use crate::limiter::Limiter;
use crate::limiter::gate::RefusedBy;
use crate::queue::Queue;
use crate::worker::deployment::Progress;
use crate::worker::pauses::LaneState;
use crate::worker::quotas::quota_spec;
use crate::worker::settings_watch::Known;

mod unrecorded;

/// How long a broker, a gate or a limiter's store is waited for.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// What is asked. Without a process its lanes and gates are not known.
pub struct Sources<'a> {
    pub operator: &'a dyn Operator,
    pub known: &'a Known,
    pub queue: Option<&'a dyn Queue>,
    /// `None`: it is in another process.
    pub limiter: Option<&'a dyn Limiter>,
    pub process: Option<&'a Progress>,
}

/// An explanation as `/api/v1/jobs/{id}/explain` and `jobs explain --json` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explained {
    pub id: String,
    pub state: String,
    pub provider: Option<String>,
    pub summary: String,
    /// `process`: of a running worker, with its lanes and gates; `ledger`: without one.
    pub explained_from: String,
    pub gates: Vec<ExplainedGate>,
    pub stands_at: Option<ExplainedStand>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedGate {
    pub name: String,
    pub passed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    pub words: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedStand {
    pub gate: String,
    pub limit: Option<String>,
    pub allows: Option<String>,
    pub used: Option<u64>,
    pub turn_at: Option<String>,
    pub turn_in_ms: Option<u64>,
    pub before_it: Option<u64>,
    pub exact: bool,
}

/// The gates that one payment has passed, the one it stands at, and when its turn comes.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}/explain",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment")),
    responses(
        (status = 200, description = "Also for an id that the ledger does not know: where to look", body = Explained),
        (status = 400, description = "What can be no id", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub(super) async fn show(State(state): State<OpsState>, Path(id): Path<String>) -> Response {
    let refused = |status: StatusCode, problem: &str| (status, Json(json!({ "error": problem }))).into_response();
    let id = match JobId::new(id) {
        Ok(id) => id,
        Err(problem) => return refused(StatusCode::BAD_REQUEST, &format!("id {problem}")),
    };
    let progress = state.progress.borrow().clone();
    let sources = Sources {
        operator: state.desk.operator.as_ref(),
        known: &progress.known,
        queue: Some(state.desk.queue.as_ref()),
        limiter: Some(state.limiter.as_ref()),
        process: Some(&progress),
    };
    match explained(&sources, &id).await {
        Ok(explained) => Json(explained).into_response(),
        Err(error) => refused(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
    }
}

/// Explains one job.
///
/// # Errors
/// When the ledger does not answer: without it nothing is known.
pub async fn explained(sources: &Sources<'_>, id: &JobId) -> Result<Explained, LedgerError> {
    let facts = facts(sources, id).await?;
    let from = if sources.process.is_some() { "process" } else { "ledger" };
    Ok(written(id, &facts, explain(&facts), from))
}

/// Everything that is known of one id, as it is now.
///
/// # Errors
/// As the ledger's.
pub async fn facts(sources: &Sources<'_>, id: &JobId) -> Result<Facts, LedgerError> {
    let story = sources.operator.show(id).await?;
    let sought = match &story {
        Some(_) => Sought::default(),
        None => unrecorded::sought(sources, id).await,
    };
    let provider = story.as_ref().map(|story| story.line.provider.as_str());
    let name = provider.and_then(|name| ProviderName::new(name).ok()).or(sought.lane);
    let row = name.as_ref().map(|name| row(sources.known, name)).unwrap_or_default();
    let quota = row.provider.as_ref().map(|provider| provider.quota.clone());
    let sharing: Vec<ProviderName> = match &quota {
        Some(quota) => {
            let rows = sources.known.providers.values().filter(|row| row.quota == *quota);
            rows.map(|row| row.name.clone()).collect()
        }
        None => name.iter().cloned().collect(),
    };
    let around = sources.operator.surroundings(id, &sharing).await?;
    let hand = match sought.hand {
        Some(hand) => hand,
        None => hand(sources.process, name.as_ref(), story.as_ref(), &around, id).await,
    };
    let ready = match (sources.queue, &name) {
        (Some(queue), Some(name)) => timeout(LOOK_MAX, queue.depth(name)).await.ok().and_then(Result::ok).flatten(),
        _ => None,
    };
    let account = match (&story, &sought.job) {
        (Some(story), _) => story.line.account.as_deref(),
        (None, job) => job.as_ref().and_then(|job| job.account.as_deref()),
    };
    let mut limiter = match (&row.spec, &name) {
        (Some(spec), Some(_)) => limiter(sources, spec, account, around.hold).await,
        _ => LimiterFacts::default(),
    };
    let gate = sources.process.and_then(|process| process.gates.get(name.as_ref()?).cloned());
    limiter.standing = gate.and_then(|gate| {
        let standing = gate.view().borrow().standing.clone();
        standing.map(|(by, until)| refused(&by, until, false))
    });
    let lane = match (sources.process, &name) {
        (Some(process), Some(name)) => lane(process, name),
        _ => LaneFacts::NotAsked,
    };
    let mut before = before(&around, ready);
    if let Some(in_queue) = sought.before {
        let jobs = in_queue + around.in_hand;
        before = Before { jobs, cost: jobs, ..before };
    }
    let now = EpochMs(around.now.0);
    Ok(Facts {
        now,
        id: id.as_str().to_owned(),
        rejected: around.rejected.iter().map(rejected).collect(),
        before,
        unrecorded: sought.job.map(|job| unrecorded::since(job, sought.ready_in, now)),
        lanes: sought.lanes,
        job: story.map(|story| job(story, &around)),
        row,
        lane,
        hand,
        limiter,
    })
}

fn row(known: &Known, name: &ProviderName) -> RowFacts {
    let provider = known.providers.get(name).cloned();
    let bad = known.bad.iter().find(|bad| bad.provider == name.as_str());
    let spec = provider.as_ref().and_then(|row| quota_spec(known, &row.quota)).map(Arc::new);
    RowFacts { provider, problems: bad.map(|bad| bad.problems.clone()).unwrap_or_default(), spec }
}

fn lane(process: &Progress, name: &ProviderName) -> LaneFacts {
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    match process.lanes.get(name).map(|pauses| pauses.state()) {
        None => LaneFacts::Absent,
        Some(LaneState::Running) => LaneFacts::Running,
        Some(LaneState::Resting(pause)) => LaneFacts::Resting { cause: pause.cause, ends_in: left(pause.until) },
        Some(LaneState::Stopped(pause)) => LaneFacts::Stopped { cause: pause.cause, ends_in: left(pause.until) },
        Some(LaneState::Probing { cause }) => LaneFacts::Probing { cause },
    }
}

async fn hand(
    process: Option<&Progress>,
    name: Option<&ProviderName>,
    story: Option<&JobStory>,
    around: &Surroundings,
    id: &JobId,
) -> Hand {
    let Some(worker) = story.and_then(|story| story.lease_owner.clone()) else { return Hand::Nobody };
    if let Some(process) = process.filter(|process| process.in_hand.has(id)) {
        let here = match name {
            Some(name) => place_in(process, name, &worker, id).await,
            None => None,
        };
        return here.unwrap_or(Hand::Here { worker, place: None });
    }
    let lives = story.and_then(|story| story.lease_until).is_some_and(|until| until > around.now);
    if lives { Hand::Elsewhere { worker } } else { Hand::Nobody }
}

/// Where this process's lane has the job: in its bucket, or in its gate's line.
async fn place_in(process: &Progress, name: &ProviderName, worker: &str, id: &JobId) -> Option<Hand> {
    let (pool, gate) = (process.pools.get(name), process.gates.get(name));
    if let Some(pool) = pool
        && let Some(place) = timeout(LOOK_MAX, pool.place_of(id.clone())).await.ok().flatten()
    {
        let at_the_gate = gate.map_or(0, |gate| gate.view().borrow().waiting);
        let before = u64::from(place.before) + u64::try_from(at_the_gate).unwrap_or(u64::MAX);
        let bucket = BucketPlace { before, leaves_in: place.leaves_in };
        return Some(Hand::InBucket { worker: worker.to_owned(), bucket });
    }
    let place = timeout(LOOK_MAX, gate?.place_of(id.clone())).await.ok().flatten()?;
    let place = Place {
        before: place.before,
        cost_before: place.cost_before,
        refused: place.refused.map(|(by, until, exact)| refused(&by, until, exact)),
        of_its_own: place.of_its_own,
    };
    Some(Hand::Here { worker: worker.to_owned(), place: Some(place) })
}

fn refused(by: &RefusedBy, until: Instant, exact: bool) -> Refused {
    let by = match by {
        RefusedBy::Limit(name) => Refuser::Limit(name.clone()),
        RefusedBy::Cold => Refuser::Cold,
        RefusedBy::Paused => Refuser::Paused,
        RefusedBy::StoreAway(why) => Refuser::Away(why.clone()),
        RefusedBy::StaleSettings => Refuser::StaleSettings,
        RefusedBy::TooCostly => Refuser::TooCostly,
        RefusedBy::Blocked { .. } => Refuser::Blocked,
        RefusedBy::Stopping => Refuser::Stopping,
    };
    Refused { by, wait: until.saturating_duration_since(Instant::now()), exact }
}

/// What the limiter says, and what the ledger remembers of the quota's use.
async fn limiter(
    sources: &Sources<'_>,
    spec: &QuotaSpec,
    account: Option<&str>,
    hold: Option<Duration>,
) -> LimiterFacts {
    let mut facts = LimiterFacts::default();
    let subjects = spec.subjects(account, None).unwrap_or_default();
    if let Some(limiter) = sources.limiter {
        match timeout(LOOK_MAX, limiter.peek(spec, subjects.first())).await {
            Ok(Ok(uses)) => {
                let enforced = uses.into_iter().filter(|limit| !limit.shadow);
                let used =
                    enforced.map(|it| LimitUsed { name: it.name, used: it.used, capacity: u64::from(it.capacity) });
                facts.uses = used.collect();
            }
            Ok(Err(error)) => facts.away = Some(error.to_string()),
            Err(_) => facts.away = Some("no answer in time".to_owned()),
        }
    }
    let within = Duration::from_micros(spec.cold_us());
    match sources.operator.recent_uses(&spec.quota, within).await {
        Ok(uses) => {
            let ended = uses.ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect();
            facts.past = Some(Past { ended, open: uses.open, hold: hold.unwrap_or_default() });
        }
        Err(error) => tracing::debug!(%error, "no turn can be reckoned: the ledger cannot tell what was used"),
    }
    facts
}

/// Those before it by the ledger, and messages in the queue that the ledger does not know yet.
fn before(around: &Surroundings, ready: Option<u64>) -> Before {
    let unrecorded = ready.unwrap_or_default().saturating_sub(around.due);
    Before {
        jobs: around.before + unrecorded,
        cost: around.cost_before + unrecorded,
        in_hand: around.in_hand,
        ready,
        workers: around.workers,
    }
}

fn rejected(rejection: &crate::ledger::surroundings::Rejection) -> Rejected {
    let crate::ledger::surroundings::Rejection { at, lane, reason, detail } = rejection.clone();
    Rejected { at: EpochMs(at.0), lane, reason, detail }
}

fn job(story: JobStory, around: &Surroundings) -> JobFacts {
    let ms = |at: At| EpochMs(at.0);
    let request = |it: &crate::ledger::operator::AttemptLine| Request {
        number: it.number,
        began_at: ms(it.began_at),
        ended_at: it.ended_at.map(ms),
        outcome: it.outcome.clone(),
    };
    let event = story.events.iter().rev().find(|event| event.state == story.line.state);
    let by_hand = story
        .audit
        .last()
        .map(|it| ByHand { who: it.os_user.clone().unwrap_or_else(|| it.who.clone()), because: it.because.clone() });
    JobFacts {
        created_at: ms(story.line.created_at),
        updated_at: ms(story.line.updated_at),
        wake_at: ms(story.line.wake_at),
        not_before: story.not_before.map(ms),
        expires_at: story.expires_at.map(ms),
        revived_at: story.revived_at.map(ms),
        first_sent_at: story.first_sent_at.map(ms),
        unknown_since: around.unknown_since.map(ms),
        cost: story.cost,
        attempts: story.line.attempts,
        lookups: around.lookups,
        resend: around.resend,
        requests: story.attempts.iter().map(request).collect(),
        waited: story.waited.map(|it| Waited { reason: it.reason, since: ms(it.since), request: it.request }),
        event: event.map(|event| event.published_at.map(ms)),
        by_hand,
        provider: story.line.provider,
        state: story.line.state,
        reason: story.line.reason,
        reference: story.line.provider_reference,
        account: story.line.account,
    }
}

fn written(id: &JobId, facts: &Facts, explanation: Explanation, from: &str) -> Explained {
    let text = |at: EpochMs| At(at.0).to_string();
    let ms = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let turn_at = |turn: Duration| text(EpochMs(facts.now.0.saturating_add(i64::try_from(ms(turn)).unwrap_or(0))));
    Explained {
        id: id.as_str().to_owned(),
        state: explanation.state,
        provider: explanation.provider,
        summary: explanation.summary,
        explained_from: from.to_owned(),
        gates: explanation
            .gates
            .into_iter()
            .map(|gate| ExplainedGate {
                name: gate.name.to_owned(),
                passed: gate.passed,
                at: gate.at.map(text),
                words: gate.words,
            })
            .collect(),
        stands_at: explanation.stands_at.map(|at| ExplainedStand {
            gate: at.gate.to_owned(),
            limit: at.limit,
            allows: at.allows,
            used: at.used,
            turn_at: at.turn_in.map(turn_at),
            turn_in_ms: at.turn_in.map(ms),
            before_it: at.before_it,
            exact: at.exact,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::start;
    use super::*;

    #[tokio::test]
    async fn a_job_is_explained_to_whoever_may_ask() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (address, _progress, stop) = start(Some("let-me-in")).await;
        let ask = async |id: &str, token: &str| {
            let url = format!("{address}/api/v1/jobs/{id}/explain");
            let answer = reqwest::Client::new().get(url).bearer_auth(token).send().await.unwrap();
            (answer.status().as_u16(), answer.text().await.unwrap())
        };
        assert_eq!(ask("nobody", "let-me-out").await.0, 401);
        let (status, body) = ask("a%20b", "let-me-in").await;
        assert!(status == 400 && body.contains("must be 1 to 64 characters"), "{status} {body}");
        let (status, body) = ask("nobody", "let-me-in").await;
        let told: Explained = serde_json::from_str(&body).unwrap();
        assert_eq!((status, told.state.as_str(), told.explained_from.as_str()), (200, "unrecorded", "process"));
        assert_eq!((told.id.as_str(), told.stands_at), ("nobody", None));
        stop.cancel();
    }
}
