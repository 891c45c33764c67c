//! The handlers of the overview: all providers, one provider with its history, the workers, the lanes of this process,
//! and the reconciliation.
//!
//! The data come from the [`OverviewCollector`], which queries each source once for all readers. While a backend is
//! unavailable its figures are missing, with a warning; the response is no error. Every process has its own lanes, with
//! their own circuit breakers and pauses. The reconciliation does not read the whole ledger: finished jobs are compared
//! with their events only if they finished recently.

use std::collections::BTreeMap;
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
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_down;
use crate::fleet::ProviderReconciliation;
use crate::fleet::overview::{Overview, ProviderOverview};
use crate::fleet::report::{LaneState, WaitHistogram};
use crate::fleet::workers::{DecisionOverview, WorkerOverview, permit_waits, recent_decisions};
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::{ProviderRow, RedactedRow};
use crate::ledger::settings::AuditedChange;
use crate::worker::lane_control::LaneControl;
use crate::worker::sweeper::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

mod backlog_counts;
mod collector;
mod history;
mod sources;

pub use collector::{OverviewCollector, OverviewSnapshot, OverviewSources, all_provider_names, unix_ms};
pub use history::HistoryPoint;

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
        Ok(name) => state.operator_context.ledger.settings_audit(Some(&name), AUDIT_MAX).await.ok(),
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
    /// `running`; `resting`: starts no more jobs; `stopped`: takes and sends none; `probing`: sends one job at a time.
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
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn reconciliation(
    State(state): State<OpsState>,
) -> Result<JsonResponse<Vec<ProviderReconciliation>>, ApiError> {
    let counted = state.operator_context.ledger.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await;
    let counted = counted.map_err(ApiError::unavailable)?;
    Ok(JsonResponse(counted.into_iter().map(ProviderReconciliation::from).collect()))
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

#[cfg(test)]
pub mod tests;
