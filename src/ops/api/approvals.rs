//! The API of actions that need two people: their list, and the decision of the second person.
//!
//! A gated call changes nothing and answers 202 with the id of its approval. Another person then approves or refuses it
//! here. The route needs `operator`; an approval needs the role of its action, and that is checked with the request.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::changes::{ActionResult, actor};
use super::{OperatorContext, page_size};
use crate::ledger::approvals::ApprovalState;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ops::OpsState;
use crate::ops::approval::decide::withdraw as withdraw_action;
use crate::ops::approval::decide::{Sender, approve as approve_action, find_approval, refuse as refuse_action};
use crate::ops::approval::view::{ApprovalView, ApprovalViewPage};
use crate::ops::approval::{ApprovalError, ApprovalGate, AwaitedApproval, Caller};
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse};

pub fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/approvals", get(list))
        .route("/api/v1/approvals/{id}", get(show))
        .route("/api/v1/approvals/{id}/approve", post(approve))
        .route("/api/v1/approvals/{id}/refuse", post(refuse))
        .route("/api/v1/approvals/{id}/withdraw", post(withdraw))
}

/// An action that needs a second person. Nothing was changed.
#[derive(Debug, Serialize, ToSchema)]
pub struct AwaitsApproval {
    /// The id of the approval.
    awaits_approval: String,
    /// What happens next, in words.
    text: String,
    expires_at: DatabaseTime,
}

impl AwaitsApproval {
    /// The answer to a gated call.
    pub fn response(awaited: AwaitedApproval) -> Response {
        let text = awaited.to_string();
        let body = Self { awaits_approval: awaited.id, text, expires_at: awaited.expires_at };
        (StatusCode::ACCEPTED, JsonResponse(body)).into_response()
    }
}

/// A decision that is not complete yet.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
pub enum AcceptedDecision {
    /// The payment waits in the ledger; the sweeper will publish its message.
    Unpublished(ActionResult),
    AwaitsApproval(AwaitsApproval),
}

/// The gate before an action of this caller.
pub(super) fn gate<'a>(ops: &'a OpsState, caller: &ApiCaller, actor: Actor) -> ApprovalGate<'a> {
    let caller = Caller { identity: caller.identity().clone(), actor };
    ApprovalGate { ledger: &ops.operator_context.ledger, policy: &ops.approvals, caller }
}

/// The page of a list of approvals.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ApprovalQuery {
    /// `pending`, `approved`, `refused`, `withdrawn` or `expired`.
    #[param(inline)]
    state: Option<ApprovalState>,
    /// Returns the page after this id: `next` of the page before.
    after: Option<String>,
    /// Approvals per page, 1 to 1000; default 50.
    limit: Option<u32>,
}

/// The reason for a decision about a stored action.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApprovalReason {
    /// Required with a refusal. At most 500 characters.
    because: Option<String>,
}

impl From<ApprovalError> for ApiError {
    fn from(error: ApprovalError) -> Self {
        let words = error.to_string();
        match error {
            ApprovalError::NoPerson { .. }
            | ApprovalError::SamePerson(_)
            | ApprovalError::NotRequester(_)
            | ApprovalError::RoleTooLow { .. } => Self(StatusCode::FORBIDDEN, words),
            ApprovalError::Awaited(_)
            | ApprovalError::NothingToResume
            | ApprovalError::Decided { .. }
            | ApprovalError::Refused { .. } => Self::conflict(words),
            ApprovalError::Unknown => Self::not_found(words),
            ApprovalError::NoReason => Self::bad_request(words),
            ApprovalError::Resend(error) => error.into(),
            ApprovalError::Batch(error) => error.into(),
            ApprovalError::Settings(error) => error.into(),
            ApprovalError::Queue(error) => error.into(),
            ApprovalError::Ledger(error) => error.into(),
        }
    }
}

fn deciding(caller: &ApiCaller, because: Option<String>) -> Result<Caller, ApiError> {
    Ok(Caller { identity: caller.identity().clone(), actor: actor(caller, because)? })
}

/// Actions that need two people, newest first.
#[utoipa::path(
    get,
    path = "/api/v1/approvals",
    tag = "approvals",
    params(ApprovalQuery),
    responses(
        (status = 200, description = "A page", body = ApprovalViewPage),
        (status = 400, description = "A parameter is invalid", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    Extension(caller): Extension<ApiCaller>,
    which: Result<Query<ApprovalQuery>, QueryRejection>,
) -> Result<JsonResponse<ApprovalViewPage>, ApiError> {
    let ApprovalQuery { state, after, limit } = which?.0;
    let caller = deciding(&caller, None)?;
    let page = ops.operator_context.ledger.list_approvals(state, after.as_deref(), page_size(limit)?).await?;
    let approvals = page.approvals.into_iter().map(|approval| ApprovalView::new(approval, &caller)).collect();
    Ok(JsonResponse(ApprovalViewPage { approvals, next: page.next }))
}

/// One action that needs two people.
#[utoipa::path(
    get,
    path = "/api/v1/approvals/{id}",
    tag = "approvals",
    params(("id" = String, Path, description = "The approval's id")),
    responses(
        (status = 200, description = "The approval", body = ApprovalView),
        (status = 404, description = "There is no such approval", body = ErrorBody),
    )
)]
pub async fn show(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
) -> Result<JsonResponse<ApprovalView>, ApiError> {
    let approval = find_approval(&ops.operator_context.ledger, &id).await?;
    Ok(JsonResponse(ApprovalView::new(approval, &deciding(&caller, None)?)))
}

/// Approves an action as a second person: it is executed once, under both names.
#[utoipa::path(
    post,
    path = "/api/v1/approvals/{id}/approve",
    tag = "approvals",
    params(("id" = String, Path, description = "The approval's id")),
    request_body = ApprovalReason,
    responses((status = 200, description = "Approved and executed", body = ApprovalView))
)]
pub async fn approve(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ApprovalReason>,
) -> Result<JsonResponse<ApprovalView>, ApiError> {
    let caller = deciding(&caller, asked.because)?;
    let OperatorContext { ledger, queue, card_numbers } = &ops.operator_context;
    let sender = Sender { queue: queue.as_ref(), card_numbers: *card_numbers };
    let approval = approve_action(ledger, Some(sender), &id, &caller).await?;
    Ok(JsonResponse(ApprovalView::new(approval, &caller)))
}

/// Refuses an action as a second person: nothing is changed.
#[utoipa::path(
    post,
    path = "/api/v1/approvals/{id}/refuse",
    tag = "approvals",
    params(("id" = String, Path, description = "The approval's id")),
    request_body = ApprovalReason,
    responses((status = 200, description = "Refused", body = ApprovalView))
)]
pub async fn refuse(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ApprovalReason>,
) -> Result<JsonResponse<ApprovalView>, ApiError> {
    let caller = deciding(&caller, asked.because)?;
    let approval = refuse_action(&ops.operator_context.ledger, &id, &caller).await?;
    Ok(JsonResponse(ApprovalView::new(approval, &caller)))
}

/// Withdraws an action as the person who requested it: nothing is changed.
#[utoipa::path(
    post,
    path = "/api/v1/approvals/{id}/withdraw",
    tag = "approvals",
    params(("id" = String, Path, description = "The approval's id")),
    request_body = ApprovalReason,
    responses((status = 200, description = "Withdrawn", body = ApprovalView))
)]
pub async fn withdraw(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ApprovalReason>,
) -> Result<JsonResponse<ApprovalView>, ApiError> {
    let caller = deciding(&caller, asked.because)?;
    let approval = withdraw_action(&ops.operator_context.ledger, &id, &caller).await?;
    Ok(JsonResponse(ApprovalView::new(approval, &caller)))
}
