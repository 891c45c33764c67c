//! A raw provider row, from the database or a provider file, with the contract's defaults.
//!
//! [`ProviderRow::validate`] checks it and returns a [`Provider`], or all problems at once.
//!
//! [`Provider`]: crate::domain::provider::Provider

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::domain::limit::Rate;

mod accounts;
mod amounts;
mod describe;
mod file;
mod file_text;
mod limit_return;
mod limits;
mod lookup;
mod merge;
mod request;
mod secrets;
mod validate;

pub use describe::LimitSummary;
pub(crate) use describe::format_rate;
pub use file::{ParsedProviderFile, parse_provider_file, read_provider_file};
pub use file_text::mark_unmentioned;
pub use limit_return::{AccountReturn, LimitReturn};
pub(crate) use merge::describe_value;
pub use merge::{HandChange, MergedRow, merge_file};
pub use secrets::RedactedRow;

/// Marks a missing number of a limit, for which the contract has no default. It is outside every allowed range, so
/// validation reports it, except for the window of a limit of requests in flight.
pub(crate) const MISSING: i64 = i64::MIN;

/// A JSON column: an object.
pub type Object = Map<String, Value>;

/// One `[[provider]]` table or row of `providers`, with its limits and accounts. The contract defines the columns.
/// Numbers are as wide as the database's, so that an invalid one can be reported instead of failing to load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderRow {
    pub name: String,
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    pub enabled: bool,
    pub paused: bool,
    /// Not a column: set for a file that does not mention `paused`, so that an existing row keeps its pause.
    #[serde(skip)]
    pub pause_unmentioned: bool,
    /// Not a column: set for a file without account rules and without `accounts = []`, so that a row keeps its rules.
    #[serde(skip)]
    pub accounts_unmentioned: bool,
    pub url: String,
    pub mode: String,
    pub slot_release: String,
    pub transit_jitter_ms: i64,
    pub pacing: String,
    pub reserve_percent: i64,
    pub store_down: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_of: Option<i64>,
    pub timeout_ms: i64,
    pub send_budget_ms: i64,
    pub connection_max_age_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse_connections: Option<bool>,
    pub workers: i64,
    pub bucket_capacity: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leak_per_second: Option<f64>,
    pub max_wait_ms: i64,
    pub max_attempts: i64,
    pub max_age_s: i64,
    pub backoff_base_ms: i64,
    pub backoff_max_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_retention_s: Option<i64>,
    pub headers: Object,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<Object>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup: Option<Object>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub statuses: Option<Object>,
    /// Codes of ISO 4217; `None`: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub currencies: Option<Vec<Value>>,
    /// Digits after the point by currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decimals: Option<Object>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount_step: Option<Object>,
    /// Fields that every message must have: `account`, `reference`.
    pub require: Vec<Value>,
    pub order: String,
    /// Time of day and time zone until which the payments of a day should be sent: `18:00 Europe/Berlin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cutoff: Option<String>,
    /// Not in files: when an operator ended the waits that the provider had named, in epoch milliseconds.
    #[serde(skip)]
    pub resumed_at: Option<i64>,
    #[serde(rename = "limit")]
    pub limits: Vec<LimitRow>,
    #[serde(rename = "account")]
    pub accounts: Vec<AccountRow>,
}

impl Default for ProviderRow {
    fn default() -> Self {
        Self {
            name: String::new(),
            kind: "http".to_owned(),
            quota: None,
            enabled: true,
            paused: false,
            pause_unmentioned: false,
            accounts_unmentioned: false,
            url: String::new(),
            mode: "blocking".to_owned(),
            slot_release: "response".to_owned(),
            transit_jitter_ms: 50,
            pacing: "burst".to_owned(),
            reserve_percent: 0,
            store_down: "wait".to_owned(),
            share_of: None,
            timeout_ms: 10_000,
            send_budget_ms: 500,
            connection_max_age_ms: 60_000,
            reuse_connections: None,
            workers: 32,
            bucket_capacity: 256,
            leak_per_second: None,
            max_wait_ms: 5_000,
            max_attempts: 8,
            max_age_s: 259_200,
            backoff_base_ms: 500,
            backoff_max_ms: 60_000,
            idempotency_retention_s: None,
            headers: Object::new(),
            request: None,
            lookup: None,
            statuses: None,
            currencies: None,
            decimals: None,
            amount_step: None,
            require: Vec::new(),
            order: "none".to_owned(),
            cutoff: None,
            resumed_at: None,
            limits: Vec::new(),
            accounts: Vec::new(),
        }
    }
}

/// One `[[provider.limit]]` table or row of `provider_limits`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitRow {
    pub name: String,
    pub algorithm: String,
    pub max_requests: i64,
    /// [`MISSING`]: the limit counts requests in flight.
    #[serde(skip_serializing_if = "is_missing")]
    pub window_ms: i64,
    pub offset_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<i64>,
    pub scope: String,
    pub applies_to: String,
    pub shadow: bool,
    pub enabled: bool,
    /// Not in a file: the limit goes back.
    #[serde(skip)]
    pub returns: Option<LimitReturn>,
}

fn is_missing(number: &i64) -> bool {
    *number == MISSING
}

impl LimitRow {
    /// `None`: the limit counts requests in flight.
    pub fn given_window_ms(&self) -> Option<i64> {
        Some(self.window_ms).filter(|window_ms| *window_ms != MISSING)
    }

    pub fn set_rate(&mut self, rate: Rate) {
        self.max_requests = rate.max_requests().into();
        self.window_ms = rate.window_ms().unwrap_or(MISSING);
    }
}

impl Default for LimitRow {
    fn default() -> Self {
        Self {
            name: String::new(),
            algorithm: "sliding_log".to_owned(),
            max_requests: MISSING,
            window_ms: MISSING,
            offset_ms: 0,
            burst: None,
            scope: "provider".to_owned(),
            applies_to: "all".to_owned(),
            shadow: false,
            enabled: true,
            returns: None,
        }
    }
}

/// One `[[provider.account]]` table or row of `account_overrides`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccountRow {
    pub account: String,
    /// `None`: all limits of scope `account`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_name: Option<String>,
    /// `None`: the row sets a weight alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_requests: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_ms: Option<i64>,
    /// Burst of a token bucket, or of GCRA beyond the first request; `None`: the algorithm's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<i64>,
    /// The account's share among the accounts of the lane's backlog.
    pub weight: i64,
    /// Not in a file: the rule ends.
    #[serde(skip)]
    pub returns: Option<AccountReturn>,
}

impl AccountRow {
    /// Whether the row is that of this account and limit.
    pub fn is_rule_of(&self, account: &str, limit: Option<&str>) -> bool {
        self.account == account && self.limit_name.as_deref() == limit
    }

    /// The key of the row in the audit.
    pub fn audit_key(&self, provider: &str) -> String {
        format!("{provider}/{}/{}", self.account, self.limit_name.as_deref().unwrap_or("*"))
    }

    /// Whether an audited row has the same rule, numbers and weight.
    pub(in crate::ledger) fn is_audited_as(&self, audited: &Object) -> bool {
        let own = self.columns_only();
        let column = |row: &Object, name: &str| row.get(name).filter(|value| !value.is_null()).cloned();
        ["rule", "max_requests", "window_ms", "burst", "weight"]
            .iter()
            .all(|name| column(&own, name) == column(audited, name))
    }

    /// Rule, numbers and weight, without the account and the limit that they are for.
    pub(in crate::ledger) fn columns_only(&self) -> Object {
        let columns = serde_json::to_value(self).ok().and_then(|columns| columns.as_object().cloned());
        columns.into_iter().flatten().filter(|(name, _)| !matches!(name.as_str(), "account" | "limit_name")).collect()
    }

    /// Whether the row changes nothing for its account.
    pub fn is_empty(&self) -> bool {
        *self == Self { account: self.account.clone(), ..Self::default() }
    }
}

impl Default for AccountRow {
    fn default() -> Self {
        Self {
            account: String::new(),
            limit_name: None,
            rule: None,
            max_requests: None,
            window_ms: None,
            burst: None,
            weight: 1,
            returns: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::domain::provider::{Pacing, SlotRelease, StoreDown};
    use crate::domain::response::{StatusCase, StatusMeaning};

    pub fn good() -> ProviderRow {
        let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
        let url = "https://api.example.com/charges".to_owned();
        ProviderRow { name: "stripe".to_owned(), url, limits: vec![limit], ..ProviderRow::default() }
    }

    /// The valid row with some columns replaced, as JSON with the contract's names.
    pub fn with(columns: Value) -> ProviderRow {
        let mut row = serde_json::to_value(good()).unwrap();
        for (column, value) in columns.as_object().unwrap() {
            row[column] = value.clone();
        }
        serde_json::from_value(row).unwrap()
    }

    #[test]
    fn valid_row_passes_validation() {
        let row = with(json!({
            "url": "https://api.example.com/payments/${job:reference}/captures?a=${account}",
            "slot_release": "grant", "pacing": "even", "store_down": "share", "share_of": 4, "headers": {"X-Account": "${job:account}"}, "idempotency_retention_s": 60,
            "request": {"method": "PUT", "body": "form", "template": {"a": "${id}"}, "reference": "/data/id"},
            "statuses": {"402": "review"}, "cutoff": "18:00 Europe/Berlin",
        }));
        let provider = row.validate(7).unwrap();
        assert_eq!((provider.version, provider.quota.as_str()), (7, "stripe"));
        assert_eq!(provider.slot_release, SlotRelease::Grant { transit_jitter: Duration::from_millis(50) });
        assert_eq!((provider.pacing, provider.store_down), (Pacing::Even, StoreDown::Share { workers: 4 }));
        assert_eq!(provider.request.template.as_deref(), Some(r#"{"a":"${id}"}"#));
        assert!(provider.request.form_encoded);
        assert_eq!(provider.statuses[&402], vec![StatusCase::always(StatusMeaning::Review)]);
        assert_eq!(provider.idempotency_retention, Some(Duration::from_secs(60)));
        assert_eq!(provider.cutoff.as_ref().unwrap().to_string(), "18:00 Europe/Berlin");
        assert_eq!(provider.hold_max(), Duration::from_millis(10_500));
    }

    #[test]
    fn reserve_may_leave_one_request() {
        assert!(good().validate(1).is_ok());
        assert!(with(json!({"reserve_percent": 80})).validate(1).is_ok(), "one of five is left");
        let closed = json!({"name": "all", "max_requests": 0, "window_ms": 1000});
        let closed = with(json!({"limit": [closed], "reserve_percent": 81}));
        assert!(closed.validate(1).is_ok(), "closed by its own number");
    }

    #[test]
    fn invalid_cutoff_is_named_with_its_fix() {
        for (cutoff, part) in [
            ("18:00", "cutoff: `18:00` is not a time of day and a time zone: write 18:00 Europe/Berlin"),
            ("25:00 UTC", "cutoff: `25:00` is not a time of day"),
            ("18:00 Berlin", "cutoff: `Berlin` is not a time zone"),
        ] {
            let problems = with(json!({"cutoff": cutoff})).validate(1).unwrap_err().problems;
            assert!(problems.len() == 1 && problems[0].starts_with(part), "{cutoff}: {problems:?}");
        }
    }

    #[test]
    fn each_invalid_column_is_named() {
        let limit = |change: Value| {
            let mut limit = json!({"name": "all", "max_requests": 5, "window_ms": 1000});
            limit.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!({"limit": [limit]})
        };
        let account = |change: Value| json!({"account": [change]});
        let table = [
            (json!({"name": "Stripe"}), "name:"),
            (json!({"quota": ""}), "quota is missing"),
            (json!({"kind": "grpc"}), "kind is `grpc`: must be http"),
            (json!({"url": "api.example.com"}), "url is not an absolute URL"),
            (json!({"url": "ftp://example.com/"}), "url must begin with https://"),
            (json!({"url": "https://u:p@example.com/"}), "url holds a user name"),
            (json!({"url": "https://example.com/\r\nX: y"}), "url holds spaces or control"),
            (json!({"url": "https://example.com/${amount}"}), "url has an unknown placeholder: use ${job:id}"),
            (json!({"url": "https://example.com/${id"}), "url has a `${` that is never closed"),
            (json!({"url": "https://${account}.example.com/"}), "url has a placeholder in its host"),
            (json!({"url": "https://example.com/${id}#x"}), "url holds a #fragment"),
            (json!({"mode": "drop"}), "mode is `drop`: must be blocking or requeue"),
            (json!({"slot_release": "x"}), "slot_release"),
            (json!({"transit_jitter_ms": -1}), "transit_jitter_ms is -1"),
            (json!({"reserve_percent": 100}), "reserve_percent is 100: must lie between 0 and 99"),
            (json!({"reserve_percent": 81}), "reserve_percent is 81: of limit `all`, max_requests 5, nothing is left"),
            (json!({"store_down": "share"}), "share_of is missing"),
            (json!({"timeout_ms": 0}), "timeout_ms is 0"),
            (json!({"send_budget_ms": -1}), "send_budget_ms is -1"),
            (json!({"connection_max_age_ms": 999}), "connection_max_age_ms is 999: must lie between 1000 and 3600000"),
            (json!({"workers": 0}), "workers is 0"),
            (json!({"workers": 4_294_967_297_i64}), "workers is 4294967297"),
            (json!({"bucket_capacity": 65_536}), "bucket_capacity is 65536"),
            (json!({"leak_per_second": 0.0}), "leak_per_second"),
            (json!({"max_wait_ms": 60_001}), "max_wait_ms is 60001"),
            (json!({"max_attempts": 0}), "max_attempts is 0"),
            (json!({"max_age_s": 0}), "max_age_s is 0"),
            (json!({"backoff_base_ms": 60_001}), "backoff_base_ms is 60001: must be at most backoff_max_ms"),
            (json!({"idempotency_retention_s": 0}), "idempotency_retention_s is 0"),
            (json!({"headers": {"X Y": "v"}}), "headers: `X Y` is not a header name"),
            (json!({"headers": {"X": "a\r\nEvil: b"}}), "headers: the value of `X` holds control characters"),
            (json!({"headers": {"X": 1}}), "headers: the value of `X` must be text"),
            (json!({"headers": {"X": "v".repeat(16_384)}}), "headers have 16385 bytes: at most 16384 are sent"),
            (json!({"statuses": {"99": "declined"}}), "statuses: `99`"),
            (json!({"statuses": {"402": "refused"}}), "statuses: 402: the meaning must be"),
            (json!({"request": {"template": {"a": ["b\u{0}"]}}}), "request holds U+0000, which SQL cannot store"),
            (json!({"statuses": {"402": "dec\u{0}lined"}}), "statuses holds U+0000"),
            (json!({"lookup": {"url": "https://x.test/", "a\u{0}": 1}}), "lookup holds U+0000"),
            (json!({"require": ["amount"]}), "require holds `amount`: each item must be account or reference"),
            (json!({"require": [1]}), "require holds `1`"),
            (json!({"limit": []}), "a provider without an enabled limit is closed, not unlimited"),
            (limit(json!({"enabled": false})), "a provider without an enabled limit"),
            (limit(json!({"name": ""})), "limit ``: name is missing"),
            (limit(json!({"max_requests": MISSING})), "limit `all`: max_requests is missing: write how many requests"),
            (limit(json!({"window_ms": MISSING})), "limit `all`: window_ms is missing: write how long a window is"),
            (json!({"name": ""}), "name is missing"),
            (json!({"url": ""}), "url is missing: write https://host/path"),
            (limit(json!({"max_requests": 1_000_001})), "limit `all`: max_requests is 1000001"),
            (limit(json!({"window_ms": 0})), "limit `all`: window_ms must lie"),
            (limit(json!({"burst": 0})), "limit `all`: burst is 0"),
            (limit(json!({"algorithm": "guess"})), "limit `all`: algorithm is `guess`"),
            (account(json!({"account": "a b", "rule": "exempt"})), "account `a b`: account must be"),
            (account(json!({"account": "a", "rule": "limit"})), "account `a`: rule `limit` needs max_requests"),
            (account(json!({"account": "a", "rule": "blocked", "window_ms": 5})), "go with rule `limit` only"),
            (account(json!({"account": "a", "rule": "exempt", "limit_name": "x"})), "limit_name `x` is not a limit"),
            (account(json!({"account": "a", "rule": "exempt", "burst": 5})), "burst goes with rule `limit` only"),
            (account(json!({"account": "a"})), "account `a`: has no rule, and its weight is 1"),
            (account(json!({"account": "a", "weight": 1001})), "weight is 1001: must lie between 1 and 1000"),
        ];
        for (columns, problem) in table {
            let bad = with(columns.clone()).validate(1).unwrap_err();
            assert!(bad.problems.iter().any(|line| line.contains(problem)), "{columns}: {:#?}", bad.problems);
        }
    }
}
