//! Limits as they are written; pausing and resuming a provider, and changing the rate of one of its limits while everything
//! runs.
//!
//! Refuses to add or remove limits, and has no word for "unlimited": a rate is N/DURATION, and zero requests close it.

use axum::Extension;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::body::{Body, because};
use super::by;
use super::problem::{ErrorBody, Problem};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::fleet::clears::{Clears, Source, clear_time};
use crate::ledger::provider_row::{LimitLine, ProviderRow};
use crate::ledger::settings::BadRow;
use crate::ops::OpsState;
use crate::ops::change::{NotChanged, set_paused, set_rate};
use crate::ops::guard::Caller;
use crate::ops::json::Json;

/// The limits of all providers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Limits {
    limits: Vec<LimitLine>,
    /// Those whose limits are missing above, because their rows cannot be read.
    left_out: Vec<LeftOut>,
}

/// A provider whose row cannot be read.
#[derive(Debug, Serialize, ToSchema)]
pub struct LeftOut {
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
pub struct Changed {
    /// False: it was so already.
    changed: bool,
}

/// A limit's new rate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewRate {
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
pub struct LimitChanged {
    limit: String,
    from: String,
    to: String,
    /// False in a dry run, or when it was so already.
    changed: bool,
    clears: ClearsChange,
}

/// When what waits is cleared, before and after the change.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClearsChange {
    from: Clears,
    to: Clears,
}

/// The limits of all providers as they are written; `/api/v1/limits/{provider}` says what they have used.
#[utoipa::path(
    get,
    path = "/api/v1/limits",
    tag = "providers",
    responses(
        (status = 200, description = "By provider and name", body = Limits),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn list_limits(State(ops): State<OpsState>) -> Result<Json<Limits>, Problem> {
    let mut list = Limits { limits: Vec::new(), left_out: Vec::new() };
    for row in ops.desk.settings.written(None).await? {
        match row {
            Ok(row) => list.limits.extend(row.limits.iter().map(|limit| LimitLine::of(&row.name, limit))),
            Err(BadRow { provider, problems, .. }) => list.left_out.push(LeftOut { provider, problems }),
        }
    }
    Ok(Json(list))
}

/// Starts no more requests to a provider, in every worker; its queue keeps collecting.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/pause",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "It is paused; workers follow within 2 s", body = Changed),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn pause(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<PauseReason>,
) -> Result<Json<Changed>, Problem> {
    paused(&ops, name, true, &caller, asked).await
}

/// Starts requests to a provider again, and lifts the waits that it has named.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/resume",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    request_body = PauseReason,
    responses(
        (status = 200, description = "It is not paused, and no wait that it named holds; workers follow within 2 s", body = Changed),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn resume(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<PauseReason>,
) -> Result<Json<Changed>, Problem> {
    paused(&ops, name, false, &caller, asked).await
}

async fn paused(
    ops: &OpsState,
    name: String,
    paused: bool,
    caller: &Caller,
    asked: PauseReason,
) -> Result<Json<Changed>, Problem> {
    let by = by(caller, because(asked.because)?);
    let changed = set_paused(ops.desk.settings.as_ref(), &of_address(name)?, paused, Some(&by)).await?;
    Ok(Json(Changed { changed }))
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
    request_body = NewRate,
    responses(
        (status = 200, description = "Changed, or what would change", body = LimitChanged),
        (status = 400, description = "A field is bad", body = ErrorBody),
        (status = 404, description = "There is no such provider or limit", body = ErrorBody),
        (status = 409, description = "Refused; nothing was changed", body = ErrorBody),
        (status = 503, description = "The database is away", body = ErrorBody),
    )
)]
pub async fn set_limit(
    State(ops): State<OpsState>,
    Path((name, limit)): Path<(String, String)>,
    Extension(caller): Extension<Caller>,
    Body(asked): Body<NewRate>,
) -> Result<Json<LimitChanged>, Problem> {
    let by = by(&caller, because(asked.because)?);
    let rate: Rate = asked.rate.parse().map_err(|why| Problem::bad(format!("`rate`: {why}")))?;
    let name = of_address(name)?;
    let settings = ops.desk.settings.as_ref();
    let evidence = ops.lookout.evidence().await;
    let change = set_rate(settings, &name, &limit, rate, asked.dry_run, Some(&by)).await?;
    let clears = |row: &ProviderRow| match row.meant(0) {
        Ok(provider) => clear_time(&evidence, &provider).into(),
        Err(_) => Clears::Unknown { missing: Source::Row },
    };
    Ok(Json(LimitChanged {
        limit,
        from: change.from.to_string(),
        to: change.to.to_string(),
        changed: !asked.dry_run && change.from != change.to.into(),
        clears: ClearsChange { from: clears(&change.row_before), to: clears(&change.row_after) },
    }))
}

/// A name from an address: what can be no name names no provider.
fn of_address(name: String) -> Result<ProviderName, Problem> {
    ProviderName::new(name.as_str()).map_err(|_| NotChanged::NoProvider(name).into())
}
