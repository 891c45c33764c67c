//! Provider rows as tables show them.
//!
//! Refuses to depend on more of a row than it shows: it reads the row's serialised form, and a column left out is the
//! database's default.

use std::time::Duration;

use serde::Deserialize;

use super::CommandError;
use crate::domain::limit::Rate;
use crate::ledger::provider_row::ProviderRow;

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
    pub limits: Vec<LimitView>,
}

/// The columns of a limit that `limits list` shows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LimitView {
    pub name: String,
    max_requests: i64,
    window_ms: i64,
    #[serde(default)]
    algorithm: Option<String>,
    #[serde(default)]
    scope: Option<String>,
    #[serde(default)]
    applies_to: Option<String>,
    #[serde(default)]
    shadow: Option<bool>,
    #[serde(default)]
    enabled: Option<bool>,
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
        let limits: Vec<String> = self.limits.iter().filter(|limit| limit.is_enabled()).map(LimitView::rate).collect();
        let mode = self.mode.as_deref().unwrap_or("blocking");
        let url = self.url.as_deref().unwrap_or_default();
        vec![self.name.clone(), state.to_owned(), mode.to_owned(), limits.join(", "), url.to_owned()]
    }
}

impl LimitView {
    pub const HEADER: [&'static str; 7] = ["provider", "limit", "rate", "algorithm", "scope", "applies to", "state"];

    /// `N/DURATION`; what cannot be a rate is shown as written.
    #[must_use]
    pub fn rate(&self) -> String {
        let rate = match (u32::try_from(self.max_requests), u64::try_from(self.window_ms)) {
            (Ok(requests), Ok(window_ms)) => Rate::new(requests, Duration::from_millis(window_ms)).ok(),
            _ => None,
        };
        rate.map_or_else(|| format!("{}/{}ms", self.max_requests, self.window_ms), |rate| rate.to_string())
    }

    fn is_enabled(&self) -> bool {
        self.enabled.unwrap_or(true)
    }

    #[must_use]
    pub fn state(&self) -> &'static str {
        match (self.is_enabled(), self.shadow.unwrap_or(false), self.max_requests) {
            (false, _, _) => "disabled",
            (true, true, _) => "shadow",
            (true, false, 0) => "closed",
            (true, false, _) => "enabled",
        }
    }

    #[must_use]
    pub fn cells(&self, provider: &str) -> Vec<String> {
        let or = |text: &Option<String>, default: &str| text.as_deref().unwrap_or(default).to_owned();
        vec![
            provider.to_owned(),
            self.name.clone(),
            self.rate(),
            or(&self.algorithm, "sliding_log"),
            or(&self.scope, "provider"),
            or(&self.applies_to, "all"),
            self.state().to_owned(),
        ]
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
            let cells = view.limits[1].cells("acme");
            assert_eq!(cells, ["acme", "hour", "0/1h", "sliding_log", "account", "all", "disabled"]);
            assert_eq!(view.limits[0].state(), "enabled");
            assert_eq!(LimitView { max_requests: -1, ..view.limits[0].clone() }.rate(), "-1/1000ms");
        }
    }
}
