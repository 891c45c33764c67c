//! What a person decides about one payment: settle it, send it again, stop it, end it.
//!
//! Refuses what the commands refuse, with their words. Many payments are decided one by one by whoever asks, at the rate
//! that was chosen there.

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::{ApiBody, validate_reason};
use super::jobs::parse_job_id;
use super::problem::{ApiError, ErrorBody};
use super::{OperatorContext, actor};
use crate::domain::job::JobId;
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, JobResolution};
use crate::ops::OpsState;
use crate::ops::guard::ApiCaller;
use crate::ops::json::JsonResponse;
use crate::worker::resend::{ResendError, Resender, provider_names};

/// What the provider's own records say of a payment in `review`.
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

/// What was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResolutionKind {
    /// It was charged.
    Succeeded,
    /// It was not charged, and shall not be.
    Declined,
    /// It was surely not charged, and shall be: same key, same request, through every gate.
    Resend,
}

/// Why, if somebody says.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ActionReason {
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
}

/// What became of a payment.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActionResult {
    id: String,
    /// What it is now.
    state: String,
    /// In words.
    done: String,
}

/// Settles a payment in `review`, or has it sent again.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/resolve",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = Resolution,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 202, description = "Waiting in the ledger; the sweeper will publish its message", body = ActionResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "An engine is away", body = ErrorBody),
    )
)]
pub async fn resolve(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<Resolution>,
) -> Result<Response, ApiError> {
    let Resolution { kind, reference, because: why } = asked;
    let verdict = match kind {
        ResolutionKind::Succeeded => JobResolution::Succeeded { reference: None },
        ResolutionKind::Declined => JobResolution::Declined,
        ResolutionKind::Resend => JobResolution::Resend,
    };
    let verdict = decision_input::with_provider_reference(verdict, reference, ops.operator_context.card_numbers)
        .map_err(|why| ApiError::bad_request(format!("`reference`: {why}")))?;
    apply_resolution(&ops.operator_context, id, verdict, actor(&caller, validate_reason(why)?)).await
}

/// Stops a payment that is `waiting`; one that is on the wire is not stopped.
#[utoipa::path(
    post,
    path = "/api/v1/jobs/{id}/cancel",
    tag = "jobs",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
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

/// Tries a dead payment again: same key, same request, counters restarted, through every gate.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/replay",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 202, description = "Waiting in the ledger; the sweeper will publish its message", body = ActionResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "An engine is away", body = ErrorBody),
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

/// Ends a dead payment for good: it becomes `cancelled`.
#[utoipa::path(
    post,
    path = "/api/v1/dlq/{id}/discard",
    tag = "dlq",
    params(("id" = String, Path, description = "The payment's id")),
    request_body = ActionReason,
    responses(
        (status = 200, description = "Done", body = ActionResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such payment", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
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
    desk: &OperatorContext,
    id: String,
    verdict: JobResolution,
    by: Actor,
) -> Result<Response, ApiError> {
    let id = parse_job_id(id)?;
    let (state, mut done) = (verdict.resulting_state().to_owned(), verdict.past_participle().to_owned());
    let mut status = StatusCode::OK;
    if verdict.needs_resend() {
        if let Some(missing) = resend(desk, &id, verdict, by).await? {
            (status, done) = (StatusCode::ACCEPTED, missing);
        }
    } else {
        desk.operator.resolve(&id, &verdict, None, &by).await??;
    }
    Ok((status, JsonResponse(ActionResult { id: id.to_string(), state, done })).into_response())
}

/// Begins nothing while the broker is away: then the ledger stays as it is. Returns what is missing where the ledger has the
/// change and the broker has no message: this process has a sweeper, which will publish it.
async fn resend(
    desk: &OperatorContext,
    id: &JobId,
    verdict: JobResolution,
    by: Actor,
) -> Result<Option<String>, ApiError> {
    let OperatorContext { operator, settings, queue, card_numbers } = desk;
    let providers = provider_names(settings.as_ref()).await?;
    queue.ping().await?;
    let (operator, queue) = (operator.as_ref(), queue.as_ref());
    let sender = Resender {
        operator,
        queue,
        providers: &providers,
        card_numbers: *card_numbers,
        resolution: verdict,
        actor: by,
    };
    match sender.send(id).await {
        Ok(()) => Ok(None),
        Err(unpublished @ ResendError::Unpublished(_)) => Ok(Some(unpublished.to_string())),
        Err(error) => Err(error.into()),
    }
}
