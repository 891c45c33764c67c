//! The API for operators: it reads payments and configured limits, and changes payments, pauses and rates.
//!
//! Resolutions go through the ledger's operator interface and `worker::resend`, settings through `ops::change`. The
//! commands use the same code, so both reject the same requests and write the same audit. Payloads and request bodies
//! are never returned, only their sizes and hashes. A list returns one page.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use super::selections::{SelectionSlots, bound_selections};
use crate::domain::job::JobId;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobDetails, LIST_MAX, ResolutionRefusal};
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod accounts;
pub mod batches;
#[cfg(test)]
mod batches_tests;
pub mod changes;
#[cfg(test)]
mod limit_tests;
pub mod lists;
#[cfg(test)]
mod lists_tests;
pub mod pause_all;
pub mod rejected;
#[cfg(test)]
pub mod tests;

/// Name of this program in the audit.
const PROGRAM: &str = "sluicegate ops";
const PAGE_SIZE: u32 = 50;
const DEAD: &str = "dead";

/// The services that an operator's decisions need.
#[derive(Clone)]
pub struct OperatorContext {
    pub ledger: Database,
    /// `None`: there is no broker.
    pub queue: Option<Arc<dyn Queue>>,
    pub card_numbers: CardNumbers,
}

/// The routes of this module; each is described in `ops::openapi`.
pub fn routes(slots: SelectionSlots) -> Router<OpsState> {
    let export = get(lists::export).layer(from_fn_with_state(slots.clone(), bound_selections));
    Router::new()
        .route("/api/v1/jobs", get(lists::list))
        .route("/api/v1/job-totals", get(lists::totals))
        .route("/api/v1/job-export", export)
        .route("/api/v1/jobs/{id}", get(show))
        .route("/api/v1/jobs/{id}/resolve", post(changes::resolve))
        .route("/api/v1/jobs/{id}/cancel", post(changes::cancel))
        .route("/api/v1/dlq", get(lists::list_dead))
        .route("/api/v1/dlq/{id}", get(show_dead))
        .route("/api/v1/dlq/{id}/replay", post(changes::replay))
        .route("/api/v1/dlq/{id}/discard", post(changes::discard))
        .route("/api/v1/limits", get(changes::list_limits))
        .route("/api/v1/providers/{name}/pause", post(changes::pause))
        .route("/api/v1/providers/{name}/resume", post(changes::resume))
        .route("/api/v1/providers/{name}/limits/{limit}", post(changes::set_limit))
        .merge(accounts::routes())
        .merge(batches::routes(slots))
        .merge(pause_all::routes())
        .merge(rejected::routes())
}

/// Validates how many rows a page is to have.
fn page_size(limit: Option<u32>) -> Result<u32, ApiError> {
    let at_most = limit.unwrap_or(PAGE_SIZE);
    if !(1..=LIST_MAX).contains(&at_most) {
        return Err(ApiError::bad_request(format!("`limit` must be 1 to {LIST_MAX}, got {at_most}")));
    }
    Ok(at_most)
}

/// Parses the id in an address; an invalid id is an unknown payment.
fn parse_job_id(id: String) -> Result<JobId, ApiError> {
    JobId::new(id).map_err(|_| ResolutionRefusal::NoSuchJob.into())
}

/// One payment: its state, its requests, its events, and its changes by operators.
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{id}",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    responses(
        (status = 200, description = "The payment", body = JobDetails),
        (status = 404, description = "There is no such payment", body = ErrorBody),
    )
)]
pub async fn show(State(ops): State<OpsState>, Path(id): Path<String>) -> Result<JsonResponse<JobDetails>, ApiError> {
    let details = ops.reads.job_details(&parse_job_id(id)?).await?;
    let details = details.ok_or(ResolutionRefusal::NoSuchJob)?;
    Ok(JsonResponse(details.seen_with(ops.operator_context.queue.is_some())))
}

/// One dead payment, as `/api/v1/jobs/{id}` shows it.
#[utoipa::path(
    get,
    path = "/api/v1/dlq/{id}",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    responses(
        (status = 200, description = "The payment", body = JobDetails),
        (status = 404, description = "There is no such payment, or it is not dead", body = ErrorBody),
    )
)]
pub async fn show_dead(ops: State<OpsState>, id: Path<String>) -> Result<JsonResponse<JobDetails>, ApiError> {
    let details = show(ops, id).await?;
    match details.0.line.state.as_str() {
        DEAD => Ok(details),
        state => Err(ApiError::not_found(format!("the payment is `{state}`, not `{DEAD}`"))),
    }
}
