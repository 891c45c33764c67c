//! The configuration as meant: checked values with their types and units.
//!
//! Refuses to stop at the first value that cannot be meant; hazards between keys are `hazards`' part, and are looked for
//! among the values that can be meant even when others cannot.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use super::Purpose;
use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, ValueProblem};
use super::cross_checks;
use super::problem::ConfigProblem;
use super::raw::RawConfig;
use crate::domain::sensitive::safe_quote::{path_if_safe, quote_if_safe};
use crate::provider::outbound;
use crate::provider::secret_grants::SecretGrants;
pub use crate::queue::message::CardNumbers;
use crate::tls::Authorities;

/// What examples have where a secret shall be.
const PLACEHOLDERS: [&str; 4] = ["random-characters", "changeme", "change-me", "placeholder"];

/// All that a process is told from outside, apart from provider rows.
#[derive(Clone, Debug)]
pub struct Config {
    pub database: DatabaseConfig,
    pub queue: QueueConfig,
    pub limiter: LimiterConfig,
    /// Entries of `outbound.allow`, as written.
    pub outbound_allow: Vec<String>,
    /// Of `outbound.secrets`.
    pub outbound_secrets: SecretGrants,
    /// The files that keys were read from.
    pub config_files: Vec<PathBuf>,
    /// Secrets in files that others on this machine may read.
    pub exposed_secrets: Vec<ConfigProblem>,
    pub ops: OpsConfig,
    pub worker: WorkerConfig,
    /// Age at which payload and request body of settled jobs are emptied.
    pub scrub_after: Duration,
    /// `None`: never.
    pub scrub_review_after: Option<Duration>,
    /// Of `tls.ca_file`, read once.
    pub authorities: Authorities,
    /// Host names that may be spoken to without TLS.
    pub plaintext_hosts: Vec<String>,
    pub log: LogConfig,
    /// Of a collector that spans are sent to; never there in a build without the feature `otlp`.
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

/// Collects what is wrong, key by key.
#[derive(Debug, Default)]
pub struct ProblemCollector(pub Vec<(&'static str, ValueProblem)>);

impl ProblemCollector {
    pub fn add(&mut self, key: &'static str, what: impl Into<String>, mend: impl Into<String>) {
        self.0.push((key, ValueProblem { message: what.into(), fix: mend.into() }));
    }

    fn value_or_add<T>(&mut self, key: &'static str, result: Result<T, ValueProblem>) -> Option<T> {
        result.map_err(|bad| self.0.push((key, bad))).ok()
    }

    fn integer_in_range(&mut self, key: &'static str, value: i64, low: u32, high: u32) -> Option<u32> {
        let fits = u32::try_from(value).ok().filter(|value| (low..=high).contains(value));
        if fits.is_none() {
            self.add(key, format!("is {value}"), format!("Use a number from {low} to {high}"));
        }
        fits
    }

    fn validate_prefix(&mut self, key: &'static str, text: &str, marks: &str) -> Option<String> {
        // RabbitMQ keeps names that begin with `amq.` for itself.
        let fits = !text.starts_with("amq.")
            && (1..=63).contains(&text.len())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || marks.contains(c));
        if !fits {
            self.add(
                key,
                format!("{} cannot begin a name", quote_if_safe(text)),
                format!("Use 1 to 63 of A-Z a-z 0-9 {marks}, not beginning with amq."),
            );
        }
        fits.then(|| text.to_owned())
    }

    fn parse_choice<T: Copy>(&mut self, key: &'static str, text: &str, words: &[(&str, T)]) -> Option<T> {
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        if found.is_none() {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.add(
                key,
                format!("{} is none of its words", quote_if_safe(text)),
                format!("Use one of: {}", words.join(", ")),
            );
        }
        found
    }
}

fn duration_of_days(days: u32) -> Duration {
    Duration::from_secs(u64::from(days) * 86_400)
}

/// Translates every key; `None` when any of them complained.
pub fn validate(written: &RawConfig, purpose: Purpose, complaints: &mut ProblemCollector) -> Option<Config> {
    let database = validate_database(&written.database, complaints);
    let queue_url = complaints.value_or_add("queue.url", QueueUrl::parse(&written.queue.url));
    let queue_prefix = complaints.validate_prefix("queue.prefix", &written.queue.prefix, "_.-");
    let limiter_url = complaints.value_or_add("limiter.url", LimiterUrl::parse(&written.limiter.url));
    // Braces would move Redis' hash tag, and with it the keys, to other slots.
    let limiter_prefix = complaints.validate_prefix("limiter.prefix", &written.limiter.prefix, "_.:-");
    let ops = validate_ops(&written.ops, complaints);
    let worker = validate_worker(&written.worker, complaints);
    let days = complaints.integer_in_range("ledger.scrub_after_days", written.ledger.scrub_after_days, 1, 3_650);
    let review_days =
        complaints.integer_in_range("ledger.scrub_review_after_days", written.ledger.scrub_review_after_days, 0, 3_650);
    for (key, items) in
        [("outbound.allow", &written.outbound.allow), ("tls.plaintext_hosts", &written.tls.plaintext_hosts)]
    {
        if items.iter().any(|item| item.trim().is_empty() || item.contains('*')) {
            complaints.add(key, "has an empty entry or a wildcard", "Name each entry in full");
        } else if key == "outbound.allow" {
            validate_targets(items, complaints);
        }
    }
    let outbound_secrets = validate_secrets(&written.outbound.secrets, complaints);
    let authorities = validate_authorities(&written.tls.ca_file, complaints);
    let log = validate_log(&written.log, complaints);
    let otlp_endpoint = super::otlp::validate_endpoint(&written.telemetry, &written.tls.plaintext_hosts, complaints);
    let parts = cross_checks::ParsedKeys {
        database: database.as_ref().map(|database| &database.url),
        queue: queue_url.as_ref(),
        limiter: limiter_url.as_ref(),
        ops: ops.as_ref(),
        plaintext_hosts: &written.tls.plaintext_hosts,
    };
    match purpose {
        Purpose::Run => cross_checks::check_all(&parts, complaints),
        Purpose::Migrate => cross_checks::check_database_tls(&parts, complaints),
    }
    Some(Config {
        database: database?,
        queue: QueueConfig { url: queue_url?, prefix: queue_prefix? },
        limiter: LimiterConfig { url: limiter_url?, prefix: limiter_prefix? },
        outbound_allow: written.outbound.allow.clone(),
        outbound_secrets: outbound_secrets?,
        config_files: Vec::new(),
        exposed_secrets: Vec::new(),
        ops: ops?,
        worker: worker?,
        scrub_after: duration_of_days(days?),
        scrub_review_after: review_days.map(|days| (days > 0).then(|| duration_of_days(days)))?,
        authorities: authorities?,
        plaintext_hosts: written.tls.plaintext_hosts.clone(),
        log: log?,
        otlp_endpoint: otlp_endpoint?,
    })
}

fn validate_database(written: &super::raw::RawDatabase, complaints: &mut ProblemCollector) -> Option<DatabaseConfig> {
    let url = complaints.value_or_add("database.url", DatabaseUrl::parse(&written.url));
    let max_connections = complaints.integer_in_range("database.max_connections", written.max_connections, 1, 1_000);
    Some(DatabaseConfig { url: url?, max_connections: max_connections? })
}

fn validate_ops(written: &super::raw::RawOps, complaints: &mut ProblemCollector) -> Option<OpsConfig> {
    let text = written.listen.replacen("localhost:", "127.0.0.1:", 1);
    let listen = match text.as_str() {
        "none" => Some(None),
        text => text.parse().map(Some).ok(),
    };
    if listen.is_none() {
        let what = format!("{} is not an address", quote_if_safe(&written.listen));
        complaints.add("ops.listen", what, "Write IP:PORT, like 127.0.0.1:9464 or [::1]:9464, or `none`");
    }
    let sendable = written.token.bytes().all(|byte| byte.is_ascii_graphic());
    if !sendable {
        let what = "holds characters that a header cannot carry";
        complaints.add("ops.token", what, "Use visible ASCII characters without spaces");
    }
    let is_secret = written.token.is_empty()
        || !sendable
        || placeholder_problem(&written.token).is_none_or(|what| {
            complaints.add("ops.token", what, "Use what `openssl rand -hex 24` writes");
            false
        });
    let token = (!written.token.is_empty()).then(|| SecretString::from(written.token.as_str()));
    (sendable && is_secret).then_some(OpsConfig { listen: listen?, token })
}

/// A placeholder is known to whoever has read the example.
fn placeholder_problem(token: &str) -> Option<&'static str> {
    let lower = token.to_ascii_lowercase();
    PLACEHOLDERS.iter().any(|words| lower.contains(words)).then_some("is the placeholder of an example")
}

fn validate_targets(entries: &[String], complaints: &mut ProblemCollector) {
    if let Err(problems) = outbound::validate(entries) {
        let mend = "Write each as loopback, host:port, a CIDR like 10.0.0.0/8, or http://host:port";
        complaints.add("outbound.allow", problems.join("; "), mend);
    }
}

fn validate_secrets(entries: &[String], complaints: &mut ProblemCollector) -> Option<SecretGrants> {
    let mend = "Write each as env:NAME@HOST or file:/PATH@HOST, like env:STRIPE_KEY@api.stripe.com or file:/run/secrets/adyen@*.adyen.com";
    let grants = SecretGrants::parse(entries);
    complaints.value_or_add(
        "outbound.secrets",
        grants.map_err(|problems| ValueProblem { message: problems.join("; "), fix: mend.to_owned() }),
    )
}

fn validate_authorities(path: &str, complaints: &mut ProblemCollector) -> Option<Authorities> {
    if path.is_empty() {
        return Some(Authorities::default());
    }
    let path = Path::new(path);
    let read = Authorities::read(path);
    let mend = "Name a PEM file with the certificates of your authorities that this process's user may read";
    complaints.value_or_add(
        "tls.ca_file",
        read.map_err(|problem| ValueProblem {
            message: format!("{} {problem}", path_if_safe(path)),
            fix: mend.to_owned(),
        }),
    )
}

fn validate_worker(written: &super::raw::RawWorker, complaints: &mut ProblemCollector) -> Option<WorkerConfig> {
    let words = [("refuse", CardNumbers::Refuse), ("warn", CardNumbers::Warn), ("off", CardNumbers::Off)];
    let card_numbers = complaints.parse_choice("worker.card_numbers", &written.card_numbers, &words);
    let drain_ms = complaints.integer_in_range("worker.drain_timeout_ms", written.drain_timeout_ms, 0, 3_600_000);
    Some(WorkerConfig { drain_timeout: Duration::from_millis(u64::from(drain_ms?)), card_numbers: card_numbers? })
}

fn validate_log(written: &super::raw::RawLog, complaints: &mut ProblemCollector) -> Option<LogConfig> {
    use tracing::Level;
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let level = complaints.parse_choice("log.level", &written.level, &levels);
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let format = complaints.parse_choice("log.format", &written.format, &formats);
    Some(LogConfig { level: level?, format: format? })
}
