//! The handlers of the overview: all providers, one provider with its history, the workers, the lanes of this process,
//! and the reconciliation.
//!
//! The data come from the [`OverviewCollector`], which queries each source once for all readers. While a backend is
//! unavailable its figures are missing, with a warning; the response is no error. Every process has its own lanes, with
//! their own circuit breakers and pauses. The history of a provider has a point each two seconds, in memory only. The reconciliation does not read the whole ledger: finished jobs are compared
//! with their events only if they finished recently.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::clear_time::SENT_STEP;
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_down;
use crate::fleet::report::{LaneState, WaitHistogram};
use crate::fleet::workers::{DecisionOverview, WorkerOverview, permit_waits, recent_decisions};
use crate::fleet::{Overview, ProviderOverview};
use crate::ledger::database::Database;
use crate::ledger::history::{HistorySample, SampleStep};
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::{ProviderRow, RedactedRow};
use crate::ledger::settings::AuditedChange;
use crate::ledger::upkeep::ProviderReconciliation;
use crate::worker::lane_control::LaneControl;
use crate::worker::sweeper::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

mod backlog_counts;
mod collector;
mod pace_history;
mod sources;

use pace_history::{PacePoint, judged_before};

pub use collector::{OverviewCollector, OverviewSnapshot, OverviewSources, all_provider_names, unix_ms};

/// Length of the history, in seconds.
const HISTORY_MAX_S: u64 = 15 * 60;
const HISTORY_DEFAULT_S: u64 = 10 * 60;

/// Most changes of a provider's rows in a response.
const AUDIT_MAX: u32 = 20;

/// All data of one provider.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProviderPage {
    overview: ProviderOverview,
    /// The row as `provider show --json` prints it; absent if the provider no longer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    row: Option<RedactedRow>,
    waits: WaitHistogram,
    decisions: Vec<DecisionOverview>,
    /// The last changes of its rows, newest first; absent while the database is unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    audit: Option<Vec<ChangeOverview>>,
}

/// A change of settings.
#[derive(Debug, Serialize, ToSchema)]
struct ChangeOverview {
    #[schema(value_type = String)]
    at: DatabaseTime,
    who: String,
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct WorkersResponse {
    workers: Vec<WorkerOverview>,
}

#[derive(Debug, Serialize, ToSchema)]
struct HistoryResponse {
    step_ms: u64,
    points: Vec<HistoryPoint>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct HistoryParams {
    /// Length of the history in seconds, 1 to 900; default 600.
    seconds: Option<u64>,
}

pub fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/overview", get(show))
        .route("/api/v1/providers/{name}", get(provider))
        .route("/api/v1/providers/{name}/history", get(provider_history))
        .route("/api/v1/workers", get(workers))
        .route("/api/v1/lanes", get(lanes))
        .route("/api/v1/reconciliation", get(reconciliation))
}

/// All providers, as all workers together see them.
#[utoipa::path(
    get,
    path = "/api/v1/overview",
    tag = "overview",
    responses((status = 200, description = "One entry per provider", body = Overview))
)]
pub async fn show(State(state): State<OpsState>) -> Response {
    JsonResponse(state.collector.overview().await.as_ref()).into_response()
}

/// One provider: limits, waits, the last decisions and changes.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}",
    tag = "overview",
    params(("name" = String, Path, description = "The provider")),
    responses(
        (status = 200, description = "The provider", body = ProviderPage),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub async fn provider(State(state): State<OpsState>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let OverviewSnapshot { overview, input } = state.collector.snapshot().await;
    let Some(found) = overview.providers.iter().find(|provider| provider.name == name) else {
        return Err(no_such_provider());
    };
    let audit = match ProviderName::new(name.as_str()) {
        Ok(name) => state.reads.settings_audit(Some(&name), AUDIT_MAX).await.ok(),
        Err(_) => None,
    };
    let page = ProviderPage {
        audit: audit.map(|changes| changes.into_iter().map(ChangeOverview::from).collect()),
        overview: found.clone(),
        row: input.rows.iter().find(|row| row.name == name).map(RedactedRow::from),
        waits: permit_waits(&input.workers, &name),
        decisions: recent_decisions(&input.workers, &name),
    };
    Ok(JsonResponse(page).into_response())
}

/// Rate, limit and backlog over the last minutes, oldest first.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}/history",
    tag = "overview",
    params(("name" = String, Path, description = "The provider"), HistoryParams),
    responses(
        (status = 200, description = "Points in equal steps", body = HistoryResponse),
        (status = 400, description = "`seconds` is out of range", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub async fn provider_history(
    State(state): State<OpsState>,
    Path(name): Path<String>,
    since: Result<Query<HistoryParams>, QueryRejection>,
) -> Result<Response, ApiError> {
    let seconds = since?.0.seconds.unwrap_or(HISTORY_DEFAULT_S);
    if !(1..=HISTORY_MAX_S).contains(&seconds) {
        return Err(ApiError::bad_request(format!("`seconds` must be 1 to {HISTORY_MAX_S}, got {seconds}")));
    }
    let known = state.collector.overview().await.providers.iter().any(|provider| provider.name == name);
    let step_ms = millis_down(collector::SAMPLE_EVERY);
    match state.collector.history(&name, seconds) {
        points if points.is_empty() && !known => Err(no_such_provider()),
        points => Ok(JsonResponse(HistoryResponse { step_ms, points }).into_response()),
    }
}

/// All workers, with the state of the backends as each sees it.
#[utoipa::path(
    get,
    path = "/api/v1/workers",
    tag = "overview",
    responses((status = 200, description = "Every worker that reported within a day", body = WorkersResponse))
)]
pub async fn workers(State(state): State<OpsState>) -> Response {
    let input = state.collector.input().await;
    JsonResponse(WorkersResponse { workers: input.workers.iter().map(WorkerOverview::new).collect() }).into_response()
}

/// The state of one lane.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LaneOverview {
    provider: String,
    /// `running`; `full`: takes no messages; `resting`: starts no more jobs; `stopped`: sends none; `probing`: sends one job
    /// at a time.
    #[schema(value_type = String)]
    state: LaneState,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ends_in_ms: Option<u64>,
}

/// The state of each lane of this process, and the cause.
#[utoipa::path(
    get,
    path = "/api/v1/lanes",
    tag = "providers",
    responses((status = 200, description = "Its lanes", body = Vec<LaneOverview>))
)]
pub async fn lanes(State(state): State<OpsState>) -> Response {
    let lanes = state.worker_status.borrow().lanes.clone();
    JsonResponse(lane_overviews(&lanes)).into_response()
}

fn lane_overviews(lanes: &BTreeMap<ProviderName, Arc<LaneControl>>) -> Vec<LaneOverview> {
    let view = |(name, control): (&ProviderName, &Arc<LaneControl>)| {
        let (provider, status) = (name.to_string(), control.status());
        let (cause, ends_in_ms) = status.pause.map(|pause| (pause.words, pause.ends_in_ms)).unzip();
        LaneOverview { provider, state: status.does, cause, ends_in_ms: ends_in_ms.flatten() }
    };
    lanes.iter().map(view).collect()
}

/// The reconciliation of each provider: jobs by state, and faults.
#[utoipa::path(
    get,
    path = "/api/v1/reconciliation",
    tag = "jobs",
    responses(
        (status = 200, description = "One reconciliation per provider", body = Vec<ProviderReconciliation>),
    )
)]
pub async fn reconciliation(
    State(state): State<OpsState>,
) -> Result<JsonResponse<Vec<ProviderReconciliation>>, ApiError> {
    let counted = state.reads.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await;
    counted.map(JsonResponse).map_err(ApiError::unavailable)
}

impl From<AuditedChange> for ChangeOverview {
    fn from(AuditedChange { at, who, what, because, .. }: AuditedChange) -> Self {
        Self { at, who, what, because }
    }
}

fn no_such_provider() -> ApiError {
    ApiError::not_found("no such provider")
}

/// Changes of a provider that are searched: the pause is the last one, or close to it.
const CHANGES_MAX: u32 = 50;

/// The author of each pause by provider, in words. While the audit cannot be read, the author is missing.
pub async fn pause_authors(ledger: &Database, rows: &[ProviderRow]) -> BTreeMap<String, String> {
    let mut words = BTreeMap::new();
    for row in rows.iter().filter(|row| row.paused) {
        let Ok(name) = ProviderName::new(row.name.as_str()) else { continue };
        let Ok(changes) = ledger.settings_audit(Some(&name), CHANGES_MAX).await else { continue };
        let who = changes.iter().find_map(|change| change.describe_pause());
        words.extend(who.map(|who| (row.name.clone(), who)));
    }
    words
}

/// Points per provider in the history of all workers: fifteen minutes, in memory only. A restart clears it.
const POINTS_MAX: usize = 450;
/// Points for the recent rate of a backlog: at most five minutes, at least one. Limits on accounts release jobs in
/// bursts, so ten seconds are too short.
const RECENT_POINTS_MAX: usize = 150;
const RECENT_POINTS_MIN: usize = 30;
/// Points by which the pace that lanes have kept is judged: three minutes.
const PACE_POINTS_MAX: usize = 90;

/// The figures of one provider at one instant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct HistoryPoint {
    pub at: String,
    /// `null` if it is unknown.
    pub rate_per_s: Option<f64>,
    pub limit_per_s: Option<f64>,
    /// `null` if only a lower bound is known.
    pub waiting: Option<u64>,
    /// Payments in review; `null` if it is unknown.
    pub review: Option<u64>,
    /// 429s were recorded since the previous point.
    pub throttled: bool,
}

#[derive(Debug, Default)]
pub struct OverviewHistory {
    providers: BTreeMap<String, ProviderHistory>,
    /// Of the last overview that was recorded.
    last_at: Option<String>,
    /// The live workers, and when they were others.
    workers: BTreeSet<String>,
    workers_changed_ms: i64,
}

/// What the lanes have sent lately, by provider; see [`crate::fleet::OverviewInput`].
struct SentLately {
    recent_per_s: BTreeMap<String, f64>,
    sent_before: BTreeMap<String, Vec<f64>>,
    judged_before: BTreeMap<String, Vec<f64>>,
}

#[derive(Debug, Default)]
struct ProviderHistory {
    points: VecDeque<HistoryPoint>,
    /// Of the last minutes alone.
    pace: VecDeque<PacePoint>,
    last_refused_at: Option<String>,
}

impl OverviewHistory {
    /// Whether the overview is later than the last recorded one.
    pub fn is_later(&self, overview: &Overview) -> bool {
        self.last_at.as_ref().is_none_or(|last_at| *last_at < overview.at)
    }

    /// Records a point of each provider, and drops providers that no longer exist.
    pub fn record(&mut self, overview: &Overview) {
        self.last_at = Some(overview.at.clone());
        self.providers.retain(|name, _| overview.providers.iter().any(|provider| provider.name == *name));
        for provider in &overview.providers {
            let ring = self.providers.entry(provider.name.clone()).or_default();
            let last = provider.last_refused_at.as_ref();
            // Of the first point, it is not known when they were recorded.
            let throttled = !ring.points.is_empty() && last.is_some() && last > ring.last_refused_at.as_ref();
            ring.last_refused_at = last.cloned().or(ring.last_refused_at.take());
            if ring.points.len() == POINTS_MAX {
                ring.points.pop_front();
            }
            if ring.pace.len() == PACE_POINTS_MAX {
                ring.pace.pop_front();
            }
            ring.pace.push_back(PacePoint::new(overview, provider, at_ms(&overview.at)));
            ring.points.push_back(HistoryPoint {
                at: overview.at.clone(),
                rate_per_s: provider.rate_per_s,
                limit_per_s: provider.limit_per_s,
                waiting: (!provider.waiting_is_at_least).then_some(provider.waiting),
                review: provider.review,
                throttled,
            });
        }
    }

    /// Requests per second over the last minutes with a backlog, without a break. Providers without enough points are
    /// left out.
    pub fn recent_per_s(&self) -> BTreeMap<String, f64> {
        let lately = |(name, ring): (&String, &ProviderHistory)| Some((name.clone(), lately_per_s(ring)?));
        self.providers.iter().filter_map(lately).collect()
    }

    /// Requests of each provider in each [`SENT_STEP`] until now, the last step first. It ends where they are not known.
    pub fn sent_before(&self, now_ms: i64) -> BTreeMap<String, Vec<f64>> {
        self.providers.iter().map(|(name, ring)| (name.clone(), sent_before(ring, now_ms))).collect()
    }

    /// The rates until now. `live`: the workers that report; those that started or ended change what the others send.
    fn sent_lately(&mut self, live: BTreeSet<String>, now_ms: i64) -> SentLately {
        if live != self.workers {
            (self.workers, self.workers_changed_ms) = (live, now_ms);
        }
        let judged = |ring: &ProviderHistory| judged_before(&ring.pace, self.workers_changed_ms, now_ms);
        SentLately {
            recent_per_s: self.recent_per_s(),
            sent_before: self.sent_before(now_ms),
            judged_before: self.providers.iter().map(|(name, ring)| (name.clone(), judged(ring))).collect(),
        }
    }

    /// The providers that have points.
    fn providers(&self) -> Vec<String> {
        self.providers.keys().cloned().collect()
    }

    /// The figures of a provider at an instant: those of the last point before it or, at a start, the first after it.
    /// Without a point within a step of the instant nothing is known.
    fn figures_at(&self, provider: &str, at_ms: i64) -> HistorySample {
        let [from, at, to] = [-1, 0, 1].map(|step| DatabaseTime(at_ms + step * SampleStep::Fine.millis()).to_string());
        let points = self.providers.get(provider).map(|ring| &ring.points);
        let near = || points.into_iter().flatten().filter(|point| from <= point.at && point.at <= to);
        let point = near().rfind(|point| point.at <= at).or_else(|| near().next());
        point.map_or_else(HistorySample::default, |point| HistorySample {
            waiting: point.waiting,
            review: point.review,
            limit_per_s: point.limit_per_s,
            ..HistorySample::default()
        })
    }

    /// The last `count` points, oldest first.
    pub fn last_points(&self, provider: &str, count: usize) -> Vec<HistoryPoint> {
        let Some(ring) = self.providers.get(provider) else { return Vec::new() };
        let skipped = ring.points.len().saturating_sub(count);
        ring.points.iter().skip(skipped).cloned().collect()
    }
}

fn lately_per_s(ring: &ProviderHistory) -> Option<f64> {
    let busy = ring
        .points
        .iter()
        .rev()
        .take(RECENT_POINTS_MAX)
        .take_while(|point| point.waiting.is_none_or(|waiting| waiting > 0));
    let rates = busy.filter_map(|point| point.rate_per_s);
    let (sum, points) = rates.fold((0.0, 0_u32), |(sum, points), rate_per_s| (sum + rate_per_s, points + 1));
    (points as usize >= RECENT_POINTS_MIN).then(|| sum / f64::from(points))
}

/// A point's rate is the mean of the [`SENT_STEP`] before it.
fn sent_before(ring: &ProviderHistory, now_ms: i64) -> Vec<f64> {
    let step_ms = i64::try_from(SENT_STEP.as_millis()).unwrap_or(i64::MAX);
    let mut points = ring.points.iter().rev();
    let mut sent = Vec::new();
    // The last point is up to a snapshot's age old.
    let mut end_ms = now_ms;
    loop {
        let Some(point) = points.find(|point| at_ms(&point.at) <= end_ms) else { return sent };
        let is_near = end_ms - at_ms(&point.at) < step_ms / 2;
        let Some(rate_per_s) = point.rate_per_s.filter(|_| is_near) else { return sent };
        sent.push(rate_per_s * SENT_STEP.as_secs_f64());
        end_ms -= step_ms;
    }
}

fn at_ms(at: &str) -> i64 {
    at.parse().map_or(0, |at: jiff::Timestamp| at.as_millisecond())
}

#[cfg(test)]
mod commit_tests;
#[cfg(test)]
pub mod tests;
