//! A limit as `limits list` and the API show it, taken from the raw row.
//!
//! An invalid value is shown as written.

use serde::Serialize;
use utoipa::ToSchema;

use super::LimitRow;

/// One limit of one provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LimitSummary {
    pub provider: String,
    pub limit: String,
    /// In the limit grammar: `100/1s`, `5 at once`.
    pub rate: String,
    pub algorithm: String,
    pub burst: Option<i64>,
    /// Start of fixed windows, as a duration: `500ms`; `null` when they start with the hour, minute or second of UTC.
    pub offset: Option<String>,
    pub scope: String,
    pub applies_to: String,
    /// `enabled`, `closed` (no request is allowed), `shadow` or `disabled`.
    #[schema(value_type = String)]
    pub state: &'static str,
    pub max_requests: i64,
    /// `null` for a limit of requests in flight.
    pub window_ms: Option<i64>,
}

impl LimitSummary {
    pub fn from_row(provider: &str, row: &LimitRow) -> Self {
        Self {
            provider: provider.to_owned(),
            limit: row.name.clone(),
            rate: row.describe_rate(),
            algorithm: row.algorithm.clone(),
            burst: row.burst,
            offset: row.describe_offset(),
            scope: row.scope.clone(),
            applies_to: row.applies_to.clone(),
            state: match (row.enabled, row.shadow, row.max_requests) {
                (false, _, _) => "disabled",
                (true, true, _) => "shadow",
                (true, false, 0) => "closed",
                (true, false, _) => "enabled",
            },
            max_requests: row.max_requests,
            window_ms: row.given_window_ms(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_line_shows_disabled_and_closed() {
        for (enabled, shadow, max_requests, state) in [
            (true, false, 5, "enabled"),
            (true, false, 0, "closed"),
            (true, true, 0, "shadow"),
            (false, true, 5, "disabled"),
        ] {
            let row = LimitRow { enabled, shadow, max_requests, ..LimitRow::default() };
            assert_eq!(LimitSummary::from_row("acme", &row).state, state);
        }
    }

    #[test]
    fn invalid_rate_is_shown_as_configured() {
        let row = LimitRow { max_requests: -1, window_ms: 1_000, ..LimitRow::default() };
        assert_eq!(LimitSummary::from_row("acme", &row).rate, "-1/1000ms");
    }
}
