//! The operators' settings: provider rows, their limits and account rules, raw and validated, and their audited changes.
//!
//! An invalid row becomes an [`InvalidRow`] that names each column and how to fix it. It stops only its own provider.
//!
//! Audited changes are described for operators. Values of headers, templates and URL parameters are left out: a row
//! written by SQL may hold a secret there. That they changed is shown.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value};

use super::operator::DatabaseTime;
use super::provider_row::{AccountReturn, AccountRow, LimitReturn, LimitRow, format_rate};
use crate::domain::limit::Rate;
use crate::domain::printable::{describe_url_change, redact_url};
use crate::domain::provider::{Provider, ProviderName};

pub use super::sql::account_rules::RuleWrite;
pub use super::sql::apply_file::{AppliedFile, ApplyMode, FileApplyError, HandChangeBy};
pub use super::sql::limit_returns::{LimitWrite, PlannedReturn, ReturningRow};

/// A provider whose rows are invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRow {
    pub provider: String,
    /// The row's quota: without the row's limits, no permit of this quota may be granted.
    pub quota: String,
    /// `enabled` and `paused` of the row, invalid as it is: disabling and pausing always work.
    pub enabled: bool,
    pub paused: bool,
    /// One line for each problem: column, what is wrong, and how to fix it.
    pub problems: Vec<String>,
}

/// Why limits of this quota are unknown, one line for each invalid row that may hold some. An enabled row does, unless a
/// valid one of it is kept.
pub fn unknown_limits(invalid: &[InvalidRow], quota: &ProviderName, is_kept: impl Fn(&str) -> bool) -> Vec<String> {
    let of_quota = invalid.iter().filter(|bad| bad.enabled && bad.quota == quota.as_str() && !is_kept(&bad.provider));
    let why = |bad: &InvalidRow| {
        let (name, problems) = (&bad.provider, bad.problems.join("; "));
        format!("limits of its quota `{quota}` are unknown, because the row of {name} is invalid: {problems}")
    };
    of_quota.map(why).collect()
}

/// All providers at one settings version.
#[derive(Clone, Debug, PartialEq)]
pub struct SettingsSnapshot {
    /// From one sequence that triggers increase on every change of any settings table.
    pub version: i64,
    pub providers: Vec<Result<Provider, InvalidRow>>,
}

/// One change that `apply` makes, described for the terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsChange {
    pub provider: String,
    /// `created`, `changed max_wait_ms 5000 → 8000`, `limit per-second added 100/1s`, …
    pub description: String,
}

/// A limit's rate as its row says it, valid or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRate {
    pub max_requests: i64,
    /// `None`: requests in flight.
    pub window_ms: Option<i64>,
}

impl RawRate {
    pub fn validate(self) -> Result<Rate, String> {
        let max_requests = u32::try_from(self.max_requests).map_err(|_| "max_requests is out of range".to_owned())?;
        let rate = match self.window_ms.map(u64::try_from) {
            None => Rate::at_once(max_requests),
            Some(Ok(window_ms)) => Rate::new(max_requests, Duration::from_millis(window_ms)),
            Some(Err(_)) => return Err("window_ms is out of range".to_owned()),
        };
        rate.map_err(|problem| problem.to_string())
    }
}

impl From<Rate> for RawRate {
    fn from(rate: Rate) -> Self {
        Self { max_requests: rate.max_requests().into(), window_ms: rate.window_ms() }
    }
}

impl From<&LimitRow> for RawRate {
    fn from(row: &LimitRow) -> Self {
        Self { max_requests: row.max_requests, window_ms: row.given_window_ms() }
    }
}

impl fmt::Display for RawRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_rate(self.max_requests, self.window_ms))
    }
}

/// Columns that hold JSON, with any text in it.
const REDACTED_COLUMNS: [&str; 4] = ["headers", "request", "lookup", "statuses"];
/// Shown without the values of its parameters.
const URL: &str = "url";
/// The return of a limit or a rule, described as a whole.
const RETURN_COLUMNS: [&str; 4] = ["until_at", "then_max_requests", "then_window_ms", "then_row"];
/// SQLite stores them as 0 and 1.
const BOOLEANS: [&str; 5] = ["enabled", "paused", "shadow", "only_row", "reuse_connections"];

/// One change of one row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditedChange {
    pub at: DatabaseTime,
    /// `alice@host (app)`: the operating system's user, if a command named it, and the database's.
    pub who: String,
    /// `limit per-second: max_requests 100 → 200`, `created`, `paused false → true`, …
    pub what: String,
    /// The program that the connection named (`sluicegate`, `psql`); SQLite knows none.
    pub program: Option<String>,
    /// The author's reason.
    pub because: Option<String>,
    /// The row's provider; absent for the settings version.
    pub provider: Option<String>,
    /// The columns that differ in a changed row, and all columns of a new row; without headers and templates.
    pub old: Option<Map<String, Value>>,
    pub new: Option<Map<String, Value>>,
}

/// A page of changes, newest first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditPage {
    pub changes: Vec<AuditedChange>,
    /// The number before which the next page begins; `null` at the end.
    pub next: Option<i64>,
}

impl AuditedChange {
    /// `alice@host (app) paused it at 2027-01-15T08:00:00.000Z (why)`, if the change paused its provider.
    pub fn describe_pause(&self) -> Option<String> {
        let on = |value: &Value| value.as_bool() == Some(true) || value.as_i64() == Some(1);
        let paused = self.new.as_ref()?.get("paused").is_some_and(on);
        let because = self.because.as_deref().map(|because| format!(" ({because})")).unwrap_or_default();
        paused.then(|| format!("{} paused it at {}{because}", self.who, self.at))
    }
}

/// A row of the audit, as read.
pub struct AuditRow {
    pub at: DatabaseTime,
    pub who: String,
    pub os_user: Option<String>,
    pub program: Option<String>,
    pub because: Option<String>,
    pub table_name: String,
    pub row_key: String,
    pub old_row: Option<Map<String, Value>>,
    pub new_row: Option<Map<String, Value>>,
}

impl AuditRow {
    /// Whether the change is the return or the end that its row had planned, and not a change by hand.
    pub fn is_planned_return(&self) -> bool {
        let until = |row: Option<&Map<String, Value>>| row.and_then(planned_end);
        until(self.new_row.as_ref()).is_none() && until(self.old_row.as_ref()).is_some_and(|until| self.at >= until)
    }

    /// Whether the change is one of these columns, or of any column if there are none.
    pub fn changes_any(&self, columns: &[String]) -> bool {
        let rows = [&self.old_row, &self.new_row];
        let differs = |column: &String| {
            let [old, new] = rows.map(|row| row.as_ref().and_then(|row| row.get(column)));
            old != new
        };
        columns.is_empty() || columns.iter().any(differs)
    }
}

impl From<AuditRow> for AuditedChange {
    fn from(written: AuditRow) -> Self {
        let AuditRow { at, who, os_user, program, because, table_name: table, row_key: key, .. } = written;
        let (mut old, mut new) = (written.old_row, written.new_row);
        let what = describe_change(&table, &key, old.as_ref(), new.as_ref(), at);
        if let (Some(old), Some(new)) = (&mut old, &mut new) {
            let same: BTreeSet<String> =
                old.iter().filter(|(column, value)| new.get(*column) == Some(value)).map(|(c, _)| c.clone()).collect();
            old.retain(|column, _| !same.contains(column));
            new.retain(|column, _| !same.contains(column));
        }
        for row in [&mut old, &mut new].into_iter().flatten() {
            row.retain(|column, _| !REDACTED_COLUMNS.contains(&column.as_str()));
            if let Some(Value::String(url)) = row.get_mut(URL) {
                *url = redact_url(url);
            }
            for (_, value) in row.iter_mut().filter(|(column, _)| BOOLEANS.contains(&column.as_str())) {
                if let Some(number) = value.as_i64() {
                    *value = Value::Bool(number != 0);
                }
            }
        }
        let who = match os_user {
            Some(user) => format!("{user} ({who})"),
            None => who,
        };
        let provider = (table != "settings_version").then(|| key.split('/').next().unwrap_or_default().to_owned());
        Self { at, who, what, program, because, provider, old, new }
    }
}

fn describe_change(
    table: &str,
    key: &str,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
    at: DatabaseTime,
) -> String {
    let mut parts = key.split('/').skip(1);
    let row = match (table, parts.next(), parts.next()) {
        ("provider_limits", Some(limit), _) => format!("limit {limit}"),
        ("account_overrides", Some(account), Some("*") | None) => format!("account {account}"),
        ("account_overrides", Some(account), Some(limit)) => format!("account {account}, limit {limit}"),
        ("settings_version", ..) => "settings version, after a backup".to_owned(),
        ("lane_holds", ..) => "hold".to_owned(),
        _ => String::new(),
    };
    let with_row = |text: &str| if row.is_empty() { text.to_owned() } else { format!("{row} {text}") };
    match (old, new) {
        (None, Some(new)) if table != "providers" => with_row(&format!("added, {}", describe_added(new))),
        (None, _) => with_row("created"),
        (Some(old), None) => with_row(&match planned_end(old).filter(|until| at >= *until) {
            Some(until) => format!("ended as planned for {until}"),
            None if table == "providers" => "deleted".to_owned(),
            None => "removed".to_owned(),
        }),
        (Some(old), Some(new)) => {
            let columns: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            let changes: Vec<String> = columns
                .into_iter()
                .filter(|column| old.get(*column) != new.get(*column) && !RETURN_COLUMNS.contains(&column.as_str()))
                .map(|column| describe_difference(column, old.get(column), new.get(column)))
                .chain(describe_return(old, new, at))
                .collect();
            if row.is_empty() { changes.join(", ") } else { format!("{row}: {}", changes.join(", ")) }
        }
    }
}

/// What a change says about the return of a limit or an account's rule; `None`: nothing.
fn describe_return(old: &Map<String, Value>, new: &Map<String, Value>, at: DatabaseTime) -> Option<String> {
    let columns = |row: &Map<String, Value>| RETURN_COLUMNS.map(|column| row.get(column).cloned());
    if columns(old) == columns(new) {
        return None;
    }
    match (planned_return(old), planned_return(new)) {
        (_, Some(after)) => Some(after.to_string()),
        (Some(before), None) if at >= before.until() => Some(format!("went back as planned for {}", before.until())),
        (Some(before), None) => Some(before.describe_end()),
        (None, None) => None,
    }
}

/// The return in an audited row.
enum AuditedReturn {
    Limit(LimitReturn),
    Account(AccountReturn),
}

impl AuditedReturn {
    fn until(&self) -> DatabaseTime {
        match self {
            Self::Limit(returns) => returns.until,
            Self::Account(returns) => returns.until,
        }
    }

    /// What a change says that ends it.
    fn describe_end(&self) -> String {
        let until = self.until();
        match self {
            Self::Limit(returns) => format!("no longer goes back to {} at {until}", returns.describe_rate()),
            Self::Account(returns) => format!("no longer becomes {} at {until}", returns.describe_then()),
        }
    }
}

impl fmt::Display for AuditedReturn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(returns) => returns.fmt(f),
            Self::Account(returns) => returns.fmt(f),
        }
    }
}

/// The end in an audited row. PostgreSQL writes its instant as text, SQLite in milliseconds.
fn planned_end(row: &Map<String, Value>) -> Option<DatabaseTime> {
    Some(DatabaseTime(match row.get("until_at")? {
        Value::String(text) => text.parse::<Timestamp>().ok()?.as_millisecond(),
        number => number.as_i64()?,
    }))
}

fn planned_return(row: &Map<String, Value>) -> Option<AuditedReturn> {
    let until = planned_end(row)?;
    if let Some(then) = row.get("then_row") {
        let then = serde_json::from_value::<Option<AccountRow>>(then.clone()).ok()?.map(Box::new);
        return Some(AuditedReturn::Account(AccountReturn { until, then }));
    }
    let max_requests = row.get("then_max_requests")?.as_i64()?;
    let window_ms = row.get("then_window_ms").and_then(Value::as_i64);
    Some(AuditedReturn::Limit(LimitReturn { until, max_requests, window_ms }))
}

/// Rate or rule of a new limit or account row, and its weight.
fn describe_added(row: &Map<String, Value>) -> String {
    let rule = row.get("rule").filter(|rule| !rule.is_null()).map(|rule| format_value("rule", Some(rule)));
    let weight = row.get("weight").filter(|weight| **weight != 1).map(|weight| format!("weight {weight}"));
    let until = planned_return(row).map(|returns| returns.to_string());
    let parts: Vec<String> = [describe_rate(row).or(rule), weight, until].into_iter().flatten().collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

fn describe_rate(row: &Map<String, Value>) -> Option<String> {
    let max_requests = row.get("max_requests")?.as_i64()?;
    let window_ms = match row.get("window_ms")? {
        Value::Null => None,
        window_ms => Some(window_ms.as_i64()?),
    };
    Some(format_rate(max_requests, window_ms))
}

fn describe_difference(column: &str, old: Option<&Value>, new: Option<&Value>) -> String {
    if REDACTED_COLUMNS.contains(&column) {
        return format!("{column} changed");
    }
    let (old, new) = (format_value(column, old), format_value(column, new));
    if column == URL {
        return format!("{column} {}", describe_url_change(&old, &new));
    }
    format!("{column} {old} → {new}")
}

fn format_value(column: &str, value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        Some(Value::Number(number)) if BOOLEANS.contains(&column) => (number.as_i64() != Some(0)).to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn change(table: &str, key: &str, old: Value, new: Value) -> AuditedChange {
        let row = |value: Value| value.as_object().cloned();
        let (table, key) = (table.to_owned(), key.to_owned());
        let (who, os_user) = ("app".to_owned(), Some("alice@host".to_owned()));
        AuditRow {
            at: DatabaseTime(0),
            who,
            os_user,
            program: None,
            because: None,
            table_name: table,
            row_key: key,
            old_row: row(old),
            new_row: row(new),
        }
        .into()
    }

    #[test]
    fn change_lists_only_differences() {
        let limit = |most: i64| json!({ "name": "all", "max_requests": most, "window_ms": 1_000 });
        let set = change("provider_limits", "acme/all", limit(100), limit(200));
        assert_eq!((set.what.as_str(), set.who.as_str()), ("limit all: max_requests 100 → 200", "alice@host (app)"));
        assert_eq!((set.old.unwrap().len(), set.provider.as_deref()), (1, Some("acme")));
        let what = |table: &str, key: &str, old: Value, new: Value| change(table, key, old, new).what;
        let until = |most: i64, until: Value| {
            json!({ "name": "all", "max_requests": most, "window_ms": 1_000, "until_at": until, "then_max_requests": 100,
                "then_window_ms": 1_000 })
        };
        // The audited change is at the epoch.
        let (later, over) = (json!("2026-11-28T06:00:00+00:00"), json!(-1));
        assert_eq!(
            what("provider_limits", "acme/all", limit(100), until(200, later.clone())),
            "limit all: max_requests 100 → 200, until 2026-11-28T06:00:00.000Z, then back to 100/1s"
        );
        assert_eq!(
            what("provider_limits", "acme/all", until(200, later), limit(300)),
            "limit all: max_requests 200 → 300, no longer goes back to 100/1s at 2026-11-28T06:00:00.000Z"
        );
        assert_eq!(
            what("provider_limits", "acme/all", until(200, over), limit(100)),
            "limit all: max_requests 200 → 100, went back as planned for 1969-12-31T23:59:59.999Z"
        );
        assert_eq!(what("provider_limits", "acme/all", Value::Null, limit(5)), "limit all added, 5/1s");
        assert_eq!(what("provider_limits", "acme/all", limit(5), Value::Null), "limit all removed");
        assert_eq!(what("providers", "acme", json!({ "paused": 0 }), json!({ "paused": 1 })), "paused false → true");
        let paused = change("providers", "acme", json!({ "paused": 0 }), json!({ "paused": 1 }));
        assert_eq!((&paused.old.unwrap()["paused"], &paused.new.unwrap()["paused"]), (&json!(false), &json!(true)));
        assert_eq!(what("providers", "acme", Value::Null, json!({ "name": "acme" })), "created");
        assert_eq!(what("providers", "acme", json!({ "name": "acme" }), Value::Null), "deleted");
        let rule = json!({ "rule": "blocked", "max_requests": null });
        assert_eq!(what("account_overrides", "acme/a/*", Value::Null, rule.clone()), "account a added, blocked");
        let weight = json!({ "rule": null, "max_requests": null, "window_ms": null, "weight": 3 });
        assert_eq!(what("account_overrides", "acme/a/*", Value::Null, weight), "account a added, weight 3");
        let own = json!({ "rule": "limit", "max_requests": 5, "window_ms": 1_000, "weight": 2 });
        assert_eq!(what("account_overrides", "acme/a/*", Value::Null, own), "account a added, 5/1s, weight 2");
        let exempt = json!({ "rule": "exempt", "max_requests": null });
        assert_eq!(
            what("account_overrides", "acme/a/day", rule, exempt),
            "account a, limit day: rule blocked → exempt"
        );
        let raised = change("settings_version", "version", json!({ "version": 5 }), json!({ "version": 9 }));
        assert_eq!((raised.what.as_str(), raised.provider), ("settings version, after a backup: version 5 → 9", None));
    }

    #[test]
    fn headers_and_templates_are_redacted() {
        let row = |secret: &str| json!({ "headers": { "Authorization": secret }, "request": { "t": secret } });
        let set = change("providers", "acme", row("hunter1"), row("hunter2"));
        assert_eq!(set.what, "headers changed, request changed");
        assert!(!serde_json::to_string(&set).unwrap().contains("hunter"), "{set:?}");
        let url = |secret: &str| json!({ "url": format!("https://pay.example/?sig={secret}") });
        let set = change("providers", "acme", url("hunter1"), url("hunter2"));
        assert_eq!(set.what, "url https://pay.example/?sig=… (another value of a parameter)");
        assert!(!serde_json::to_string(&set).unwrap().contains("hunter"), "{set:?}");
    }
}
