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
use crate::ledger::operator::{Actor, JobResolution};
use crate::ops::OpsState;
use crate::ops::change::{JobDecision, ResolutionKind};
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
    let resolution = kind
        .resolution(reference, ops.operator_context.card_numbers)
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

/// Changes nothing while the broker is unavailable. If the ledger has the change and the broker has no message, the
/// sweeper of this process will publish it.
async fn apply_resolution(
    context: &OperatorContext,
    id: String,
    resolution: JobResolution,
    actor: Actor,
) -> Result<Response, ApiError> {
    let id = parse_job_id(id)?;
    let (state, mut done) = (resolution.resulting_state().to_owned(), resolution.past_participle().to_owned());
    let OperatorContext { ledger, queue, card_numbers } = context;
    let (queue, card_numbers) = (queue.as_ref(), *card_numbers);
    let mut providers = Vec::new();
    let decision = if resolution.needs_resend() {
        providers.extend(provider_names(ledger).await?);
        queue.ping().await?;
        JobDecision::Resend(Resender { ledger, queue, providers: &providers, card_numbers, resolution, actor })
    } else {
        JobDecision::Record { ledger, resolution, actor }
    };
    let status = match decision.apply(&id).await {
        Ok(()) => StatusCode::OK,
        Err(missing @ ResendError::Unpublished(_)) => {
            done = missing.to_string();
            StatusCode::ACCEPTED
        }
        Err(error) => return Err(error.into()),
    };
    Ok((status, JsonResponse(ActionResult { id: id.to_string(), state, done })).into_response())
}
