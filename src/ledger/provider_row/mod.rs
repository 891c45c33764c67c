//! A provider as an operator writes it, in database rows or in a provider file, with the contract's defaults.
//!
//! Refuses to be used as it stands: [`ProviderRow::meant`] checks everything and gives a [`Provider`], or every problem
//! at once.
//!
//! [`Provider`]: crate::domain::provider::Provider

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

mod file;
mod meant;
mod unsupported;

pub use file::parse_provider_file;

/// A JSON column: an object.
pub type Object = Map<String, Value>;

/// One `[[provider]]` table or row of `providers`, with what hangs on it. Columns mean what the contract says; numbers
/// are as wide as the database's, so that a bad one can be named instead of failing to load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderRow {
    pub name: String,
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    pub enabled: bool,
    pub paused: bool,
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
    pub window_ms: i64,
    pub offset_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<i64>,
    pub scope: String,
    pub applies_to: String,
    pub shadow: bool,
    pub enabled: bool,
}

impl Default for LimitRow {
    fn default() -> Self {
        Self {
            name: String::new(),
            algorithm: "sliding_log".to_owned(),
            // No default in the contract: outside the allowed range, so that a missing value is a problem.
            max_requests: -1,
            window_ms: 0,
            offset_ms: 0,
            burst: None,
            scope: "provider".to_owned(),
            applies_to: "all".to_owned(),
            shadow: false,
            enabled: true,
        }
    }
}

/// One `[[provider.account]]` table or row of `account_overrides`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccountRow {
    pub account: String,
    /// `None`: all limits scoped to accounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_name: Option<String>,
    pub rule: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_requests: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_ms: Option<i64>,
}
