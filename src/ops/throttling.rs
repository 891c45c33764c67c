//! What a provider seems to allow, after repeated 429s: a sentence and a rate for the page, `check` and `provider show`.
//!
//! [`crate::domain::observed_limit`] judges the recorded requests. Nothing changes by itself: the page opens its limit
//! dialog with the rate, and an operator decides.

use std::time::Duration;

use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::limit::{Limit, Rate, Scope};
use crate::domain::observed_limit::{ObservedLimit, observe};
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// The rate that a provider seems to allow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ThrottlingHint {
    /// 429s within the last hour: the count that the overview shows.
    pub throttled: u64,
    /// In the limit grammar; `null`: no window explains the 429s.
    pub rate: Option<String>,
    pub max_requests: Option<u32>,
    pub window_ms: Option<i64>,
    /// The limit that could be set to this rate; `null`: none allows more than it.
    pub limit: Option<String>,
    /// All of it as a sentence.
    pub text: String,
}

/// The hint about one provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ThrottlingResponse {
    /// `null`: no repeated 429s.
    pub hint: Option<ThrottlingHint>,
}

impl ThrottlingHint {
    fn new(throttled: u64, observed: &ObservedLimit, provider: &Provider) -> Self {
        let rate = &observed.rate;
        let explained = match rate {
            Some(rate) => format!("the largest window without one was {rate}"),
            None => "no window of a configured limit, of 1s, 1m or 1h explains them".to_owned(),
        };
        Self {
            throttled,
            rate: rate.map(|rate| rate.to_string()),
            max_requests: rate.map(Rate::max_requests),
            window_ms: rate.and_then(Rate::window_ms),
            limit: rate.and_then(|rate| limit_above(provider, rate)),
            text: format!("{throttled} × 429 in the last hour; {explained}"),
        }
    }
}

/// The limits on all charges of a provider that count in a window.
fn charge_limits(provider: &Provider) -> impl Iterator<Item = &Limit> {
    let counts =
        |limit: &&Limit| limit.scope == Scope::Provider && limit.applies_to_every_charge() && !limit.rate.is_at_once();
    provider.limits.iter().filter(counts)
}

/// The limit whose window the rate has, or else the slowest one, if it allows more than the rate.
fn limit_above(provider: &Provider, rate: Rate) -> Option<String> {
    let per_second = |rate: Rate| f64::from(rate.max_requests()) / rate.window().as_secs_f64();
    let same = charge_limits(provider).find(|limit| limit.rate.window() == rate.window());
    let slowest = || charge_limits(provider).min_by(|a, b| per_second(a.rate).total_cmp(&per_second(b.rate)));
    let limit = same.or_else(slowest)?;
    (per_second(limit.rate) > per_second(rate)).then(|| limit.name.clone())
}

/// The hint about a provider with this row; `None`: no repeated 429s.
pub async fn throttling_hint(ledger: &Database, provider: &Provider) -> Result<Option<ThrottlingHint>, LedgerError> {
    let answered = ledger.answered_requests(&provider.name).await?;
    let windows: Vec<Duration> = charge_limits(provider).map(|limit| limit.rate.window()).collect();
    let observed = observe(&answered.requests, answered.from, answered.now, &windows);
    let Some(observed) = observed else { return Ok(None) };
    let counted = ledger.throttling(&[provider.name.as_str()]).await?;
    let throttled = counted.get(provider.name.as_str()).map_or(0, |counted| counted.requests);
    Ok(Some(ThrottlingHint::new(throttled, &observed, provider)))
}

/// What a provider seems to allow, by its 429s of the last quarter of an hour; a hint, which changes nothing.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}/throttling",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    responses(
        (status = 200, description = "The hint, if there were repeated 429s", body = ThrottlingResponse),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub async fn show(
    State(state): State<OpsState>,
    Path(name): Path<String>,
) -> Result<JsonResponse<ThrottlingResponse>, ApiError> {
    let unknown = || ApiError::not_found(format!("there is no provider `{name}`"));
    let name = ProviderName::new(name.as_str()).map_err(|_| unknown())?;
    let ledger = &state.reads;
    let row = ledger.readable_rows(Some(&name)).await?.into_iter().next().ok_or_else(unknown)?;
    // An invalid row has its own warning.
    let hint = match row.validate(0) {
        Ok(provider) => throttling_hint(ledger, &provider).await?,
        Err(_) => None,
    };
    Ok(JsonResponse(ThrottlingResponse { hint }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::provider_row::{LimitRow, ProviderRow};

    fn provider() -> Provider {
        let limit = |name: &str, max_requests, window_ms| LimitRow {
            name: name.to_owned(),
            max_requests,
            window_ms,
            ..LimitRow::default()
        };
        let row = ProviderRow {
            name: "acme".to_owned(),
            url: "https://x.test/".to_owned(),
            limits: vec![limit("second", 100, 1_000), limit("minute", 900, 60_000)],
            ..ProviderRow::default()
        };
        row.validate(1).unwrap()
    }

    #[test]
    fn hint_names_the_limit_to_lower() {
        let observed = |rate: Option<&str>| ObservedLimit { rate: rate.map(|rate| rate.parse().unwrap()) };
        for (rate, limit, text) in [
            (Some("600/1m"), Some("minute"), "34 × 429 in the last hour; the largest window without one was 600/1m"),
            (Some("40/1s"), Some("second"), "34 × 429 in the last hour; the largest window without one was 40/1s"),
            (Some("900/1m"), None, "34 × 429 in the last hour; the largest window without one was 900/1m"),
            (Some("1000/1h"), Some("minute"), "34 × 429 in the last hour; the largest window without one was 1000/1h"),
            (None, None, "34 × 429 in the last hour; no window of a configured limit, of 1s, 1m or 1h explains them"),
        ] {
            let hint = ThrottlingHint::new(34, &observed(rate), &provider());
            assert_eq!((hint.limit.as_deref(), hint.text.as_str()), (limit, text));
        }
    }
}
