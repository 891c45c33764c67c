//! Where every job is, as `/api/v1/conservation` shows it: per provider, with what does not add up in words.
//!
//! Refuses to read the whole ledger: settled jobs are held against their events only if they settled lately.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::OpsState;
use super::api::problem::ErrorBody;
use super::json::Json;
pub use crate::fleet::Conserved;
use crate::worker::sweeper::{ASTRAY_AFTER, CHECKED};

/// Where every job is, per provider, and what does not add up.
#[utoipa::path(
    get,
    path = "/api/v1/conservation",
    tag = "jobs",
    responses(
        (status = 200, description = "One account per provider", body = Vec<Conserved>),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub(super) async fn show(State(state): State<OpsState>) -> Response {
    match state.upkeep.conservation(ASTRAY_AFTER, CHECKED).await {
        Ok(accounts) => Json(accounts.into_iter().map(Conserved::from).collect::<Vec<_>>()).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "error": error.to_string() }))).into_response(),
    }
}
