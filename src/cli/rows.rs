//! Provider rows as tables show them, column by column.
//!
//! Refuses to judge: what cannot be meant is shown as written.

use serde_json::Value;

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

/// The same as JSON, with what a program counts with.
#[must_use]
pub fn limit_json(provider: &str, limit: &LimitRow) -> serde_json::Map<String, Value> {
    let words = |cell: String| if cell.is_empty() { Value::Null } else { Value::from(cell) };
    let keys = LIMIT_HEADER.map(|title| title.replace(' ', "_"));
    let mut object: serde_json::Map<String, Value> =
        keys.into_iter().zip(limit_cells(provider, limit).into_iter().map(words)).collect();
    object.insert("max_requests".to_owned(), limit.max_requests.into());
    object.insert("window_ms".to_owned(), limit.window_ms.into());
    object
}

/// Leaves out the columns in which every limit has the default, so that the others have room.
#[must_use]
pub fn without_defaults(rows: Vec<Vec<String>>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let default = |title: &str| match title {
        "algorithm" => Some("sliding_log"),
        "burst" | "offset" => Some(""),
        "scope" => Some("provider"),
        "applies to" => Some("all"),
        _ => None,
    };
    let says_something = |(index, title): &(usize, &str)| {
        default(title).is_none_or(|default| rows.iter().any(|row| row.get(*index).is_some_and(|cell| cell != default)))
    };
    let kept: Vec<(usize, &'static str)> =
        LIMIT_HEADER.into_iter().enumerate().filter(|column| says_something(column)).collect();
    let cells = |row: Vec<String>| kept.iter().filter_map(|(index, _)| row.get(*index).cloned()).collect();
    let rows = rows.into_iter().map(cells).collect();
    (kept.iter().map(|(_, title)| *title).collect(), rows)
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
        let (header, rows) = without_defaults(vec![limit_cells("acme", &limit("all", 5)), limit_cells("acme", &hour)]);
        assert_eq!(header, ["provider", "limit", "rate", "scope", "state"]);
        assert_eq!(rows[1], ["acme", "hour", "0/1s", "account", "disabled"]);
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
