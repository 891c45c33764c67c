//! Provider rows and limits as table cells, a row as a provider file, and the accounts that wait for a provider.
//!
//! The cells show a row as written, also an invalid one. In the file every hidden character is escaped:
//! the TOML library may write strings without escapes, so hidden characters become marks first, and escapes then.
//! `provider flows` shows what `/api/v1/providers/{name}/flows` does, and needs no running process.
//! Payments that a worker has taken, and those in the queue, are not among them.

use serde::Serialize;
use toml::Value;

use crate::cli::{CommandError, Console, Exit};
use crate::domain::format::{count, instant};
use crate::domain::printable::is_hidden;
use crate::domain::printable::redact_url;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::backlog::{BlockedReason, FlowReport, LaneFlows};
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::{LimitRow, LimitSummary, ProviderRow, RedactedRow};
use crate::ops::flows::{FLOWS_DEFAULT, FlowsResponse};

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
pub const LIMIT_HEADER: [&str; 11] =
    ["provider", "limit", "rate", "algorithm", "burst", "offset", "scope", "applies to", "state", "until", "then"];

/// One line of `limits list`; burst, offset and return are empty unless set.
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
        line.until.map(|until| until.to_string()).unwrap_or_default(),
        line.then.clone().unwrap_or_default(),
    ]
}

/// Leaves out the columns in which every limit has the default, so that the others have room.
pub fn drop_default_columns(rows: Vec<Vec<String>>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let default = |title: &str| match title {
        "algorithm" => Some("sliding_log"),
        "burst" | "offset" | "until" | "then" => Some(""),
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

const FLOW_HEADER: [&str; 7] = ["account", "priority", "waiting", "weight", "share", "blocked until", "reason"];

#[derive(Debug, clap::Args)]
pub struct FlowsArgs {
    pub name: String,
    /// Most flows that are listed.
    #[arg(long, value_name = "N", default_value_t = FLOWS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists the flows of a provider that have waiting payments.
pub async fn list_flows(
    ledger: &Database,
    name: &ProviderName,
    FlowsArgs { limit, json, .. }: &FlowsArgs,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let lane = ledger.largest_flows(name, *limit).await?;
    if *json {
        console.json(&FlowsResponse::from(&lane))?;
    } else if lane.largest.is_empty() {
        console.message(&format!("no payment of {name} waits in the ledger's backlog"))?;
    } else {
        console.table(&FLOW_HEADER, &lane.largest.iter().map(flow_cells).collect::<Vec<_>>())?;
        if let Some(rest) = left_out(&lane) {
            console.message(&rest)?;
        }
    }
    Ok(Exit::Success)
}

fn flow_cells(flow: &FlowReport) -> Vec<String> {
    let status = &flow.status;
    let block = status.block().zip(flow.blocked_until);
    let until = block.map(|(block, DatabaseTime(until))| {
        if block.reason == BlockedReason::AccountBlocked {
            return "the rule ends".to_owned();
        }
        let left_ms = i64::try_from(block.left.as_millis()).unwrap_or(i64::MAX);
        instant(EpochMs(until), EpochMs(until.saturating_sub(left_ms)))
    });
    vec![
        status.account.as_ref().map_or_else(|| "no account".to_owned(), |account| account.to_string()),
        status.class.priority().map_or_else(|| "outcome unknown".to_owned(), |priority| priority.to_string()),
        status.waiting.to_string(),
        flow.weight.to_string(),
        flow.share().map(percent).unwrap_or_default(),
        until.unwrap_or_default(),
        block.map(|(block, _)| block.wait().to_string()).unwrap_or_default(),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// What the list leaves out, if anything.
fn left_out(lane: &LaneFlows) -> Option<String> {
    let listed = lane.largest.len() as u64;
    let waiting: u64 = lane.largest.iter().map(|flow| flow.status.waiting).sum();
    let others = lane.flows.saturating_sub(listed);
    (others > 0).then(|| {
        format!(
            "{} with {} not listed: `--limit N` lists more",
            count(others, "more flow"),
            count(lane.waiting.saturating_sub(waiting), "waiting payment")
        )
    })
}

/// Begins a mark: this noncharacter and the six digits of a code point. No text contains it.
const MARK: char = '\u{10ffff}';
const MARK_DIGITS: usize = 6;

#[derive(Serialize)]
struct ExportedFile<'a> {
    provider: &'a [&'a RedactedRow],
}

/// The file, in the form that `provider apply` reads.
pub fn to_provider_file(row: &RedactedRow) -> Result<String, CommandError> {
    let file = ExportedFile { provider: &[row] };
    let failed = |error: toml::ser::Error| CommandError::Failed(format!("the row cannot be shown as TOML: {error}"));
    let plain = toml::to_string_pretty(&file).map_err(failed)?;
    let layout_alone = |c: char| c == '\n' || !is_hidden(c);
    if plain.chars().all(layout_alone) && !plain.contains("\"\"\"") && !plain.contains("'''") {
        return Ok(plain.trim_end().to_owned());
    }
    let marked = toml::to_string_pretty(&mark_hidden_in(Value::try_from(&file).map_err(failed)?)).map_err(failed)?;
    Ok(marks_to_escapes(marked.trim_end()))
}

fn mark_hidden_in(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(mark_hidden(text)),
        Value::Array(values) => Value::Array(values.into_iter().map(mark_hidden_in).collect()),
        Value::Table(table) => {
            Value::Table(table.into_iter().map(|(key, value)| (mark_hidden(key), mark_hidden_in(value))).collect())
        }
        value => value,
    }
}

/// Marks quotes and backslashes too, so that the library uses quotes that allow escapes.
fn mark_hidden(text: String) -> String {
    if !text.chars().any(is_hidden) {
        return text;
    }
    let marked = |c: char| match c {
        c if is_hidden(c) || matches!(c, '"' | '\\' | MARK) => format!("{MARK}{:0MARK_DIGITS$x}", u32::from(c)),
        c => c.to_string(),
    };
    text.chars().map(marked).collect()
}

/// <https://toml.io/en/v1.0.0#string>: `\UXXXXXXXX`.
fn marks_to_escapes(marked: &str) -> String {
    marked.replace(MARK, "\\U00")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    use crate::ledger::provider_row::{LimitReturn, ProviderRow};

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
        assert_eq!(cells(&hour)[1..], ["hour", "0/1s", "sliding_log", "", "", "account", "all", "disabled", "", ""]);
        let bucket = LimitRow { burst: Some(7), offset_ms: 500, shadow: true, ..limit("bucket", 5) };
        assert_eq!(cells(&bucket)[4..], ["7", "500ms", "provider", "all", "shadow", "", ""]);
        let returns = LimitReturn { until: DatabaseTime(0), max_requests: 5, window_ms: Some(1_000) };
        let raised = LimitRow { returns: Some(returns), ..limit("raised", 9) };
        assert_eq!(cells(&raised)[8..], ["enabled", "1970-01-01T00:00:00.000Z", "5/1s"]);
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

    #[test]
    fn exported_row_reads_back_unchanged() {
        for text in [
            "plain",
            "two\nlines",
            "quote \" and \\ and \u{202e}",
            "it's\u{200b}\t\u{1b}[2J",
            "\u{e0041}\u{9b}\r\n",
            "'''",
        ] {
            let row: ProviderRow = serde_json::from_value(json!({
                "name": "acme", "url": "https://pay.example/", "headers": { "X-Text": text },
                "request": { "template": { "note": text, text: [text] } },
            }))
            .unwrap();
            let file = to_provider_file(&RedactedRow::from(&row)).unwrap();
            let shown = file.lines().flat_map(str::chars).all(|c| !is_hidden(c));
            assert!(shown && file.lines().count() < 60, "{file}");
            let read: toml::Table = file.parse().unwrap();
            let back: ProviderRow = read["provider"][0].clone().try_into().unwrap();
            assert_eq!(back, row, "{file}");
        }
    }
}
