//! The overview of all workers over HTTP: `/api/v1/overview`, one provider's page and history, and who is there.
//!
//! Refuses to work per page: what is asked is gathered once for everybody who asks within two seconds ([`Lookout`]), and an
//! engine that is away leaves its numbers out and says so, instead of an error.

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::OpsState;
use super::api::problem::{ErrorBody, Problem};
use super::json::Json;
use crate::domain::provider::ProviderName;
use crate::fleet::lately::{DecisionLine, decisions, waits};
use crate::fleet::overview::{Overview, ProviderOverview};
use crate::fleet::report::Waits;
use crate::fleet::workers::WorkerLine;
use crate::ledger::audited::AuditedChange;
use crate::ledger::operator::At;
use crate::ledger::provider_row::ShownRow;

mod asked;
mod cached;
mod counts;
mod history;
mod lookout;
mod pausers;

pub use history::Point;
pub use lookout::{Lookout, Picture, Sources, named, unix_ms};
pub use pausers::pausers;

/// Longest history that is kept, in seconds.
const HISTORY_MAX_S: u64 = 15 * 60;
const HISTORY_DEFAULT_S: u64 = 10 * 60;

/// Changes of a provider's rows that its page shows.
const AUDIT_MAX: u32 = 20;

/// One provider's page.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Page {
    overview: ProviderOverview,
    /// As `provider show --json` prints it; absent when the provider has no row any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    row: Option<ShownRow>,
    waits: Waits,
    decisions: Vec<DecisionLine>,
    /// The last changes of its rows, newest first; absent when the database does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    audit: Option<Vec<ChangeLine>>,
}

/// Who changed what.
#[derive(Debug, Serialize, ToSchema)]
struct ChangeLine {
    #[schema(value_type = String)]
    at: At,
    who: String,
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Workers {
    workers: Vec<WorkerLine>,
}

#[derive(Debug, Serialize, ToSchema)]
struct History {
    step_ms: u64,
    points: Vec<Point>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Since {
    /// How far back, 1 to 900; 600 unless told.
    seconds: Option<u64>,
}

pub(super) fn routes() -> Router<OpsState> {
    use axum::routing::get;
    Router::new()
        .route("/api/v1/overview", get(show))
        .route("/api/v1/providers/{name}", get(provider))
        .route("/api/v1/providers/{name}/history", get(past))
        .route("/api/v1/workers", get(workers))
}

/// All providers, as all workers together see them.
#[utoipa::path(
    get,
    path = "/api/v1/overview",
    tag = "overview",
    responses((status = 200, description = "One entry per provider", body = Overview))
)]
pub(super) async fn show(State(state): State<OpsState>) -> Response {
    Json(state.lookout.overview().await.as_ref()).into_response()
}

/// One provider: limits, waits, the last decisions and changes.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}",
    tag = "overview",
    params(("name" = String, Path, description = "The provider")),
    responses(
        (status = 200, description = "What its page shows", body = Page),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub(super) async fn provider(State(state): State<OpsState>, Path(name): Path<String>) -> Result<Response, Problem> {
    let Picture { overview, evidence } = state.lookout.look().await;
    let Some(found) = overview.providers.iter().find(|provider| provider.name == name) else { return Err(nobody()) };
    let audit = match ProviderName::new(name.as_str()) {
        Ok(name) => state.desk.settings.audit(Some(&name), AUDIT_MAX).await.ok(),
        Err(_) => None,
    };
    let page = Page {
        audit: audit.map(|changes| changes.into_iter().map(ChangeLine::from).collect()),
        overview: found.clone(),
        row: evidence.rows.iter().find(|row| row.name == name).map(ShownRow::from),
        waits: waits(&evidence.workers, &name),
        decisions: decisions(&evidence.workers, &name),
    };
    Ok(Json(page).into_response())
}

/// Rate, limit and backlog over the last minutes, oldest first.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}/history",
    tag = "overview",
    params(("name" = String, Path, description = "The provider"), Since),
    responses(
        (status = 200, description = "Points in equal steps", body = History),
        (status = 400, description = "`seconds` out of its range", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub(super) async fn past(
    State(state): State<OpsState>,
    Path(name): Path<String>,
    since: Result<Query<Since>, QueryRejection>,
) -> Result<Response, Problem> {
    let seconds = since?.0.seconds.unwrap_or(HISTORY_DEFAULT_S);
    if !(1..=HISTORY_MAX_S).contains(&seconds) {
        return Err(Problem::bad(format!("seconds must lie between 1 and {HISTORY_MAX_S}")));
    }
    let known = state.lookout.overview().await.providers.iter().any(|provider| provider.name == name);
    let step_ms = u64::try_from(lookout::SAMPLE_EVERY.as_millis()).unwrap_or(u64::MAX);
    match state.lookout.history(&name, seconds) {
        points if points.is_empty() && !known => Err(nobody()),
        points => Ok(Json(History { step_ms, points }).into_response()),
    }
}

/// Who works, and how the engines answer each of them.
#[utoipa::path(
    get,
    path = "/api/v1/workers",
    tag = "overview",
    responses((status = 200, description = "Every worker that reported within a day", body = Workers))
)]
pub(super) async fn workers(State(state): State<OpsState>) -> Response {
    let evidence = state.lookout.evidence().await;
    Json(Workers { workers: evidence.workers.iter().map(WorkerLine::of).collect() }).into_response()
}

impl From<AuditedChange> for ChangeLine {
    fn from(AuditedChange { at, who, what, because, .. }: AuditedChange) -> Self {
        Self { at, who, what, because }
    }
}

fn nobody() -> Problem {
    Problem::unknown("no such provider")
}

#[cfg(test)]
pub(super) mod tests;
