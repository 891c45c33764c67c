//! The handlers of an operator's decisions about one payment: resolve, cancel, replay and discard.
//!
//! They reject the same requests as the commands, with the same texts. For many payments the client sends one request
//! each, at its own rate.

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{OperatorContext, actor, parse_job_id};
use crate::domain::job::JobId;
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, JobResolution};
use crate::ops::OpsState;
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse, validate_reason};
use crate::worker::resend::{ResendError, Resender, provider_names};

/// An operator's decision about a payment in `review`, by the provider's records.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resolution {
    #[serde(rename = "as")]
    kind: ResolutionKind,
    /// With `succeeded`: the provider's reference of the charge.
    reference: Option<String>,
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
}

/// The kind of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResolutionKind {
    /// The payment was charged.
    Succeeded,
    /// The payment was not charged; do not retry.
    Declined,
    /// The payment is confirmed not charged: charge again with the same key and the same request, within the limits.
    Resend,
}

/// The reason for a change.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ActionReason {
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
}

/// The result of a decision.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActionResult {
    id: String,
    /// The new state.
    state: String,
    /// What was done, in words.
    done: String,
}

/// Resolves a payment in `review`: as succeeded, as declined, or to be sent again.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/resolve",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Resolution,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 202, description = "Waits in the ledger; the sweeper will publish its message", body = ActionResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "A backend is unavailable", body = ErrorBody),
    )
)]
pub async fn resolve(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<Resolution>,
) -> Result<Response, ApiError> {
    let Resolution { kind, reference, because: why } = asked;
    let resolution = match kind {
        ResolutionKind::Succeeded => JobResolution::Succeeded { reference: None },
        ResolutionKind::Declined => JobResolution::Declined,
        ResolutionKind::Resend => JobResolution::Resend,
    };
    let resolution = decision_input::with_provider_reference(resolution, reference, ops.operator_context.card_numbers)
        .map_err(|why| ApiError::bad_request(format!("`reference`: {why}")))?;
    apply_resolution(&ops.operator_context, id, resolution, actor(&caller, validate_reason(why)?)).await
}

/// Cancels a payment that is `waiting`; a request in flight is not cancelled.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/cancel",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn cancel(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Cancel, actor(&caller, validate_reason(asked.because)?))
        .await
}

/// Retries a dead payment with the same key and the same request; its attempts start from zero, and the limits apply.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/replay",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 202, description = "Waits in the ledger; the sweeper will publish its message", body = ActionResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "A backend is unavailable", body = ErrorBody),
    )
)]
pub async fn replay(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Replay, actor(&caller, validate_reason(asked.because)?))
        .await
}

/// Discards a dead payment for good: it becomes `cancelled`.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/discard",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn discard(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Discard, actor(&caller, validate_reason(asked.because)?))
        .await
}

async fn apply_resolution(
    context: &OperatorContext,
    id: String,
    resolution: JobResolution,
    by: Actor,
) -> Result<Response, ApiError> {
    let id = parse_job_id(id)?;
    let (state, mut done) = (resolution.resulting_state().to_owned(), resolution.past_participle().to_owned());
    let mut status = StatusCode::OK;
    if resolution.needs_resend() {
        if let Some(missing) = resend(context, &id, resolution, by).await? {
            (status, done) = (StatusCode::ACCEPTED, missing);
        }
    } else {
        context.ledger.resolve_job(&id, &resolution, None, &by).await?;
    }
    Ok((status, JsonResponse(ActionResult { id: id.to_string(), state, done })).into_response())
}

/// Changes nothing while the broker is unavailable. Returns what is missing if the ledger has the change and the broker
/// has no message: the sweeper of this process will publish it.
async fn resend(
    context: &OperatorContext,
    id: &JobId,
    resolution: JobResolution,
    by: Actor,
) -> Result<Option<String>, ApiError> {
    let OperatorContext { ledger, queue, card_numbers } = context;
    let providers = provider_names(ledger).await?;
    queue.ping().await?;
    let queue = queue.as_ref();
    let sender = Resender { ledger, queue, providers: &providers, card_numbers: *card_numbers, resolution, actor: by };
    match sender.send(id).await {
        Ok(()) => Ok(None),
        Err(unpublished @ ResendError::Unpublished(_)) => Ok(Some(unpublished.to_string())),
        Err(error) => Err(error.into()),
    }
}
