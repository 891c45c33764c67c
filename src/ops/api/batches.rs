//! The API of decisions in bulk: a preview, a confirmed batch, its progress and report, and its stop.
//!
//! A confirmation repeats the selection with the digest of its preview. A set that has changed since is a conflict, and
//! nothing is written. Workers apply batches, so the answer to a confirmation comes before the first change.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::changes::{ActionReason, actor};
use super::page_size;
use crate::ledger::decision_batches::{
    BatchDecision, BatchJobPage, BatchPage, BatchRate, BatchSummary, DEFAULT_RATE, OutcomeFilter,
};
use crate::ops::OpsState;
use crate::ops::batch::{BatchError, BatchPreview, Confirmation, Selection, find_batch, prepare_batch, stop_batch};
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse, LargeBody};
use crate::ops::selections::{SelectionSlots, bound_selections};

pub fn routes(slots: SelectionSlots) -> Router<OpsState> {
    let bound = from_fn_with_state(slots, bound_selections);
    Router::new()
        .route("/api/v1/batches", get(list).merge(post(begin).layer(bound.clone())))
        .route("/api/v1/batches/preview", post(preview).layer(bound))
        .route("/api/v1/batches/{id}", get(show))
        .route("/api/v1/batches/{id}/jobs", get(jobs))
        .route("/api/v1/batches/{id}/stop", post(stop))
}

/// A decision about many payments, not confirmed.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PreviewRequest {
    decision: BatchDecision,
    selection: Selection,
}

/// A confirmed decision about many payments.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    decision: BatchDecision,
    selection: Selection,
    /// That of the preview.
    digest: String,
    /// N/DURATION, between `1/1h` and `1000/1s`; default `50/1s`.
    rate: Option<String>,
    /// For the audit; also in each job's reason and its outcome event. At most 500 characters.
    because: String,
    /// The number of payments of the preview; required with `resend`.
    confirm_jobs: Option<u64>,
}

/// The page of a list of batches.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct BatchQuery {
    /// Returns the page after this id: `next` of the page before.
    after: Option<String>,
    /// Batches per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

/// The page of a list of a batch's payments.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct BatchJobQuery {
    /// `pending`, `applied` or `refused`.
    #[param(inline)]
    outcome: Option<OutcomeFilter>,
    /// Returns the page after this number: `next` of the page before.
    after: Option<u64>,
    /// Payments per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

impl From<BatchError> for ApiError {
    fn from(error: BatchError) -> Self {
        match error {
            BatchError::NoSelection
            | BatchError::Ids(_)
            | BatchError::Filter(_)
            | BatchError::TooMany(_)
            | BatchError::WrongCount(_) => Self::bad_request(error.to_string()),
            BatchError::Changed | BatchError::Empty | BatchError::Running(_) | BatchError::Ended { .. } => {
                Self::conflict(error.to_string())
            }
            BatchError::NoSuchBatch => Self::not_found(error.to_string()),
            BatchError::Ledger(error) => error.into(),
        }
    }
}

/// What a decision about many payments would do; changes nothing.
#[utoipa::path(
    post,
    path = "/api/v1/batches/preview",
    tag = "batches",
    request_body = PreviewRequest,
    responses((status = 200, description = "Number, sums and digest", body = BatchPreview))
)]
pub async fn preview(
    State(ops): State<OpsState>,
    LargeBody(asked): LargeBody<PreviewRequest>,
) -> Result<JsonResponse<BatchPreview>, ApiError> {
    Ok(JsonResponse(prepare_batch(&ops.reads, asked.decision, asked.selection).await?.preview))
}

/// Begins a decision about many payments, if they are those of the preview.
#[utoipa::path(
    post,
    path = "/api/v1/batches",
    tag = "batches",
    request_body = BatchRequest,
    responses((status = 201, description = "Started; workers apply it", body = BatchSummary))
)]
pub async fn begin(
    State(ops): State<OpsState>,
    Extension(caller): Extension<ApiCaller>,
    LargeBody(asked): LargeBody<BatchRequest>,
) -> Result<Response, ApiError> {
    let BatchRequest { decision, selection, digest, rate, because, confirm_jobs } = asked;
    let rate =
        BatchRate::parse(rate.as_deref().unwrap_or(DEFAULT_RATE)).map_err(|why| ApiError::bad_field("rate", why))?;
    let by = actor(&caller, Some(because))?;
    if by.reason.is_none() {
        return Err(ApiError::bad_request("`because`: is empty: write a reason for the audit"));
    }
    let ledger = &ops.operator_context.ledger;
    let confirmed = Confirmation { digest, jobs: confirm_jobs, rate, by };
    let batch = prepare_batch(ledger, decision, selection).await?.begin(ledger, confirmed).await?;
    Ok((StatusCode::CREATED, JsonResponse(batch)).into_response())
}

/// Decisions about many payments, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/batches",
    tag = "batches",
    params(BatchQuery),
    responses(
        (status = 200, description = "A page", body = BatchPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    which: Result<Query<BatchQuery>, QueryRejection>,
) -> Result<JsonResponse<BatchPage>, ApiError> {
    let BatchQuery { after, limit } = which?.0;
    Ok(JsonResponse(ops.reads.list_batches(after.as_deref(), page_size(limit)?).await?))
}

/// One decision about many payments: its progress and its report.
#[utoipa::path(
    get,
    path = "/api/v1/batches/{id}",
    tag = "batches",
    params(("id" = String, Path, description = "The batch's id")),
    responses(
        (status = 200, description = "The batch", body = BatchSummary),
        (status = 404, description = "There is no such batch", body = ErrorBody),
    )
)]
pub async fn show(State(ops): State<OpsState>, Path(id): Path<String>) -> Result<JsonResponse<BatchSummary>, ApiError> {
    Ok(JsonResponse(find_batch(&ops.reads, &id).await?))
}

/// The payments of a batch, in the order of their turns, each with its outcome.
#[utoipa::path(
    get,
    path = "/api/v1/batches/{id}/jobs",
    tag = "batches",
    params(("id" = String, Path, description = "The batch's id"), BatchJobQuery),
    responses(
        (status = 200, description = "A page", body = BatchJobPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
        (status = 404, description = "There is no such batch", body = ErrorBody),
    )
)]
pub async fn jobs(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    which: Result<Query<BatchJobQuery>, QueryRejection>,
) -> Result<JsonResponse<BatchJobPage>, ApiError> {
    let BatchJobQuery { outcome, after, limit } = which?.0;
    let at_most = page_size(limit)?;
    let batch = find_batch(&ops.reads, &id).await?;
    Ok(JsonResponse(ops.reads.batch_jobs(&batch.id, outcome, after.unwrap_or_default(), at_most).await?))
}

/// Stops a batch: no further payment is decided. What was applied stays applied.
#[utoipa::path(
    post,
    path = "/api/v1/batches/{id}/stop",
    tag = "batches",
    params(("id" = String, Path, description = "The batch's id")),
    request_body = ActionReason,
    responses((status = 200, description = "Stopped", body = BatchSummary))
)]
pub async fn stop(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<JsonResponse<BatchSummary>, ApiError> {
    let by = actor(&caller, asked.because)?;
    Ok(JsonResponse(stop_batch(&ops.operator_context.ledger, &id, &by).await?))
}
