//! The handlers of settings: list the limits, pause and resume a provider, change the rate of a limit while workers
//! run.
//!
//! They do not add or remove limits; the provider file does. A rate is N/DURATION. Zero requests close the limit, and
//! "unlimited" does not exist.

use axum::Extension;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::fleet::pace::{ClearTimeOverview, MissingSource, clear_time};
use crate::ledger::provider_row::{LimitSummary, ProviderRow};
use crate::ledger::settings::InvalidRow;
use crate::ops::OpsState;
use crate::ops::change::{SettingsChangeError, set_paused, set_rate};
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse, validate_reason};

/// The configured limits of all providers.
#[derive(Debug, Serialize, ToSchema)]
pub struct LimitList {
    limits: Vec<LimitSummary>,
    /// Providers whose limits are missing above, because their rows cannot be read.
    left_out: Vec<UnreadableLimits>,
}

/// A provider whose row cannot be read.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadableLimits {
    provider: String,
    problems: Vec<String>,
}

/// The reason for a pause or a resume.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseReason {
    /// For the audit. At most 500 characters.
    because: Option<String>,
}

/// The result of a pause or a resume.
#[derive(Debug, Serialize, ToSchema)]
pub struct PauseResult {
    /// False if the provider was already paused.
    changed: bool,
}

/// A limit's new rate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RateRequest {
    /// N/DURATION, like `200/1s` or `600/1m`; `0/1s` closes the limit.
    rate: String,
    /// Only returns what would change.
    #[serde(default)]
    dry_run: bool,
    /// For the audit. At most 500 characters.
    because: Option<String>,
}

/// A limit's rate before and after.
#[derive(Debug, Serialize, ToSchema)]
pub struct RateResult {
    limit: String,
    from: String,
    to: String,
    /// False in a dry run, or if the rate is the same.
    changed: bool,
    clears: ClearTimeChange,
}

/// The clear time of the backlog before and after the change.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClearTimeChange {
    from: ClearTimeOverview,
    to: ClearTimeOverview,
}

/// The configured limits of all providers; `/api/v1/limits/{provider}` has their usage.
#[utoipa::path(
    get,
    path = "/api/v1/limits",
    tag = "providers",
    responses(
        (status = 200, description = "By provider and name", body = LimitList),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn list_limits(State(ops): State<OpsState>) -> Result<JsonResponse<LimitList>, ApiError> {
    let mut list = LimitList { limits: Vec::new(), left_out: Vec::new() };
    for row in ops.operator_context.ledger.raw_rows(None).await? {
        match row {
            Ok(row) => list.limits.extend(row.limits.iter().map(|limit| LimitSummary::from_row(&row.name, limit))),
            Err(InvalidRow { provider, problems, .. }) => list.left_out.push(UnreadableLimits { provider, problems }),
        }
    }
    Ok(JsonResponse(list))
}

/// Pauses a provider in every worker: no new request starts, and its queue keeps its messages.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/pause",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "The provider is paused; workers follow within 2 s", body = PauseResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn pause(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<PauseReason>,
) -> Result<JsonResponse<PauseResult>, ApiError> {
    pause_or_resume(&ops, name, true, &caller, asked).await
}

/// Resumes a provider in every worker, and lifts waits that it asked for.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/resume",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "Resumed, and its waits lifted; workers follow within 2 s", body = PauseResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn resume(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<PauseReason>,
) -> Result<JsonResponse<PauseResult>, ApiError> {
    pause_or_resume(&ops, name, false, &caller, asked).await
}

async fn pause_or_resume(
    ops: &OpsState,
    name: String,
    paused: bool,
    caller: &ApiCaller,
    asked: PauseReason,
) -> Result<JsonResponse<PauseResult>, ApiError> {
    let by = actor(caller, validate_reason(asked.because)?);
    let changed = set_paused(&ops.operator_context.ledger, &parse_provider_name(name)?, paused, Some(&by)).await?;
    Ok(JsonResponse(PauseResult { changed }))
}

/// Changes a limit's rate; it takes effect in every worker within 2 s, and recorded usage stays.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/limits/{limit}",
    tag = "providers",
    params(
        ("name" = String, Path, description = "The provider's name"),
        ("limit" = String, Path, description = "The limit's name"),
    ),
    request_body = RateRequest,
    responses(
        (status = 200, description = "Changed, or what would change", body = RateResult),
        (status = 400, description = "A field is invalid", body = ErrorBody),
        (status = 404, description = "There is no such provider or limit", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is unavailable", body = ErrorBody),
    )
)]
pub async fn set_limit(
    State(ops): State<OpsState>,
    Path((name, limit)): Path<(String, String)>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<RateRequest>,
) -> Result<JsonResponse<RateResult>, ApiError> {
    let by = actor(&caller, validate_reason(asked.because)?);
    let rate = Rate::parse_limit(&asked.rate).map_err(|why| ApiError::bad_request(format!("`rate`: {why}")))?;
    let name = parse_provider_name(name)?;
    let ledger = &ops.operator_context.ledger;
    let input = ops.collector.input().await;
    let change = set_rate(ledger, &name, &limit, rate, asked.dry_run, Some(&by)).await?;
    let clears = |row: &ProviderRow| match row.validate(0) {
        Ok(provider) => clear_time(&input, &provider).into(),
        Err(_) => ClearTimeOverview::Unknown { missing: MissingSource::Row },
    };
    Ok(JsonResponse(RateResult {
        limit,
        from: change.rate_before.to_string(),
        to: change.rate_after.to_string(),
        changed: !asked.dry_run && change.rate_before != change.rate_after.into(),
        clears: ClearTimeChange { from: clears(&change.row_before), to: clears(&change.row_after) },
    }))
}

/// Parses the name in an address; an invalid name is an unknown provider.
fn parse_provider_name(name: String) -> Result<ProviderName, ApiError> {
    ProviderName::new(name.as_str()).map_err(|_| SettingsChangeError::NoProvider(name).into())
}
