//! The endpoints of limits in use: the usage of a provider's limits, and what waits of one of its accounts.
//!
//! They read the limiter and the ledger, and acquire no permit.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use utoipa::IntoParams;

use super::OpsState;
use super::api::problem::{ApiError, ErrorBody};
use super::json::JsonResponse;
use super::peek::{AccountBacklog, PeekError, PeekedLimit, peek, peek_backlog};
use crate::domain::provider::ProviderName;

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PeekQuery {
    /// Shows also the limits of scope account, with the usage of this account.
    account: Option<String>,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct BacklogQuery {
    account: String,
}

/// The usage of each limit of a provider; uses no permit.
#[utoipa::path(
    get,
    path = "/api/v1/limits/{provider}",
    tag = "providers",
    params(("provider" = String, Path, description = "The provider's name"), PeekQuery),
    responses(
        (status = 200, description = "Its limits", body = Vec<PeekedLimit>),
        (status = 400, description = "The account is invalid", body = ErrorBody),
        (status = 404, description = "There is no such provider, or it is disabled", body = ErrorBody),
        (status = 503, description = "The limiter is unavailable", body = ErrorBody),
    )
)]
pub async fn limits(
    State(state): State<OpsState>,
    Path(provider): Path<String>,
    query: Result<Query<PeekQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let account = query?.0.account;
    let known = state.worker_status.borrow().settings.clone();
    let name = ProviderName::new(provider).map_err(|_| PeekError::NoActiveProvider)?;
    let used = peek(state.limiter.as_ref(), &known, &name, account.as_deref()).await?;
    Ok(JsonResponse(used).into_response())
}

/// What waits of an account in the backlog of a provider's lane, and when the next payment starts at the earliest.
#[utoipa::path(
    get,
    path = "/api/v1/limits/{provider}/backlog",
    tag = "providers",
    params(("provider" = String, Path, description = "The provider's name"), BacklogQuery),
    responses(
        (status = 200, description = "The account's payments", body = AccountBacklog),
        (status = 400, description = "The account is invalid", body = ErrorBody),
        (status = 404, description = "There is no such provider, or it is disabled", body = ErrorBody),
        (status = 503, description = "The limiter is unavailable, or the database", body = ErrorBody),
    )
)]
pub async fn account_backlog(
    State(state): State<OpsState>,
    Path(provider): Path<String>,
    query: Result<Query<BacklogQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let account = query?.0.account;
    let known = state.worker_status.borrow().settings.clone();
    let name = ProviderName::new(provider).map_err(|_| PeekError::NoActiveProvider)?;
    let (limiter, ledger) = (state.limiter.as_ref(), &state.operator_context.ledger);
    let waits = peek_backlog(limiter, ledger, &known, &name, &account).await?;
    Ok(JsonResponse(waits).into_response())
}

impl From<PeekError> for ApiError {
    fn from(error: PeekError) -> Self {
        let status = match error {
            PeekError::NoActiveProvider => StatusCode::NOT_FOUND,
            PeekError::InvalidAccount(_) => StatusCode::BAD_REQUEST,
            PeekError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            PeekError::Ledger(error) => return error.into(),
        };
        Self(status, error.to_string())
    }
}
