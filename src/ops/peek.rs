//! The current usage of a provider's limits, for the API and for `limits peek` on a shared store.
//!
//! Reading uses no permit. An account must be valid, and the provider must have a limit of scope account.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::domain::job::Identifier;
use crate::domain::limit::{Scope, limit_text};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::Blocked;
use crate::domain::time::millis_up;
use crate::limiter::{LimitStatus, Limiter, LimiterError};
use crate::worker::quotas::quota_spec;
use crate::worker::settings_sync::LoadedSettings;

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
    #[must_use]
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
    /// Or its rows are invalid and no valid version was loaded before.
    #[error("no such provider, or it is disabled")]
    NoActiveProvider,
    #[error("account {0}")]
    InvalidAccount(String),
    #[error("this provider has no limit of scope account: leave the account out")]
    NoAccountLimits,
    #[error("nothing is sent for this account: a rule of this provider blocks it")]
    AccountBlocked,
    #[error("no charge is sent for this account: a rule of this quota refuses it, and its jobs end as declined")]
    AccountRefused,
    #[error(transparent)]
    Store(#[from] LimiterError),
}

/// Reads the limits of a provider; with an account, those that its jobs count against.
///
/// # Errors
/// [`PeekError`].
pub async fn peek(
    limiter: &dyn Limiter,
    known: &LoadedSettings,
    provider: &ProviderName,
    account: Option<&str>,
) -> Result<Vec<PeekedLimit>, PeekError> {
    let row = known.providers.get(provider).ok_or(PeekError::NoActiveProvider)?;
    let spec = quota_spec(known, &row.quota).ok_or(PeekError::NoActiveProvider)?;
    if let Some(account) = account {
        Identifier::new(account).map_err(PeekError::InvalidAccount)?;
        if !row.limits.iter().any(|limit| limit.scope == Scope::Account) {
            return Err(PeekError::NoAccountLimits);
        }
    }
    if spec.refuses_charges_of(account) {
        return Err(PeekError::AccountRefused);
    }
    let subjects = spec.subjects(account, None).map_err(|Blocked| PeekError::AccountBlocked)?;
    Ok(limiter.peek(&spec, subjects.first()).await?.iter().map(PeekedLimit::from_status).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::limiter::embedded::EmbeddedLimiter;

    /// `plain` has no limits for accounts, `scoped` has one, `off` is disabled.
    pub(in crate::ops) fn test_settings() -> LoadedSettings {
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
        let look = async |provider: &str, account: Option<&str>| {
            let used = peek(&limiter, &known, &ProviderName::new(provider).unwrap(), account).await;
            used.map(|used| used.len()).map_err(|error| error.to_string())
        };
        assert_eq!(look("plain", None).await, Ok(1));
        assert_eq!((look("scoped", None).await, look("scoped", Some("a")).await), (Ok(1), Ok(2)));
        for (provider, account, problem) in [
            ("missing", None, "no such provider, or it is disabled"),
            ("off", None, "no such provider, or it is disabled"),
            ("plain", Some("a"), "this provider has no limit of scope account: leave the account out"),
            ("plain", Some("a b"), "account must be 1 to 64 characters of A-Z a-z 0-9 _ -"),
        ] {
            assert_eq!(look(provider, account).await, Err(problem.to_owned()), "{provider} {account:?}");
        }
    }
}
