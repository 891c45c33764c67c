//! The API for operators: it reads payments and configured limits, and changes payments, pauses and rates.
//!
//! Resolutions go through the ledger's operator interface and `worker::resend`, settings through `ops::change`. The
//! commands use the same code, so both reject the same requests and write the same audit. Payloads and request bodies
//! are never returned, only their sizes and hashes. A list returns one page.

use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use serde::Deserialize;
use utoipa::IntoParams;

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::job::{Identifier, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobDetails, JobFilter, JobPage, LIST_MAX, ResolutionRefusal, STATES};
use crate::queue::Queue;
use crate::queue::message::CardNumbers;

pub mod changes;
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
    pub queue: Arc<dyn Queue>,
    pub card_numbers: CardNumbers,
}

/// The routes of this module; each is described in `ops::openapi`.
pub fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/jobs", get(list))
        .route("/api/v1/jobs/{id}", get(show))
        .route("/api/v1/jobs/{id}/resolve", post(changes::resolve))
        .route("/api/v1/jobs/{id}/cancel", post(changes::cancel))
        .route("/api/v1/dlq", get(list_dead))
        .route("/api/v1/dlq/{id}", get(show_dead))
        .route("/api/v1/dlq/{id}/replay", post(changes::replay))
        .route("/api/v1/dlq/{id}/discard", post(changes::discard))
        .route("/api/v1/limits", get(changes::list_limits))
        .route("/api/v1/providers/{name}/pause", post(changes::pause))
        .route("/api/v1/providers/{name}/resume", post(changes::resume))
        .route("/api/v1/providers/{name}/limits/{limit}", post(changes::set_limit))
        .merge(rejected::routes())
}

/// Filters of the list of payments; a payment must match all of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct JobQuery {
    /// `waiting`, `sending`, `unknown`, `review`, `dead`, `succeeded`, `declined`, `expired` or `cancelled`.
    state: Option<String>,
    provider: Option<String>,
    /// The whole account, exactly.
    account: Option<String>,
    /// The whole id, exactly.
    id: Option<String>,
    /// Returns the page after this id: `next` of the page before.
    after: Option<String>,
    /// Payments per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

/// Filters of the list of dead payments; a payment must match all of them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeadJobQuery {
    provider: Option<String>,
    /// The whole account, exactly.
    account: Option<String>,
    /// Returns the page after this id: `next` of the page before.
    after: Option<String>,
    /// Payments per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

impl From<DeadJobQuery> for JobQuery {
    fn from(DeadJobQuery { provider, account, after, limit }: DeadJobQuery) -> Self {
        Self { state: Some(DEAD.to_owned()), provider, account, id: None, after, limit }
    }
}

impl JobQuery {
    fn validate(self) -> Result<(JobFilter, Option<JobId>, u32), ApiError> {
        let token = |field: &'static str, text: Option<String>| {
            text.map(Identifier::new).transpose().map_err(|why| ApiError::bad_request(format!("`{field}`: {why}")))
        };
        let at_most = self.limit.unwrap_or(PAGE_SIZE);
        if !(1..=LIST_MAX).contains(&at_most) {
            return Err(ApiError::bad_request(format!("`limit` must be 1 to {LIST_MAX}, got {at_most}")));
        }
        let filter = JobFilter {
            state: self.state.as_deref().map(state).transpose()?,
            provider: self.provider.as_deref().map(provider).transpose()?,
            account: token("account", self.account)?,
            id: token("id", self.id)?,
        };
        Ok((filter, token("after", self.after)?, at_most))
    }
}

fn state(text: &str) -> Result<&'static str, ApiError> {
    let known = STATES.iter().find(|state| **state == text);
    known.copied().ok_or_else(|| ApiError::bad_request(format!("`state` must be one of {}", STATES.join(", "))))
}

fn provider(text: &str) -> Result<ProviderName, ApiError> {
    ProviderName::new(text).map_err(|why| ApiError::bad_request(format!("`provider`: {why}")))
}

/// Parses the id in an address; an invalid id is an unknown payment.
fn parse_job_id(id: String) -> Result<JobId, ApiError> {
    JobId::new(id).map_err(|_| ResolutionRefusal::NoSuchJob.into())
}

/// Payments, page by page in the order of their ids.
///
/// With only `provider` in the order of their idempotency keys, which are the ids unless messages contain others.
#[utoipa::path(
    get,
    path = "/api/v1/jobs",
    tag = "jobs",
    params(JobQuery),
    responses(
        (status = 200, description = "A page", body = JobPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    which: Result<Query<JobQuery>, QueryRejection>,
) -> Result<JsonResponse<JobPage>, ApiError> {
    list_page(&ops, which?.0).await
}

async fn list_page(ops: &OpsState, which: JobQuery) -> Result<JsonResponse<JobPage>, ApiError> {
    let (filter, after, at_most) = which.validate()?;
    Ok(JsonResponse(ops.operator_context.ledger.list_jobs(&filter, after.as_ref(), at_most).await?))
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
    let details = ops.operator_context.ledger.job_details(&parse_job_id(id)?).await?;
    details.map(JsonResponse).ok_or_else(|| ResolutionRefusal::NoSuchJob.into())
}

/// Dead payments (retries exhausted, confirmed not charged), page by page in the order of their ids.
#[utoipa::path(
    get,
    path = "/api/v1/dlq",
    tag = "dlq",
    params(DeadJobQuery),
    responses(
        (status = 200, description = "A page", body = JobPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list_dead(
    State(ops): State<OpsState>,
    which: Result<Query<DeadJobQuery>, QueryRejection>,
) -> Result<JsonResponse<JobPage>, ApiError> {
    list_page(&ops, which?.0.into()).await
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
