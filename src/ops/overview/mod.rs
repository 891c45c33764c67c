//! The overview of all workers over HTTP: `/api/v1/overview`, one provider's page and history, and who is there.
//!
//! Refuses to work per page: what is asked is gathered once for everybody who asks within two seconds ([`Lookout`]), and an
//! engine that is away leaves its numbers out and says so, instead of an error.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::OpsState;
use crate::fleet::overview::{DecisionLine, ProviderOverview, decisions, waits};
use crate::fleet::report::Waits;
use crate::fleet::workers::WorkerLine;
use crate::ledger::provider_row::ProviderRow;

mod cached;
mod counts;
mod history;
mod lookout;

pub use history::Point;
pub use lookout::{Lookout, Sources, unix_ms};

/// Longest history that is kept, in seconds.
const HISTORY_MAX_S: u64 = 15 * 60;
const HISTORY_DEFAULT_S: u64 = 10 * 60;

/// One provider's page.
#[derive(Debug, Serialize)]
struct Page {
    overview: ProviderOverview,
    /// As `provider show --json` prints it; absent when the provider has no row any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<ProviderRow>,
    waits: Waits,
    decisions: Vec<DecisionLine>,
}

#[derive(Debug, Serialize)]
struct History {
    step_ms: u64,
    points: Vec<Point>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Since {
    seconds: Option<u64>,
}

pub(super) fn routes() -> Router<OpsState> {
    use axum::routing::get;
    Router::new()
        .route("/api/v1/overview", get(show))
        .route("/api/v1/providers/{provider}", get(provider))
        .route("/api/v1/providers/{provider}/history", get(past))
        .route("/api/v1/workers", get(workers))
}

async fn show(State(state): State<OpsState>) -> Response {
    Json(state.lookout.overview().await.as_ref()).into_response()
}

async fn provider(State(state): State<OpsState>, Path(name): Path<String>) -> Response {
    let (overview, evidence) = (state.lookout.overview().await, state.lookout.evidence().await);
    let Some(found) = overview.providers.iter().find(|provider| provider.name == name) else { return nobody() };
    let page = Page {
        overview: found.clone(),
        row: evidence.rows.iter().find(|row| row.name == name).cloned(),
        waits: waits(&evidence.workers, &name),
        decisions: decisions(&evidence.workers, &name),
    };
    Json(page).into_response()
}

async fn past(State(state): State<OpsState>, Path(name): Path<String>, Query(since): Query<Since>) -> Response {
    let seconds = since.seconds.unwrap_or(HISTORY_DEFAULT_S);
    if !(1..=HISTORY_MAX_S).contains(&seconds) {
        let error = format!("seconds must lie between 1 and {HISTORY_MAX_S}");
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": error }))).into_response();
    }
    let known = state.lookout.overview().await.providers.iter().any(|provider| provider.name == name);
    let step_ms = u64::try_from(lookout::SAMPLE_EVERY.as_millis()).unwrap_or(u64::MAX);
    match state.lookout.history(&name, seconds) {
        points if points.is_empty() && !known => nobody(),
        points => Json(History { step_ms, points }).into_response(),
    }
}

async fn workers(State(state): State<OpsState>) -> Response {
    let evidence = state.lookout.evidence().await;
    let lines: Vec<WorkerLine> = evidence.workers.iter().map(WorkerLine::of).collect();
    Json(json!({ "workers": lines })).into_response()
}

fn nobody() -> Response {
    (StatusCode::NOT_FOUND, Json(json!({ "error": "no such provider" }))).into_response()
}

#[cfg(test)]
pub(super) mod tests;
