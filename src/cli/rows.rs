//! Provider rows as tables show them, column by column.
//!
//! Refuses to judge: what cannot be meant is shown as written.

use crate::ledger::provider_row::{LimitRow, ProviderRow};

/// Titles of [`provider_cells`].
pub const PROVIDER_HEADER: [&str; 5] = ["provider", "state", "mode", "limits", "url"];

/// One line of `provider list`.
#[must_use]
pub fn provider_cells(row: &ProviderRow) -> Vec<String> {
    let state = match (row.enabled, row.paused) {
        (false, _) => "disabled",
        (true, true) => "paused",
        (true, false) => "enabled",
    };
    let limits: Vec<String> = row.limits.iter().filter(|limit| limit.enabled).map(LimitRow::in_words).collect();
    vec![row.name.clone(), state.to_owned(), row.mode.clone(), limits.join("; "), row.url.clone()]
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
    use super::*;

    #[test]
    fn burst_and_offset_stand_only_where_they_are_set() {
        let limit = |name: &str, max_requests| LimitRow {
            name: name.to_owned(),
            max_requests,
            window_ms: 1_000,
            ..LimitRow::default()
        };
        let hour = LimitRow { scope: "account".to_owned(), enabled: false, ..limit("hour", 0) };
        assert_eq!(
            limit_cells("acme", &hour)[1..],
            ["hour", "0/1s", "sliding_log", "", "", "account", "all", "disabled"]
        );
        let bucket = LimitRow { burst: Some(7), offset_ms: 500, shadow: true, ..limit("bucket", 5) };
        assert_eq!(limit_cells("acme", &bucket)[4..], ["7", "500ms", "provider", "all", "shadow"]);
        assert_eq!(limit_cells("acme", &limit("shut", 0))[8], "closed");
        assert_eq!(limit_cells("acme", &limit("odd", -1))[2], "-1/1000ms");
        let row = ProviderRow {
            name: "acme".to_owned(),
            paused: true,
            url: "https://acme.example".to_owned(),
            limits: vec![limit("second", 100), hour],
            ..ProviderRow::default()
        };
        assert_eq!(provider_cells(&row), ["acme", "paused", "blocking", "100/1s", "https://acme.example"]);
    }
}
