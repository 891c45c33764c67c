//! The handlers of an operator's changes: decisions about one payment (resolve, cancel, replay, discard), and settings
//! (list the limits, pause and resume a provider, change the rate of a limit while workers run).
//!
//! They reject the same requests as the commands, with the same texts. For many payments the client sends one request
//! each, at its own rate. Limits are added and removed by the provider file only. A rate is N/DURATION. Zero requests
//! close the limit, and "unlimited" does not exist.

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{OperatorContext, PROGRAM, parse_job_id};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{Actor, Charge, JobResolution};
use crate::ledger::provider_row::{LimitReturn, LimitSummary};
use crate::ledger::settings::InvalidRow;
use crate::ops::OpsState;
use crate::ops::change::{self, JobDecision, ResolutionKind, SettingsChangeError, set_paused};
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, JsonResponse, validate_reason};
use crate::ops::limit_change::{
    ClearInstantChange, ClearTimeChange, CutoffChange, FinishChange, WantedLimit, set_limit as change_limit,
};
use crate::ops::until::Until;
use crate::worker::resend::{Resender, provider_names};

/// The actor for the audit; a blank reason counts as none.
pub(super) fn actor(caller: &ApiCaller, because: Option<String>) -> Result<Actor, ApiError> {
    Ok(Actor { os_user: caller.name(), program: Some(PROGRAM), reason: validate_reason(because)? })
}

/// An operator's decision about a payment in `review`, by the provider's records.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Resolution {
    #[serde(rename = "as")]
    kind: ResolutionKind,
    /// With `succeeded`: the provider's reference of the charge.
    reference: Option<String>,
    /// With `succeeded`: the amount that the provider charged, in minor units; default: the payment's amount.
    amount: Option<i64>,
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    because: Option<String>,
    /// The payment's id once more; required with `resend`, because the payment may be charged again.
    confirm_id: Option<String>,
}

/// The reason for a change.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ActionReason {
    /// For the audit; also in the job's reason and its outcome event. At most 500 characters.
    pub(super) because: Option<String>,
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
    )
)]
pub async fn resolve(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<Resolution>,
) -> Result<Response, ApiError> {
    let Resolution { kind, reference, amount, because: why, confirm_id } = asked;
    if confirm_id.map_or(kind == ResolutionKind::Resend, |typed| typed != id) {
        return Err(ApiError::bad_request("`confirm_id` must be the payment's id: repeat it to confirm the decision"));
    }
    let resolution = kind
        .resolution(Charge { reference, amount }, ops.operator_context.card_numbers)
        .map_err(|wrong| ApiError::bad_field(wrong.field, wrong.problem))?;
    apply_resolution(&ops.operator_context, id, resolution, actor(&caller, why)?).await
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
    )
)]
pub async fn cancel(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Cancel, actor(&caller, asked.because)?).await
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
    )
)]
pub async fn replay(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Replay, actor(&caller, asked.because)?).await
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
    )
)]
pub async fn discard(
    State(ops): State<OpsState>,
    Path(id): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ActionReason>,
) -> Result<Response, ApiError> {
    apply_resolution(&ops.operator_context, id, JobResolution::Discard, actor(&caller, asked.because)?).await
}

async fn apply_resolution(
    context: &OperatorContext,
    id: String,
    resolution: JobResolution,
    actor: Actor,
) -> Result<Response, ApiError> {
    let id = parse_job_id(id)?;
    let state = resolution.resulting_state().to_owned();
    let done = resolution.past_participle().to_owned();
    let ledger = &context.ledger;
    let mut providers = Vec::new();
    let decision = if resolution.needs_resend() {
        providers.extend(provider_names(ledger).await?);
        JobDecision::Resend(Resender { ledger, providers: &providers, resolution, actor })
    } else {
        JobDecision::Record { ledger, resolution, actor }
    };
    decision.apply(&id).await?;
    Ok(JsonResponse(ActionResult { id: id.to_string(), state, done }).into_response())
}

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
    pub(super) because: Option<String>,
}

/// The result of a pause.
#[derive(Debug, Serialize, ToSchema)]
pub struct PauseResult {
    /// False if the provider was already paused.
    changed: bool,
}

/// What a resume does besides, and the reason for it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Releases the hold of the lane: its charges start again. Needs `because`.
    #[serde(default)]
    release_hold: bool,
    /// For the audit. At most 500 characters.
    because: Option<String>,
}

/// The result of a resume.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResumeResult {
    changed: bool,
    /// Why the lane is still held, and how it is released; `null`: it is not held.
    held: Option<String>,
}

/// A limit's new rate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RateRequest {
    /// N/DURATION, like `200/1s` or `600/1m`; `0/1s` closes the limit. Absent: the present rate, with `until`: `none`.
    rate: Option<String>,
    /// A time of day (`06:00 Europe/Berlin`), an RFC 3339 instant, or `none`. Then the limit goes back to what it was.
    until: Option<String>,
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
    /// False in a dry run, or if rate and end are the same.
    changed: bool,
    /// When the limit goes back, and to which rate; `null`: it stays.
    returns: Option<ReturnOfLimit>,
    /// A planned return that this change ends.
    ended_return: Option<ReturnOfLimit>,
    clears: ClearTimeChange,
    clears_at: ClearInstantChange,
    cutoff: CutoffChange,
}

/// The return of a limit that was changed for a time.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReturnOfLimit {
    until: String,
    /// In the limit grammar.
    then: String,
}

impl From<LimitReturn> for ReturnOfLimit {
    fn from(returns: LimitReturn) -> Self {
        Self { until: returns.until.to_string(), then: returns.describe_rate() }
    }
}

/// The configured limits of all providers; `/api/v1/limits/{provider}` has their usage.
#[utoipa::path(
    get,
    path = "/api/v1/limits",
    tag = "providers",
    responses(
        (status = 200, description = "By provider and name", body = LimitList),
    )
)]
pub async fn list_limits(State(ops): State<OpsState>) -> Result<JsonResponse<LimitList>, ApiError> {
    let mut list = LimitList { limits: Vec::new(), left_out: Vec::new() };
    for row in ops.reads.raw_rows(None).await? {
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
    )
)]
pub async fn pause(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<PauseReason>,
) -> Result<JsonResponse<PauseResult>, ApiError> {
    let by = actor(&caller, asked.because)?;
    let changed = set_paused(&ops.operator_context.ledger, &parse_provider_name(name)?, true, Some(&by)).await?;
    Ok(JsonResponse(PauseResult { changed }))
}

/// Resumes a provider in every worker, and lifts waits that it asked for. A held lane stays held unless that is asked for.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/resume",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = ResumeRequest,
    responses(
        (status = 200, description = "Resumed, and its waits lifted; workers follow within 2 s", body = ResumeResult),
    )
)]
pub async fn resume(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<ResumeRequest>,
) -> Result<JsonResponse<ResumeResult>, ApiError> {
    let by = actor(&caller, asked.because)?;
    let provider = parse_provider_name(name)?;
    let held = change::resume(&ops.operator_context.ledger, &provider, asked.release_hold, &by).await?;
    Ok(JsonResponse(ResumeResult { changed: true, held: held.as_ref().map(change::still_held_text) }))
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
    )
)]
pub async fn set_limit(
    State(ops): State<OpsState>,
    Path((name, limit)): Path<(String, String)>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<RateRequest>,
) -> Result<JsonResponse<RateResult>, ApiError> {
    let by = actor(&caller, asked.because)?;
    let rate = asked.rate.as_deref().map(Rate::parse_limit).transpose();
    let rate = rate.map_err(|why| ApiError::bad_field("rate", why))?;
    let until = parse_until(asked.until.as_deref())?;
    if rate.is_none() && (asked.until.is_none() || until != Until::NoEnd) {
        let missing = "missing field `rate`: only `until` `none` keeps the present rate";
        return Err(ApiError::bad_request(missing.to_owned()));
    }
    let provider = parse_provider_name(name)?;
    let wanted = WantedLimit { provider: &provider, limit: &limit, rate, until };
    let input = ops.collector.input().await;
    let change = change_limit(&ops.operator_context.ledger, &wanted, asked.dry_run, Some(&by)).await?;
    let FinishChange { clears, clears_at, cutoff } = FinishChange::new(&input, &change);
    Ok(JsonResponse(RateResult {
        from: change.rate_before.to_string(),
        to: change.rate_after.to_string(),
        changed: !asked.dry_run && change.is_change(),
        returns: change.returns_after.map(Into::into),
        ended_return: change.ended_return().map(Into::into),
        clears,
        clears_at,
        cutoff,
        limit,
    }))
}

/// When a change ends; absent: never.
pub(super) fn parse_until(until: Option<&str>) -> Result<Until, ApiError> {
    until.map_or(Ok(Until::NoEnd), |text| text.parse().map_err(|why| ApiError::bad_field("until", why)))
}

/// Parses the name in an address; an invalid name is an unknown provider.
pub(super) fn parse_provider_name(name: String) -> Result<ProviderName, ApiError> {
    ProviderName::new(name.as_str()).map_err(|_| SettingsChangeError::NoProvider(name).into())
}
