//! Provider rows as tables show them.
//!
//! Refuses to depend on more of a row than it shows: it reads the row's serialised form, and a column left out is the
//! database's default.

use serde::Deserialize;

use super::CommandError;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

/// The columns of a provider that `list` shows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ProviderView {
    pub name: String,
    #[serde(default)]
    enabled: Option<bool>,
    #[serde(default)]
    paused: Option<bool>,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    url: Option<String>,
    #[serde(default, alias = "limit")]
    pub limits: Vec<LimitRow>,
}

impl ProviderView {
    /// # Errors
    /// When the row's serialised form lacks a name or a limit's numbers.
    pub fn of(row: &ProviderRow) -> Result<Self, CommandError> {
        let unreadable = |error| CommandError::Failed(format!("provider `{}` cannot be shown: {error}", row.name));
        serde_json::to_value(row).and_then(serde_json::from_value).map_err(unreadable)
    }

    pub const HEADER: [&'static str; 5] = ["provider", "state", "mode", "limits", "url"];

    #[must_use]
    pub fn cells(&self) -> Vec<String> {
        let state = match (self.enabled.unwrap_or(true), self.paused.unwrap_or(false)) {
            (false, _) => "disabled",
            (true, true) => "paused",
            (true, false) => "enabled",
        };
        let limits: Vec<String> = self.limits.iter().filter(|limit| limit.enabled).map(LimitRow::in_words).collect();
        let mode = self.mode.as_deref().unwrap_or("blocking");
        let url = self.url.as_deref().unwrap_or_default();
        vec![self.name.clone(), state.to_owned(), mode.to_owned(), limits.join("; "), url.to_owned()]
    }
}

/// Titles of [`limit_cells`].
pub const LIMIT_HEADER: [&str; 9] =
    ["provider", "limit", "rate", "algorithm", "burst", "offset", "scope", "applies to", "state"];

/// One line of `limits list`; burst and offset are empty unless set.
#[must_use]
pub fn limit_cells(provider: &str, limit: &LimitRow) -> Vec<String> {
    vec![
        provider.to_owned(),
        limit.name.clone(),
        limit.rate_in_words(),
        limit.algorithm.clone(),
        limit.burst.map(|burst| burst.to_string()).unwrap_or_default(),
        limit.offset_in_words().unwrap_or_default(),
        limit.scope.clone(),
        limit.applies_to.clone(),
        limit_state(limit).to_owned(),
    ]
}

fn limit_state(limit: &LimitRow) -> &'static str {
    match (limit.enabled, limit.shadow, limit.max_requests) {
        (false, _, _) => "disabled",
        (true, true, _) => "shadow",
        (true, false, 0) => "closed",
        (true, false, _) => "enabled",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_show_defaults_for_what_is_left_out() {
        let limits = json!([
            {"name": "second", "max_requests": 100, "window_ms": 1000},
            {"name": "hour", "max_requests": 0, "window_ms": 3_600_000, "scope": "account", "enabled": false},
        ]);
        for key in ["limit", "limits"] {
            let mut row =
                json!({"name": "acme", "paused": true, "mode": null, "url": "https://acme.example", "workers": 3});
            row[key] = limits.clone();
            let view: ProviderView = serde_json::from_value(row).unwrap();
            assert_eq!(view.cells(), ["acme", "paused", "blocking", "100/1s", "https://acme.example"]);
            let cells = limit_cells("acme", &view.limits[1]);
            assert_eq!(cells, ["acme", "hour", "0/1h", "sliding_log", "", "", "account", "all", "disabled"]);
            let bucket = LimitRow { burst: Some(7), offset_ms: 500, shadow: true, ..view.limits[0].clone() };
            let cells = limit_cells("acme", &bucket);
            assert_eq!(cells[4..], ["7", "500ms", "provider", "all", "shadow"]);
            let odd = LimitRow { max_requests: -1, ..view.limits[0].clone() };
            assert_eq!(limit_cells("acme", &odd)[2], "-1/1000ms");
            assert_eq!(limit_cells("acme", &odd)[8], "enabled");
        }
    }
}
