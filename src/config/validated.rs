//! The raw configuration, one field per key of `config/default.toml`, and the validated one: checked values with their
//! types and units.
//!
//! Validation reports every invalid value, not only the first. [`cross_checks`] looks at combinations of the valid
//! ones, even if other values are invalid.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;
use serde::{Deserialize, Serialize};

use crate::config::address::{DatabaseUrl, LimiterUrl, QueueUrl, ValueProblem};
use crate::config::{ConfigProblem, Purpose, cross_checks};
use crate::domain::sensitive::secret::{path_if_safe, quote_if_safe};
use crate::provider::secret_grants::SecretGrants;
use crate::provider::validate_outbound;
pub use crate::queue::message::CardNumbers;
use crate::tls::{Authorities, is_plaintext_allowed};

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

/// Placeholders for secrets in the examples.
const PLACEHOLDERS: [&str; 4] = ["random-characters", "changeme", "change-me", "placeholder"];

/// The configuration of a process, without provider rows.
#[derive(Clone, Debug)]
pub struct Config {
    pub database: DatabaseConfig,
    pub queue: QueueConfig,
    pub limiter: LimiterConfig,
    /// Entries of `outbound.allow`, as raw.
    pub outbound_allow: Vec<String>,
    /// Entries of `outbound.secrets`.
    pub outbound_secrets: SecretGrants,
    /// The files that keys were read from.
    pub config_files: Vec<PathBuf>,
    /// Secrets in files that others on this machine may read.
    pub exposed_secrets: Vec<ConfigProblem>,
    pub ops: OpsConfig,
    pub worker: WorkerConfig,
    /// Age at which payload and request body of finished jobs are emptied.
    pub scrub_after: Duration,
    /// The same for jobs in `review`; `None`: never.
    pub scrub_review_after: Option<Duration>,
    /// The certificates of `tls.ca_file`, read once.
    pub authorities: Authorities,
    /// Hosts to which connections may be without TLS.
    pub plaintext_hosts: Vec<String>,
    pub log: LogConfig,
    /// Address of the collector for spans; `None` in a build without the feature `otlp`.
    pub otlp_endpoint: Option<String>,
}

#[derive(Clone, Debug)]
pub struct DatabaseConfig {
    pub url: DatabaseUrl,
    /// Per process, 1–1000.
    pub max_connections: u32,
}

#[derive(Clone, Debug)]
pub struct QueueConfig {
    pub url: QueueUrl,
    pub prefix: String,
}

#[derive(Clone, Debug)]
pub struct LimiterConfig {
    pub url: LimiterUrl,
    pub prefix: String,
}

#[derive(Clone, Debug)]
pub struct OpsConfig {
    /// `None`: no ops server.
    pub listen: Option<SocketAddr>,
    pub token: Option<SecretString>,
}

#[derive(Clone, Debug)]
pub struct WorkerConfig {
    pub drain_timeout: Duration,
    pub card_numbers: CardNumbers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogConfig {
    pub level: tracing::Level,
    pub format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// Collects problems, key by key.
#[derive(Debug, Default)]
pub struct ProblemCollector(pub Vec<(&'static str, ValueProblem)>);

impl ProblemCollector {
    pub fn add(&mut self, key: &'static str, message: impl Into<String>, fix: impl Into<String>) {
        self.0.push((key, ValueProblem { message: message.into(), fix: fix.into() }));
    }

    fn value_or_add<T>(&mut self, key: &'static str, result: Result<T, ValueProblem>) -> Option<T> {
        result.map_err(|problem| self.0.push((key, problem))).ok()
    }

    fn integer_in_range(&mut self, key: &'static str, value: i64, low: u32, high: u32) -> Option<u32> {
        let fits = u32::try_from(value).ok().filter(|value| (low..=high).contains(value));
        if fits.is_none() {
            self.add(key, format!("is {value}"), format!("Use a number from {low} to {high}"));
        }
        fits
    }

    fn validate_prefix(&mut self, key: &'static str, text: &str, punctuation: &str) -> Option<String> {
        // RabbitMQ reserves names that begin with `amq.`.
        let fits = !text.starts_with("amq.")
            && (1..=63).contains(&text.len())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || punctuation.contains(c));
        if !fits {
            self.add(
                key,
                format!("{} cannot begin a name", quote_if_safe(text)),
                format!("Use 1 to 63 of A-Z a-z 0-9 {punctuation}, not beginning with amq."),
            );
        }
        fits.then(|| text.to_owned())
    }

    fn parse_choice<T: Copy>(&mut self, key: &'static str, text: &str, choices: &[(&str, T)]) -> Option<T> {
        let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            self.add(
                key,
                format!("{} is not a valid value", quote_if_safe(text)),
                format!("Use one of: {}", names.join(", ")),
            );
        }
        found
    }
}

fn duration_of_days(days: u32) -> Duration {
    Duration::from_secs(u64::from(days) * 86_400)
}

/// Validates every key; `None` if a key has a problem.
pub fn validate(raw: &RawConfig, purpose: Purpose, problems: &mut ProblemCollector) -> Option<Config> {
    let database = validate_database(&raw.database, problems);
    let queue_url = problems.value_or_add("queue.url", QueueUrl::parse(&raw.queue.url));
    let queue_prefix = problems.validate_prefix("queue.prefix", &raw.queue.prefix, "_.-");
    let limiter_url = problems.value_or_add("limiter.url", LimiterUrl::parse(&raw.limiter.url));
    // Braces would change Redis' hash tag, and move the keys to other slots.
    let limiter_prefix = problems.validate_prefix("limiter.prefix", &raw.limiter.prefix, "_.:-");
    let ops = validate_ops(&raw.ops, problems);
    let worker = validate_worker(&raw.worker, problems);
    let days = problems.integer_in_range("ledger.scrub_after_days", raw.ledger.scrub_after_days, 1, 3_650);
    let review_days =
        problems.integer_in_range("ledger.scrub_review_after_days", raw.ledger.scrub_review_after_days, 0, 3_650);
    for (key, items) in [("outbound.allow", &raw.outbound.allow), ("tls.plaintext_hosts", &raw.tls.plaintext_hosts)] {
        if items.iter().any(|item| item.trim().is_empty() || item.contains('*')) {
            problems.add(key, "has an empty entry or a wildcard", "Name each entry in full");
        } else if key == "outbound.allow" {
            validate_targets(items, problems);
        }
    }
    let outbound_secrets = validate_secrets(&raw.outbound.secrets, problems);
    let authorities = validate_authorities(&raw.tls.ca_file, problems);
    let log = validate_log(&raw.log, problems);
    let otlp_endpoint = validate_otlp_endpoint(&raw.telemetry, &raw.tls.plaintext_hosts, problems);
    let parts = cross_checks::ParsedKeys {
        database: database.as_ref().map(|database| &database.url),
        queue: queue_url.as_ref(),
        limiter: limiter_url.as_ref(),
        ops: ops.as_ref(),
        plaintext_hosts: &raw.tls.plaintext_hosts,
    };
    match purpose {
        Purpose::Run => cross_checks::check_all(&parts, problems),
        Purpose::Migrate => cross_checks::check_database_tls(&parts, problems),
    }
    Some(Config {
        database: database?,
        queue: QueueConfig { url: queue_url?, prefix: queue_prefix? },
        limiter: LimiterConfig { url: limiter_url?, prefix: limiter_prefix? },
        outbound_allow: raw.outbound.allow.clone(),
        outbound_secrets: outbound_secrets?,
        config_files: Vec::new(),
        exposed_secrets: Vec::new(),
        ops: ops?,
        worker: worker?,
        scrub_after: duration_of_days(days?),
        scrub_review_after: review_days.map(|days| (days > 0).then(|| duration_of_days(days)))?,
        authorities: authorities?,
        plaintext_hosts: raw.tls.plaintext_hosts.clone(),
        log: log?,
        otlp_endpoint: otlp_endpoint?,
    })
}

fn validate_database(raw: &RawDatabase, problems: &mut ProblemCollector) -> Option<DatabaseConfig> {
    let url = problems.value_or_add("database.url", DatabaseUrl::parse(&raw.url));
    let max_connections = problems.integer_in_range("database.max_connections", raw.max_connections, 1, 1_000);
    Some(DatabaseConfig { url: url?, max_connections: max_connections? })
}

fn validate_ops(raw: &RawOps, problems: &mut ProblemCollector) -> Option<OpsConfig> {
    let text = raw.listen.replacen("localhost:", "127.0.0.1:", 1);
    let listen = match text.as_str() {
        "none" => Some(None),
        text => text.parse().map(Some).ok(),
    };
    if listen.is_none() {
        let what = format!("{} is not an address", quote_if_safe(&raw.listen));
        problems.add("ops.listen", what, "Write IP:PORT, like 127.0.0.1:9464 or [::1]:9464, or `none`");
    }
    let sendable = raw.token.bytes().all(|byte| byte.is_ascii_graphic());
    if !sendable {
        let what = "contains characters that a header cannot carry";
        problems.add("ops.token", what, "Use visible ASCII characters without spaces");
    }
    let is_secret = raw.token.is_empty()
        || !sendable
        || placeholder_problem(&raw.token).is_none_or(|what| {
            problems.add("ops.token", what, "Use the output of `openssl rand -hex 24`");
            false
        });
    let token = (!raw.token.is_empty()).then(|| SecretString::from(raw.token.as_str()));
    (sendable && is_secret).then_some(OpsConfig { listen: listen?, token })
}

/// The problem of a placeholder: every reader of the example knows it.
fn placeholder_problem(token: &str) -> Option<&'static str> {
    let lower = token.to_ascii_lowercase();
    PLACEHOLDERS.iter().any(|placeholder| lower.contains(placeholder)).then_some("is the placeholder of an example")
}

fn validate_targets(entries: &[String], problems: &mut ProblemCollector) {
    if let Err(entry_problems) = validate_outbound(entries) {
        let fix = "Write each as loopback, host:port, a CIDR like 10.0.0.0/8, or http://host:port";
        problems.add("outbound.allow", entry_problems.join("; "), fix);
    }
}

fn validate_secrets(entries: &[String], problems: &mut ProblemCollector) -> Option<SecretGrants> {
    let fix = "Write each as env:NAME@HOST or file:/PATH@HOST, like env:STRIPE_KEY@api.stripe.com or file:/run/secrets/adyen@*.adyen.com";
    let grants = SecretGrants::parse(entries);
    problems.value_or_add(
        "outbound.secrets",
        grants.map_err(|entry_problems| ValueProblem { message: entry_problems.join("; "), fix: fix.to_owned() }),
    )
}

fn validate_authorities(path: &str, problems: &mut ProblemCollector) -> Option<Authorities> {
    if path.is_empty() {
        return Some(Authorities::default());
    }
    let path = Path::new(path);
    let read = Authorities::read(path);
    let fix = "Name a PEM file with the certificates of your authorities that this process's user may read";
    problems.value_or_add(
        "tls.ca_file",
        read.map_err(|problem| ValueProblem {
            message: format!("{} {problem}", path_if_safe(path)),
            fix: fix.to_owned(),
        }),
    )
}

fn validate_worker(raw: &RawWorker, problems: &mut ProblemCollector) -> Option<WorkerConfig> {
    let choices = [("refuse", CardNumbers::Refuse), ("warn", CardNumbers::Warn), ("off", CardNumbers::Off)];
    let card_numbers = problems.parse_choice("worker.card_numbers", &raw.card_numbers, &choices);
    let drain_ms = problems.integer_in_range("worker.drain_timeout_ms", raw.drain_timeout_ms, 0, 3_600_000);
    Some(WorkerConfig { drain_timeout: Duration::from_millis(u64::from(drain_ms?)), card_numbers: card_numbers? })
}

fn validate_log(raw: &RawLog, problems: &mut ProblemCollector) -> Option<LogConfig> {
    use tracing::Level;
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let level = problems.parse_choice("log.level", &raw.level, &levels);
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let format = problems.parse_choice("log.format", &raw.format, &formats);
    Some(LogConfig { level: level?, format: format? })
}

const OTLP_KEY: &str = "telemetry.otlp_endpoint";

/// Validates the address that spans are sent to. Plain text to other machines is rejected, because spans tell who pays
/// whom when. `Some(None)`: no spans are sent. `None`: a problem was added.
fn validate_otlp_endpoint(
    raw: &RawTelemetry,
    plaintext_hosts: &[String],
    problems: &mut ProblemCollector,
) -> Option<Option<String>> {
    let text = raw.otlp_endpoint.as_str();
    if text == "none" {
        return Some(None);
    }
    if !cfg!(feature = "otlp") {
        let what = "is set, and this build has no OpenTelemetry";
        problems.add(OTLP_KEY, what, "Build with `cargo build --release --features otlp`, or set it to `none`");
        return None;
    }
    let url = url::Url::parse(text).ok().filter(|url| {
        let is_bare = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && is_bare && url.fragment().is_none()
    });
    let Some((scheme, host)) = url.as_ref().and_then(|url| Some((url.scheme(), url.host_str()?))) else {
        problems.add(
            OTLP_KEY,
            "is not the address of a collector",
            "Write http://127.0.0.1:4318 or https://HOST, or `none`",
        );
        return None;
    };
    if scheme == "http" && !is_plaintext_allowed(host, plaintext_hosts) {
        let what = format!("the connection to {host} would be plain text");
        problems.add(
            OTLP_KEY,
            what,
            format!("Use https://; or add \"{host}\" to tls.plaintext_hosts at your own risk"),
        );
        return None;
    }
    Some(Some(text.to_owned()))
}
