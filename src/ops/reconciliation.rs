//! Where every job is, as `/api/v1/conservation` shows it: per provider, with what does not add up in words.
//!
//! Refuses to read the whole ledger: settled jobs are held against their events only if they settled lately.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::OpsState;
use super::api::problem::ErrorBody;
use super::json::JsonResponse;
pub use crate::fleet::ProviderReconciliation;
use crate::worker::sweeper::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

/// Where every job is, per provider, and what does not add up.
#[utoipa::path(
    get,
    path = "/api/v1/conservation",
    tag = "jobs",
    responses(
        (status = 200, description = "One account per provider", body = Vec<ProviderReconciliation>),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub(super) async fn show(State(state): State<OpsState>) -> Response {
    match state.upkeep.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await {
        Ok(accounts) => {
            JsonResponse(accounts.into_iter().map(ProviderReconciliation::from).collect::<Vec<_>>()).into_response()
        }
        Err(error) => {
            (StatusCode::SERVICE_UNAVAILABLE, JsonResponse(json!({ "error": error.to_string() }))).into_response()
        }
    }
}
