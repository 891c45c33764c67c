//! The raw configuration: texts, whole numbers and lists, one field per key of `config/default.toml`.
//!
//! [`super::validated`] checks and converts the values.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawConfig {
    pub database: RawDatabase,
    pub queue: RawNamedBackend,
    pub limiter: RawNamedBackend,
    pub outbound: RawOutbound,
    pub ops: RawOps,
    pub worker: RawWorker,
    pub ledger: RawLedger,
    pub tls: RawTls,
    pub log: RawLog,
    pub telemetry: RawTelemetry,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDatabase {
    pub url: String,
    pub max_connections: i64,
}

/// A backend and the prefix of our names in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawNamedBackend {
    pub url: String,
    pub prefix: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawOutbound {
    pub allow: Vec<String>,
    pub secrets: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawOps {
    pub listen: String,
    pub token: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawWorker {
    pub drain_timeout_ms: i64,
    pub card_numbers: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLedger {
    pub scrub_after_days: i64,
    pub scrub_review_after_days: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawTls {
    pub ca_file: String,
    pub plaintext_hosts: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawTelemetry {
    pub otlp_endpoint: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLog {
    pub level: String,
    pub format: String,
}
