//! Short descriptions of limits and account rules, and a limit as `limits list` and the API show it.
//!
//! A description has the rate, and what differs from the contract's defaults. Both are of raw rows: an invalid value is
//! shown as written.

use std::time::Duration;

use serde::Serialize;
use utoipa::ToSchema;

use super::{AccountRow, LimitRow};
use crate::domain::limit::{Algorithm, Rate};
use crate::domain::time::format_duration;
use crate::ledger::operator::DatabaseTime;

impl LimitRow {
    /// `100/1s`, `5/1h per account, token_bucket with burst 10, shadow`.
    pub fn describe(&self) -> String {
        let default = Self::default();
        let mut words = self.describe_rate();
        if self.scope != default.scope {
            words.push_str(&format!(" per {}", self.scope));
        }
        if self.applies_to != default.applies_to {
            words.push_str(&format!(" for {}s", self.applies_to));
        }
        // Without a window, the rate says it.
        if self.algorithm != default.algorithm && self.algorithm != Algorithm::Concurrency.name() {
            words.push_str(&format!(", {}", self.algorithm));
        }
        if let Some(burst) = self.burst {
            words.push_str(&format!(" with burst {burst}"));
        }
        if let Some(offset) = self.describe_offset() {
            words.push_str(&format!(" from {offset}"));
        }
        for (is_so, word) in [(self.shadow, "shadow"), (!self.enabled, "disabled")] {
            if is_so {
                words.push_str(&format!(", {word}"));
            }
        }
        words
    }

    /// `N/DURATION`, or `N at once`; an invalid rate is shown as written.
    pub fn describe_rate(&self) -> String {
        format_rate(self.max_requests, self.given_window_ms())
    }

    /// Start of fixed windows, if they do not start with the hour, minute or second of UTC.
    pub fn describe_offset(&self) -> Option<String> {
        let offset_ms = u64::try_from(self.offset_ms).ok().filter(|offset_ms| *offset_ms > 0)?;
        Some(format_duration(Duration::from_millis(offset_ms)))
    }
}

impl AccountRow {
    /// `account shop-7`, `account shop-7 at limit hourly`.
    pub fn describe_subject(&self) -> String {
        let limit = self.limit_name.as_ref().map(|name| format!(" at limit {name}")).unwrap_or_default();
        format!("account {}{limit}", self.account)
    }

    /// `exempt`, `blocked`, `limit 5/1h`, `limit 5/1h with burst 2`, `weight 3`, `limit 5/1h, weight 3`.
    pub fn describe(&self) -> String {
        let rule = self.describe_rule().map(|rule| match self.max_requests {
            Some(_) => {
                let burst = self.burst.map(|burst| format!(" with burst {burst}")).unwrap_or_default();
                format!("{} {rule}{burst}", self.rule.as_deref().unwrap_or_default())
            }
            None => rule,
        });
        let weight = (rule.is_none() || self.weight != 1).then(|| format!("weight {}", self.weight));
        [rule, weight].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// The rule as an operator writes it: `5/1h`, `blocked`; `None`: the row sets a weight alone.
    pub fn describe_rule(&self) -> Option<String> {
        let rule = self.rule.clone()?;
        Some(self.max_requests.map_or(rule, |max_requests| format_rate(max_requests, self.window_ms)))
    }
}

pub(crate) fn format_rate(max_requests: i64, window_ms: Option<i64>) -> String {
    let Some(window_ms) = window_ms else { return format!("{max_requests} at once") };
    let meant = match (u32::try_from(max_requests), u64::try_from(window_ms)) {
        (Ok(requests), Ok(window_ms)) => Rate::new(requests, Duration::from_millis(window_ms)).ok(),
        _ => None,
    };
    meant.map_or_else(|| format!("{max_requests}/{window_ms}ms"), |rate| rate.to_string())
}

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
    /// When the limit goes back by itself; `null`: it stays.
    pub until: Option<DatabaseTime>,
    /// The rate from then on, in the limit grammar.
    pub then: Option<String>,
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
            until: row.returns.map(|returns| returns.until),
            then: row.returns.map(|returns| returns.describe_rate()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::MISSING;

    use super::*;

    #[test]
    fn descriptions_omit_default_values() {
        let table = [
            (json!({}), "100/1s"),
            (json!({"max_requests": -1}), "-1/1000ms"),
            (
                json!({"scope": "account", "algorithm": "token_bucket", "burst": 10}),
                "100/1s per account, token_bucket with burst 10",
            ),
            (json!({"algorithm": "fixed_window", "offset_ms": 500}), "100/1s, fixed_window from 500ms"),
            (json!({"applies_to": "charge", "shadow": true}), "100/1s for charges, shadow"),
            (json!({"algorithm": "gcra", "enabled": false}), "100/1s, gcra, disabled"),
            (json!({"algorithm": "concurrency", "window_ms": MISSING}), "100 at once"),
            (json!({"algorithm": "concurrency", "window_ms": MISSING, "scope": "account"}), "100 at once per account"),
        ];
        for (columns, words) in table {
            let mut row = json!({"name": "all", "max_requests": 100, "window_ms": 1000});
            row.as_object_mut().unwrap().extend(columns.as_object().unwrap().clone());
            let row: LimitRow = serde_json::from_value(row).unwrap();
            assert_eq!(row.describe(), words);
        }
        let rule = |rule: Option<&str>, max_requests, weight| AccountRow {
            rule: rule.map(str::to_owned),
            max_requests,
            window_ms: max_requests.map(|_| 60_000),
            weight,
            ..AccountRow::default()
        };
        assert_eq!(rule(Some("limit"), Some(5), 1).describe(), "limit 5/1m");
        assert_eq!(rule(Some("blocked"), None, 1).describe(), "blocked");
        assert_eq!(rule(Some("limit"), Some(5), 3).describe(), "limit 5/1m, weight 3");
        assert_eq!(rule(None, None, 3).describe(), "weight 3");
        assert_eq!(rule(None, None, 1).describe(), "weight 1");
    }

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
