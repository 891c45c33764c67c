//! Limits as they are written; pausing and resuming a provider, and changing the rate of one of its limits while everything
//! runs.
//!
//! Refuses to add or remove limits, and has no word for "unlimited": a rate is N/DURATION, and zero requests close it.

use axum::Extension;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor;
use super::body::{ApiBody, validate_reason};
use super::problem::{ApiError, ErrorBody};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::fleet::clears::{ClearTimeOverview, MissingSource, clear_time};
use crate::ledger::provider_row::{LimitSummary, ProviderRow};
use crate::ledger::settings::InvalidRow;
use crate::ops::OpsState;
use crate::ops::change::{SettingsChangeError, set_paused, set_rate};
use crate::ops::guard::ApiCaller;
use crate::ops::json::JsonResponse;

/// The limits of all providers.
#[derive(Debug, Serialize, ToSchema)]
pub struct LimitList {
    limits: Vec<LimitSummary>,
    /// Those whose limits are missing above, because their rows cannot be read.
    left_out: Vec<UnreadableLimits>,
}

/// A provider whose row cannot be read.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadableLimits {
    provider: String,
    problems: Vec<String>,
}

/// Why, if somebody says.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseReason {
    /// For the audit. At most 500 characters.
    because: Option<String>,
}

/// Whether anything was changed.
#[derive(Debug, Serialize, ToSchema)]
pub struct PauseResult {
    /// False: it was so already.
    changed: bool,
}

/// A limit's new rate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RateRequest {
    /// N/DURATION, like `200/1s` or `600/1m`; `0/1s` closes it.
    rate: String,
    /// Say what would change, and change nothing.
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
    /// False in a dry run, or when it was so already.
    changed: bool,
    clears: ClearTimeChange,
}

/// When what waits is cleared, before and after the change.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClearTimeChange {
    from: ClearTimeOverview,
    to: ClearTimeOverview,
}

/// The limits of all providers as they are written; `/api/v1/limits/{provider}` says what they have used.
#[utoipa::path(
    get,
    path = "/api/v1/limits",
    tag = "providers",
    responses(
        (status = 200, description = "By provider and name", body = LimitList),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn list_limits(State(ops): State<OpsState>) -> Result<JsonResponse<LimitList>, ApiError> {
    let mut list = LimitList { limits: Vec::new(), left_out: Vec::new() };
    for row in ops.operator_context.settings.raw_rows(None).await? {
        match row {
            Ok(row) => list.limits.extend(row.limits.iter().map(|limit| LimitSummary::from_row(&row.name, limit))),
            Err(InvalidRow { provider, problems, .. }) => list.left_out.push(UnreadableLimits { provider, problems }),
        }
    }
    Ok(JsonResponse(list))
}

/// Starts no more requests to a provider, in every worker; its queue keeps collecting.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/pause",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "It is paused; workers follow within 2 s", body = PauseResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
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

/// Starts requests to a provider again, and lifts the waits that it has named.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/resume",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "It is not paused, and no wait that it named holds; workers follow within 2 s", body = PauseResult),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
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
    let changed =
        set_paused(ops.operator_context.settings.as_ref(), &parse_provider_name(name)?, paused, Some(&by)).await?;
    Ok(JsonResponse(PauseResult { changed }))
}

/// Changes a limit's rate; in force in every worker within 2 s, consumption carried over.
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
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider or limit", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn set_limit(
    State(ops): State<OpsState>,
    Path((name, limit)): Path<(String, String)>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<RateRequest>,
) -> Result<JsonResponse<RateResult>, ApiError> {
    let by = actor(&caller, validate_reason(asked.because)?);
    let rate: Rate = asked.rate.parse().map_err(|why| ApiError::bad_request(format!("`rate`: {why}")))?;
    let name = parse_provider_name(name)?;
    let settings = ops.operator_context.settings.as_ref();
    let evidence = ops.collector.input().await;
    let change = set_rate(settings, &name, &limit, rate, asked.dry_run, Some(&by)).await?;
    let clears = |row: &ProviderRow| match row.validate(0) {
        Ok(provider) => clear_time(&evidence, &provider).into(),
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

/// A name from an address: what can be no name names no provider.
fn parse_provider_name(name: String) -> Result<ProviderName, ApiError> {
    ProviderName::new(name.as_str()).map_err(|_| SettingsChangeError::NoProvider(name).into())
}
