//! Provider rows and limits as table cells, column by column.
//!
//! The cells show a row as written, also an invalid one.

use crate::domain::printable::redact_url;
use crate::ledger::provider_row::{LimitRow, LimitSummary, ProviderRow};

/// Titles of [`provider_cells`].
pub const PROVIDER_HEADER: [&str; 5] = ["provider", "state", "mode", "limits", "url"];

/// One line of `provider list`.
pub fn provider_cells(row: &ProviderRow) -> Vec<String> {
    let state = match (row.enabled, row.paused) {
        (false, _) => "disabled",
        (true, true) => "paused",
        (true, false) => "enabled",
    };
    let limits: Vec<String> = row.limits.iter().filter(|limit| limit.enabled).map(LimitRow::describe).collect();
    vec![row.name.clone(), state.to_owned(), row.mode.clone(), limits.join("; "), redact_url(&row.url)]
}

/// Titles of [`limit_cells`].
pub const LIMIT_HEADER: [&str; 9] =
    ["provider", "limit", "rate", "algorithm", "burst", "offset", "scope", "applies to", "state"];

/// One line of `limits list`; burst and offset are empty unless set.
pub fn limit_cells(line: &LimitSummary) -> Vec<String> {
    vec![
        line.provider.clone(),
        line.limit.clone(),
        line.rate.clone(),
        line.algorithm.clone(),
        line.burst.map(|burst| burst.to_string()).unwrap_or_default(),
        line.offset.clone().unwrap_or_default(),
        line.scope.clone(),
        line.applies_to.clone(),
        line.state.to_owned(),
    ]
}

/// Leaves out the columns in which every limit has the default, so that the others have room.
pub fn drop_default_columns(rows: Vec<Vec<String>>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let default = |title: &str| match title {
        "algorithm" => Some("sliding_log"),
        "burst" | "offset" => Some(""),
        "scope" => Some("provider"),
        "applies to" => Some("all"),
        _ => None,
    };
    let is_informative = |(index, title): &(usize, &str)| {
        default(title).is_none_or(|default| rows.iter().any(|row| row.get(*index).is_some_and(|cell| cell != default)))
    };
    let kept: Vec<(usize, &'static str)> =
        LIMIT_HEADER.into_iter().enumerate().filter(|column| is_informative(column)).collect();
    let cells = |row: Vec<String>| kept.iter().filter_map(|(index, _)| row.get(*index).cloned()).collect();
    let rows = rows.into_iter().map(cells).collect();
    (kept.iter().map(|(_, title)| *title).collect(), rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_and_offset_show_only_when_set() {
        let limit = |name: &str, max_requests| LimitRow {
            name: name.to_owned(),
            max_requests,
            window_ms: 1_000,
            ..LimitRow::default()
        };
        let hour = LimitRow { scope: "account".to_owned(), enabled: false, ..limit("hour", 0) };
        let cells = |limit: &LimitRow| limit_cells(&LimitSummary::from_row("acme", limit));
        assert_eq!(cells(&hour)[1..], ["hour", "0/1s", "sliding_log", "", "", "account", "all", "disabled"]);
        let bucket = LimitRow { burst: Some(7), offset_ms: 500, shadow: true, ..limit("bucket", 5) };
        assert_eq!(cells(&bucket)[4..], ["7", "500ms", "provider", "all", "shadow"]);
        let (header, rows) = drop_default_columns(vec![cells(&limit("all", 5)), cells(&hour)]);
        assert_eq!(header, ["provider", "limit", "rate", "scope", "state"]);
        assert_eq!(rows[1], ["acme", "hour", "0/1s", "account", "disabled"]);
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
