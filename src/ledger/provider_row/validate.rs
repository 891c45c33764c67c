//! Validation of a raw provider row: every column is checked, because a row may be older than its CHECKs and a file has
//! none.
//!
//! It reports all problems at once. A problem names its column, says what is wrong and how to fix it. It never quotes a
//! header's value.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::file::nearest;
use super::{Object, ProviderRow};
use crate::domain::backoff::BackoffPolicy;
use crate::domain::cutoff::Cutoff;
use crate::domain::expansion::{HEADERS_BYTES_MAX, UrlTemplate};
use crate::domain::job::JobField;
use crate::domain::limit::{LimitOverride, Rule};
use crate::domain::provider::{
    JobOrder, Mode, Pacing, Provider, ProviderName, RESERVED_NAMES, SEND_BUDGET_MAX, SlotRelease, StoreDown,
    TIMEOUT_MAX,
};
use crate::ledger::settings::InvalidRow;

/// Longest retention and age: ten years, in seconds. Keeps sums of durations far from overflow.
const TEN_YEARS_S: i64 = 315_360_000;

impl ProviderRow {
    /// Validates the row and everything below it. `version` is the settings version that stamped it.
    pub fn validate(&self, version: i64) -> Result<Provider, InvalidRow> {
        let mut check = RowValidator::default();
        check.check_secrets(self);
        check.no_nul(self);
        let provider = self.validate_with(version, &mut check);
        if let Some(provider) = &provider {
            check.reserve(provider);
            check.check_echoes(provider);
        }
        match provider {
            Some(provider) if check.0.is_empty() => Ok(provider),
            _ => Err(InvalidRow {
                provider: self.name.clone(),
                quota: self.quota.clone().unwrap_or_else(|| self.name.clone()),
                enabled: self.enabled,
                paused: self.paused,
                problems: check.0,
            }),
        }
    }

    /// Checks all columns before it returns `None`.
    fn validate_with(&self, version: i64, check: &mut RowValidator) -> Option<Provider> {
        let name = check.lane_name(&self.name);
        let quota = self.quota.as_ref().map_or_else(|| name.clone(), |quota| check.name("quota", quota));
        check.one_of("kind", &self.kind, &[("http", ())]);
        check.charge_url(&self.url);
        let mode = check.one_of("mode", &self.mode, &[("blocking", Mode::Blocking), ("requeue", Mode::Requeue)]);
        let transit_jitter = check.ms("transit_jitter_ms", self.transit_jitter_ms, 10..=60_000);
        let releases = [("response", SlotRelease::Response), ("grant", SlotRelease::Grant { transit_jitter })];
        let slot_release = check.one_of("slot_release", &self.slot_release, &releases);
        let pacing = check.one_of("pacing", &self.pacing, &[("burst", Pacing::Burst), ("even", Pacing::Even)]);
        let of = check.share_of(&self.store_down, self.share_of);
        let ways = [("wait", StoreDown::Wait), ("share", StoreDown::Share { workers: of })];
        let store_down = check.one_of("store_down", &self.store_down, &ways);
        let reserve_percent = check.number("reserve_percent", self.reserve_percent, 0..=99);
        let timeout = check.ms("timeout_ms", self.timeout_ms, 1..=whole_ms(TIMEOUT_MAX));
        let send_budget = check.ms("send_budget_ms", self.send_budget_ms, 1..=whole_ms(SEND_BUDGET_MAX));
        let connection_max_age = check.ms("connection_max_age_ms", self.connection_max_age_ms, 1_000..=3_600_000);
        let workers = check.number("workers", self.workers, 1..=10_000);
        let bucket_capacity = check.number("bucket_capacity", self.bucket_capacity, 1..=65_535);
        let leak_per_second = check.leak(self.leak_per_second);
        let max_wait = check.ms("max_wait_ms", self.max_wait_ms, 0..=60_000);
        let max_attempts = check.number("max_attempts", self.max_attempts, 1..=1_000);
        let max_age = check.seconds("max_age_s", self.max_age_s);
        let backoff = check.backoff(self.backoff_base_ms, self.backoff_max_ms);
        let retention = self.idempotency_retention_s.map(|seconds| check.seconds("idempotency_retention_s", seconds));
        let headers = check.headers(&self.headers);
        let request = check.request(self.request.as_ref());
        let statuses = check.statuses(self.statuses.as_ref());
        let lookup = self.lookup.as_ref().and_then(|lookup| check.lookup(lookup, retention));
        let limits = check.limits(&self.limits);
        let account_rules = check.accounts(&self.accounts, &self.limits);
        let require = check.require(&self.require);
        let amounts = check.amounts(self);
        let order = check.one_of("order", &self.order, &[("none", JobOrder::None), ("account", JobOrder::Account)]);
        Some(Provider {
            name: name?,
            quota: quota?,
            enabled: self.enabled,
            paused: self.paused,
            url: self.url.clone(),
            mode: mode?,
            slot_release: slot_release?,
            pacing: pacing?,
            reserve_percent: u8::try_from(reserve_percent).ok()?,
            store_down: store_down?,
            timeout,
            send_budget,
            connection_max_age,
            reuse_connections: self.reuse_connections,
            workers,
            bucket_capacity,
            leak_per_second,
            max_wait,
            max_attempts,
            max_age,
            backoff,
            idempotency_retention: retention,
            headers,
            request,
            statuses,
            lookup,
            require,
            order: order?,
            amounts,
            cutoff: self.cutoff.as_ref().and_then(|cutoff| check.cutoff(cutoff)),
            resumed_at: self.resumed_at.and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0),
            version,
            limits,
            account_rules,
        })
    }
}

impl ProviderRow {
    /// The optional columns that hold an object.
    pub(in crate::ledger) fn json_columns(&self) -> [(&'static str, &Option<Object>); 5] {
        [
            ("request", &self.request),
            ("lookup", &self.lookup),
            ("statuses", &self.statuses),
            ("decimals", &self.decimals),
            ("amount_step", &self.amount_step),
        ]
    }
}

/// Collects problems during validation.
#[derive(Default)]
pub struct RowValidator(pub Vec<String>);

impl RowValidator {
    fn lane_name(&mut self, name: &str) -> Option<ProviderName> {
        if RESERVED_NAMES.contains(&name) {
            self.problem(format!("name: `{name}` is reserved for a queue of Sluicegate: choose another"));
        }
        self.name("name", name)
    }

    fn no_nul(&mut self, row: &ProviderRow) {
        for (column, object) in row.json_columns() {
            if object.as_ref().is_some_and(holds_nul) {
                self.problem(format!("{column} holds U+0000, which SQL cannot store"));
            }
        }
    }

    pub fn problem(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Runs checks whose problems begin with this place.
    pub fn at<T>(&mut self, place: &str, checks: impl FnOnce(&mut Self) -> T) -> T {
        let mut own = Self::default();
        let value = checks(&mut own);
        self.0.extend(own.0.into_iter().map(|problem| format!("{place}: {problem}")));
        value
    }

    /// A problem unless it is a JSON pointer.
    pub fn pointer(&mut self, place: &str, pointer: Option<&String>, examples: &str) {
        if pointer.is_some_and(|pointer| !pointer.starts_with('/')) {
            self.problem(format!("{place} is not a JSON pointer: write {examples}"));
        }
    }

    /// A problem unless it is a header's name: a `token` of RFC 9110, section 5.6.2.
    pub fn header_name(&mut self, place: &str, name: Option<&String>) {
        let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if name.is_some_and(|name| name.is_empty() || !name.bytes().all(is_token)) {
            self.problem(format!("{place} is not a header name"));
        }
    }

    pub fn name(&mut self, column: &str, text: &str) -> Option<ProviderName> {
        if text.is_empty() {
            self.problem(format!("{column} is missing"));
            return None;
        }
        ProviderName::new(text).map_err(|problem| self.problem(format!("{column}: {problem}"))).ok()
    }

    pub fn number(&mut self, column: &str, value: i64, range: RangeInclusive<i64>) -> u32 {
        if !range.contains(&value) {
            let (least, most) = (range.start(), range.end());
            self.problem(format!("{column} is {value}: must lie between {least} and {most}"));
        }
        u32::try_from(value).unwrap_or_default()
    }

    pub fn ms(&mut self, column: &str, value: i64, range: RangeInclusive<i64>) -> Duration {
        Duration::from_millis(self.number(column, value, range).into())
    }

    pub fn seconds(&mut self, column: &str, value: i64) -> Duration {
        Duration::from_secs(self.number(column, value, 1..=TEN_YEARS_S).into())
    }

    pub fn one_of<T: Copy>(&mut self, column: &str, text: &str, choices: &[(&str, T)]) -> Option<T> {
        let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let meant = nearest(text, names.iter().copied());
            let hint = meant.map_or_else(String::new, |meant| format!("; did you mean `{meant}`?"));
            self.problem(format!("{column} is `{text}`: must be {}{hint}", names.join(" or ")));
        }
        found
    }

    pub fn url(&mut self, column: &str, text: &str) {
        let problem = match url::Url::parse(text) {
            _ if text.is_empty() => "is missing: write https://host/path",
            // The parser drops tabs and line ends silently.
            _ if text.chars().any(|c| c.is_control() || c.is_whitespace()) => "holds spaces or control characters",
            Err(_) => "is not an absolute URL: write https://host/path",
            Ok(url) if !matches!(url.scheme(), "http" | "https") => "must begin with https:// (or http://)",
            Ok(url) if !url.username().is_empty() || url.password().is_some() => {
                "holds a user name or password: put credentials in headers, as ${env:NAME}"
            }
            Ok(url) if url.fragment().is_some() => "holds a #fragment, which is never sent",
            Ok(_) => return,
        };
        self.problem(format!("{column} {problem}"));
    }

    /// The address of charges, with its placeholders.
    fn charge_url(&mut self, text: &str) {
        match UrlTemplate::parse(text) {
            Ok(url) => self.url("url", &url.sample()),
            Err(problem) => self.problem(format!("url {problem}")),
        }
    }

    fn share_of(&mut self, store_down: &str, share_of: Option<i64>) -> u32 {
        match share_of {
            Some(share_of) => self.number("share_of", share_of, 1..=10_000),
            None => {
                if store_down == "share" {
                    self.problem("share_of is missing: store_down `share` divides the limits by it");
                }
                1
            }
        }
    }

    /// A limit is closed by `max_requests` 0, which says so, and not by a reserve.
    fn reserve(&mut self, provider: &Provider) {
        for limit in &provider.limits {
            let written = limit.rate.max_requests();
            if written > 0 && provider.after_reserve(written) == 0 {
                self.problem(format!(
                    "reserve_percent is {}: of limit `{}`, max_requests {written}, nothing is left; lower the reserve, or \
                     write max_requests 0 to close the limit",
                    provider.reserve_percent, limit.name
                ));
            }
        }
        for rule in &provider.account_rules {
            let Rule::Limit(LimitOverride { rate, .. }) = rule.rule else { continue };
            let written = rate.max_requests();
            if written > 0 && provider.after_reserve(written) == 0 {
                self.problem(format!(
                    "account `{}`: reserve_percent is {}: of its own max_requests {written}, nothing is left; lower the \
                     reserve, or write max_requests 0 to close the limit for this account",
                    rule.account, provider.reserve_percent
                ));
            }
        }
    }

    fn require(&mut self, fields: &[Value]) -> BTreeSet<JobField> {
        let mut required = BTreeSet::new();
        for field in fields {
            match JobField::ALL.into_iter().find(|known| field == known.name()) {
                Some(known) => drop(required.insert(known)),
                None => {
                    let shown = field.as_str().map_or_else(|| field.to_string(), str::to_owned);
                    self.problem(format!("require holds `{shown}`: each item must be account or reference"));
                }
            }
        }
        required
    }

    fn cutoff(&mut self, text: &str) -> Option<Cutoff> {
        text.parse().map_err(|problem| self.problem(format!("cutoff: {problem}"))).ok()
    }

    fn leak(&mut self, leak_per_second: Option<f64>) -> Option<f64> {
        if leak_per_second.is_some_and(|leak| !(leak > 0.0 && leak <= 1_000_000.0)) {
            self.problem("leak_per_second must be above 0 and at most 1000000");
        }
        leak_per_second
    }

    fn backoff(&mut self, base_ms: i64, max_ms: i64) -> BackoffPolicy {
        let base = self.ms("backoff_base_ms", base_ms, 1..=86_400_000);
        let max = self.ms("backoff_max_ms", max_ms, 1..=86_400_000);
        if base > max {
            self.problem(format!("backoff_base_ms is {base_ms}: must be at most backoff_max_ms, {max_ms}"));
        }
        BackoffPolicy { base, max }
    }

    fn headers(&mut self, headers: &Object) -> BTreeMap<String, String> {
        let mut meant = BTreeMap::new();
        let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.as_str().map_or(0, str::len)).sum();
        if bytes > HEADERS_BYTES_MAX {
            self.problem(format!("headers have {bytes} bytes: at most {HEADERS_BYTES_MAX} are sent"));
        }
        for (name, value) in headers {
            self.header_name(&format!("headers: `{name}`"), Some(name));
            match value.as_str() {
                Some(value) if !value.chars().any(char::is_control) => {
                    meant.insert(name.clone(), value.to_owned());
                }
                Some(_) => self.problem(format!("headers: the value of `{name}` holds control characters")),
                None => self.problem(format!("headers: the value of `{name}` must be text")),
            }
        }
        meant
    }

    /// What a JSON column holds, its keys one by one, so that each problem names its own.
    pub fn keys<T: DeserializeOwned>(&mut self, column: &str, object: &Object) -> Option<T> {
        let before = self.0.len();
        for (key, value) in object {
            let alone = Value::Object(Object::from_iter([(key.clone(), value.clone())]));
            if let Err(error) = serde_json::from_value::<T>(alone) {
                self.problem(match error.to_string() {
                    unknown if unknown.starts_with("unknown field") => format!("{column}: {unknown}"),
                    other => format!("{column}.{key}: {other}"),
                });
            }
        }
        if self.0.len() > before {
            return None;
        }
        serde_json::from_value(Value::Object(object.clone())).ok()
    }
}

fn holds_nul(object: &Object) -> bool {
    fn in_value(value: &Value) -> bool {
        match value {
            Value::String(text) => text.contains('\0'),
            Value::Array(items) => items.iter().any(in_value),
            Value::Object(object) => holds_nul(object),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }
    object.iter().any(|(key, value)| key.contains('\0') || in_value(value))
}

fn whole_ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
