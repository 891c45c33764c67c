//! The handler of the reconciliation endpoint: per provider, the jobs in each state, and the faults in words.
//!
//! It does not read the whole ledger: finished jobs are compared with their events only if they finished recently.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::OpsState;
use super::api::problem::ErrorBody;
use super::json::JsonResponse;
pub use crate::fleet::ProviderReconciliation;
use crate::worker::sweeper::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

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
pub(super) async fn show(State(state): State<OpsState>) -> Response {
    match state.operator_context.ledger.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await {
        Ok(accounts) => {
            JsonResponse(accounts.into_iter().map(ProviderReconciliation::from).collect::<Vec<_>>()).into_response()
        }
        Err(error) => {
            (StatusCode::SERVICE_UNAVAILABLE, JsonResponse(json!({ "error": error.to_string() }))).into_response()
        }
    }
}
