//! The current usage of a provider's limits, for the API and for `limits peek` on a shared store.
//!
//! Reading uses no permit. With an account, it also counts the account's payments in the lane's backlog.

use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::explain::{FlowBlock, LimitWait, NextStart, NextStartInput};
use crate::domain::format::{count, duration};
use crate::domain::limit::{AppliesTo, Rule, limit_text};
use crate::domain::names::{Identifier, InvalidName};
use crate::domain::provider::{Provider, ProviderName};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::millis_up;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BlockedFlow, FlowStatus};
use crate::ledger::database::Database;
use crate::limiter::{LimitStatus, Limiter, LimiterError};
use crate::worker::quotas::quota_spec;
use crate::worker::settings_sync::LoadedSettings;

/// The payments of an account in the backlog of the provider's lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AccountBacklog {
    pub waiting: u64,
    pub next_start: NextStartOverview,
    /// Both as a sentence.
    pub text: String,
}

/// When the account's next payment starts at the earliest. Payments of others may come first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum NextStartOverview {
    NothingWaits,
    /// Not before this time has passed; 0: now.
    StartsIn {
        ms: u64,
        /// The code of the reason to wait, and the limit that it names.
        reason: Option<String>,
        limit: Option<String>,
    },
    NotWhilePaused,
    /// A rule blocks the account.
    NotWhileBlocked,
    /// A rule refuses the account: its payments end as declined.
    Refused,
    /// The limit is 0.
    Never {
        limit: String,
    },
    /// The limit counts requests in flight.
    WhenRequestEnds {
        limit: String,
    },
}

impl From<NextStart> for NextStartOverview {
    fn from(start: NextStart) -> Self {
        match start {
            NextStart::NothingWaits => Self::NothingWaits,
            NextStart::In { wait, reason } => Self::StartsIn {
                ms: millis_up(wait),
                limit: reason.as_ref().and_then(WaitReason::limit).map(str::to_owned),
                reason: reason.map(|reason| reason.code().to_owned()),
            },
            NextStart::NotWhilePaused => Self::NotWhilePaused,
            NextStart::NotWhileBlocked => Self::NotWhileBlocked,
            NextStart::Refused => Self::Refused,
            NextStart::Never { limit } => Self::Never { limit },
            NextStart::WhenRequestEnds { limit } => Self::WhenRequestEnds { limit },
        }
    }
}

/// One limit as `/api/v1/limits/{provider}` and `limits peek --json` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeekedLimit {
    pub limit: String,
    /// The limit without the reserved share, like `100/1s` or `5 at once`.
    pub allows: String,
    pub used: u64,
    /// Permits that the limit can grant now.
    pub remaining: u64,
    /// Time until the next permit of cost 1 can start: 0 if it would be granted now; absent for a closed limit, and where
    /// a request in flight has to end first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// Time until all of the limit is free again if nothing more is sent; absent while a limit counts requests in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reset_after_ms: Option<u64>,
    /// Effects that a shadow limit would have had since its state began; absent for an enforced limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowCounts>,
}

/// Effects that a shadow limit would have had, in permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShadowCounts {
    pub would_have_refused: u64,
    pub would_have_waited: u64,
}

impl PeekedLimit {
    pub fn from_status(limit: &LimitStatus) -> Self {
        Self {
            limit: limit.name.clone(),
            allows: limit_text(limit.max_requests, limit.window),
            used: limit.used,
            remaining: limit.remaining(),
            retry_after_ms: limit.retry_after.map(millis_up),
            reset_after_ms: (limit.used == 0 || !limit.window.is_zero()).then(|| millis_up(limit.reset_after)),
            shadow: limit.shadow.then_some(ShadowCounts {
                would_have_refused: limit.would_have_refused,
                would_have_waited: limit.would_have_waited,
            }),
        }
    }
}

/// Why no limits can be shown.
#[derive(Debug, thiserror::Error)]
pub enum PeekError {
    #[error("there is no provider `{0}`")]
    NoProvider(String),
    #[error("{0} is disabled: its limits are not counted")]
    Disabled(ProviderName),
    /// No valid row was loaded before; each problem with its fix.
    #[error("the row of {provider} cannot be used: {}", .problems.join("; "))]
    Unusable { provider: ProviderName, problems: Vec<String> },
    #[error("account {0}")]
    InvalidAccount(#[from] InvalidName),
    #[error(transparent)]
    Store(#[from] LimiterError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// A provider's row, the settings of its quota, and the usage of its limits.
struct Usage<'a> {
    row: &'a Provider,
    spec: QuotaSpec,
    used: Vec<LimitStatus>,
}

/// Reads the limits of a provider; with an account, those that its jobs count against.
pub async fn peek(
    limiter: &dyn Limiter,
    known: &LoadedSettings,
    provider: &ProviderName,
    account: Option<&str>,
) -> Result<Vec<PeekedLimit>, PeekError> {
    let account = account.map(Identifier::new).transpose()?;
    let Usage { used, .. } = usage(limiter, known, provider, account.as_ref()).await?;
    Ok(used.iter().map(PeekedLimit::from_status).collect())
}

/// Counts what waits of an account in the backlog of the provider's lane, and finds when the next one starts.
pub async fn peek_backlog(
    limiter: &dyn Limiter,
    ledger: &Database,
    known: &LoadedSettings,
    provider: &ProviderName,
    account: &str,
) -> Result<AccountBacklog, PeekError> {
    let account = Identifier::new(account)?;
    let Usage { row, spec, used } = usage(limiter, known, provider, Some(&account)).await?;
    let flows = ledger.account_flows(provider, &account).await?;
    let input = next_start_input(&spec, &account, &used, &flows);
    Ok(summarise_backlog(provider, &account, &NextStartInput { paused: row.paused, ..input }))
}

async fn usage<'a>(
    limiter: &dyn Limiter,
    known: &'a LoadedSettings,
    provider: &ProviderName,
    account: Option<&Identifier>,
) -> Result<Usage<'a>, PeekError> {
    let unusable = |problems: Vec<String>| PeekError::Unusable { provider: provider.clone(), problems };
    let row = known.providers.get(provider).ok_or_else(|| {
        let invalid = known.invalid_rows.iter().find(|bad| bad.provider == provider.as_str());
        invalid.map_or_else(|| PeekError::NoProvider(provider.to_string()), |bad| unusable(bad.problems.clone()))
    })?;
    let spec = quota_spec(known, &row.quota).ok_or_else(|| match known.unknown_limits(&row.quota) {
        problems if problems.is_empty() => PeekError::Disabled(provider.clone()),
        problems => unusable(problems),
    })?;
    // Nothing is sent for a blocked account, so no limit counts it.
    let subjects = spec.subjects(account.map(Identifier::as_str), None).unwrap_or_default();
    let used = limiter.peek(&spec, subjects.first()).await?;
    Ok(Usage { row, spec, used })
}

fn next_start_input(
    spec: &QuotaSpec,
    account: &Identifier,
    used: &[LimitStatus],
    flows: &[FlowStatus],
) -> NextStartInput {
    let account = Some(account.as_str());
    let rule = match (spec.subjects(account, None), spec.refuses_charges_of(account)) {
        (Err(_), _) => Some(Rule::Blocked),
        (Ok(_), true) => Some(Rule::Refuse),
        (Ok(_), false) => None,
    };
    let for_lookups =
        |name: &str| spec.limits.iter().any(|limit| limit.name == name && limit.applies_to == AppliesTo::Lookup);
    let limits = used.iter().filter(|limit| !limit.shadow && !for_lookups(&limit.name));
    let block = |blocked: &BlockedFlow| FlowBlock { wait: blocked.wait(), left: blocked.left };
    NextStartInput {
        waiting: flows.iter().map(|flow| flow.waiting).sum(),
        paused: false,
        rule,
        blocks: flows.iter().map(|flow| flow.block().map(block)).collect(),
        limits: limits
            .map(|limit| LimitWait {
                name: limit.name.clone(),
                retry_after: limit.retry_after,
                is_closed: limit.max_requests == 0,
            })
            .collect(),
    }
}

fn summarise_backlog(provider: &ProviderName, account: &Identifier, input: &NextStartInput) -> AccountBacklog {
    let next_start = input.next_start();
    let next = match &next_start {
        NextStart::NothingWaits => String::new(),
        NextStart::In { wait, reason } => {
            let start = if wait.is_zero() { "may start now".to_owned() } else { starts_in(*wait) };
            let reason = reason.clone().map(|reason| format!(": {}", Wait::from(reason))).unwrap_or_default();
            format!("; the next {start}{reason}")
        }
        NextStart::NotWhilePaused => format!("; none starts while {provider} is paused"),
        NextStart::NotWhileBlocked => "; none starts while a rule blocks the account".to_owned(),
        NextStart::Refused => "; a rule refuses the account: they end as declined".to_owned(),
        NextStart::Never { limit } => format!("; none starts while limit {limit} is 0"),
        NextStart::WhenRequestEnds { limit } => {
            format!("; the next may start when a request in flight ends: limit {limit}")
        }
    };
    let waiting = match input.waiting {
        0 => format!("no payment of account {account} waits"),
        jobs => format!("{} of account {account} {}", count(jobs, "payment"), if jobs == 1 { "waits" } else { "wait" }),
    };
    let text = format!("{waiting} in the backlog of {provider}{next}");
    AccountBacklog { waiting: input.waiting, next_start: next_start.into(), text }
}

fn starts_in(wait: Duration) -> String {
    format!("starts in {} at the earliest", duration(wait))
}

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
        (status = 409, description = "Its row cannot be used, and no valid one is in force", body = ErrorBody),
    )
)]
pub async fn limits(
    State(state): State<OpsState>,
    Path(provider): Path<String>,
    query: Result<Query<PeekQuery>, QueryRejection>,
) -> Result<JsonResponse<Vec<PeekedLimit>>, ApiError> {
    let account = query?.0.account;
    let known = state.worker_status.borrow().settings.clone();
    let name = ProviderName::new(provider.as_str()).map_err(|_| PeekError::NoProvider(provider))?;
    let used = peek(state.limiter.as_ref(), &known, &name, account.as_deref()).await?;
    Ok(JsonResponse(used))
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
        (status = 409, description = "Its row cannot be used, and no valid one is in force", body = ErrorBody),
    )
)]
pub async fn account_backlog(
    State(state): State<OpsState>,
    Path(provider): Path<String>,
    query: Result<Query<BacklogQuery>, QueryRejection>,
) -> Result<JsonResponse<AccountBacklog>, ApiError> {
    let account = query?.0.account;
    let known = state.worker_status.borrow().settings.clone();
    let name = ProviderName::new(provider.as_str()).map_err(|_| PeekError::NoProvider(provider))?;
    let (limiter, ledger) = (state.limiter.as_ref(), &state.reads);
    let waits = peek_backlog(limiter, ledger, &known, &name, &account).await?;
    Ok(JsonResponse(waits))
}

impl From<PeekError> for ApiError {
    fn from(error: PeekError) -> Self {
        let status = match error {
            PeekError::NoProvider(_) | PeekError::Disabled(_) => StatusCode::NOT_FOUND,
            PeekError::Unusable { .. } => StatusCode::CONFLICT,
            PeekError::InvalidAccount(_) => StatusCode::BAD_REQUEST,
            PeekError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            PeekError::Ledger(error) => return error.into(),
        };
        Self(status, error.to_string())
    }
}

#[cfg(test)]
pub mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ledger::database::Database;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::limiter::embedded::EmbeddedLimiter;

    /// `plain` has no limits for accounts, `scoped` has one, `off` is disabled.
    pub fn test_settings() -> LoadedSettings {
        let limit = |name: &str, scope: &str| LimitRow {
            name: name.to_owned(),
            scope: scope.to_owned(),
            max_requests: 100,
            window_ms: 1_000,
            ..LimitRow::default()
        };
        let row = |name: &str, enabled, limits| {
            let url = "https://pay.example/".to_owned();
            let row = ProviderRow { name: name.to_owned(), url, enabled, limits, ..ProviderRow::default() };
            let provider = row.validate(1).unwrap();
            (provider.name.clone(), Arc::new(provider))
        };
        let all = limit("all", "provider");
        let providers = [
            row("plain", true, vec![all.clone()]),
            row("scoped", true, vec![all.clone(), limit("each", "account")]),
            row("off", false, vec![all]),
        ];
        LoadedSettings { version: 1, providers: providers.into(), invalid_rows: Vec::new() }
    }

    #[tokio::test]
    async fn peek_errors_name_the_problem() {
        let limiter = EmbeddedLimiter::new();
        let known = test_settings();
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let ledger = database.clone();
        let look = async |provider: &str, account: Option<&str>| {
            let provider = ProviderName::new(provider).unwrap();
            let used = peek(&limiter, &known, &provider, account).await;
            if let Some(account) = account {
                let waits = peek_backlog(&limiter, &ledger, &known, &provider, account).await;
                let failures =
                    [used.as_ref().err().map(ToString::to_string), waits.err().map(|error| error.to_string())];
                assert_eq!(failures[0], failures[1]);
            }
            used.map(|used| used.len()).map_err(|error| error.to_string())
        };
        assert_eq!(look("plain", None).await, Ok(1));
        assert_eq!((look("scoped", None).await, look("scoped", Some("a")).await), (Ok(1), Ok(2)));
        // Payments of an account wait also where no limit counts it.
        assert_eq!(look("plain", Some("a")).await, Ok(1));
        for (provider, account, problem) in [
            ("missing", None, "there is no provider `missing`"),
            ("off", None, "off is disabled: its limits are not counted"),
            ("plain", Some("a b"), "account must be 1 to 64 characters of A-Z a-z 0-9 _ -"),
        ] {
            assert_eq!(look(provider, account).await, Err(problem.to_owned()), "{provider} {account:?}");
        }
    }

    #[test]
    fn sentence_says_how_many_wait_and_when_the_next_starts() {
        let (provider, account) = (ProviderName::new("acme").unwrap(), Identifier::new("shop").unwrap());
        let limit = |retry_after, is_closed| LimitWait { name: "own".to_owned(), retry_after, is_closed };
        let free = |waiting| NextStartInput { waiting, blocks: vec![None], ..NextStartInput::default() };
        let limited =
            |retry_after, is_closed| NextStartInput { limits: vec![limit(retry_after, is_closed)], ..free(230) };
        let ms = |ms| Some(Duration::from_millis(ms));
        for (input, text) in [
            (free(0), "no payment of account shop waits in the backlog of acme"),
            (free(1), "1 payment of account shop waits in the backlog of acme; the next may start now"),
            (
                limited(ms(1_200), false),
                "230 payments of account shop wait in the backlog of acme; the next starts in 1.2 s at the earliest: waits \
                 for limit own",
            ),
            (
                NextStartInput { paused: true, ..free(2) },
                "2 payments of account shop wait in the backlog of acme; none starts while acme is paused",
            ),
            (
                NextStartInput { rule: Some(Rule::Blocked), ..free(2) },
                "2 payments of account shop wait in the backlog of acme; none starts while a rule blocks the account",
            ),
            (
                NextStartInput { rule: Some(Rule::Refuse), ..free(2) },
                "2 payments of account shop wait in the backlog of acme; a rule refuses the account: they end as declined",
            ),
            (
                limited(None, true),
                "230 payments of account shop wait in the backlog of acme; none starts while limit own is 0",
            ),
            (
                limited(None, false),
                "230 payments of account shop wait in the backlog of acme; the next may start when a request in flight \
                 ends: limit own",
            ),
        ] {
            assert_eq!(summarise_backlog(&provider, &account, &input).text, text);
        }
    }
}
