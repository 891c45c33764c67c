//! The validated configuration: the value of each key of `config/default.toml`, checked, with its type and unit.
//!
//! Validation reports every invalid value, not only the first. [`cross_checks`] looks at combinations of the valid
//! ones, even if other values are invalid.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;
use toml::{Table, Value};

use crate::config::address::{DatabaseUrl, LimiterUrl, QueueUrl, ValueProblem};
use crate::config::layers::LayeredValue;
use crate::config::people::{self, PeopleConfig};
use crate::config::{ConfigProblem, Purpose, cross_checks};
use crate::domain::sensitive::secret::{path_if_safe, quote_if_safe};
use crate::provider::secret_grants::SecretGrants;
use crate::provider::validate_outbound;
pub use crate::queue::message::CardNumbers;
use crate::tls::{Authorities, is_plaintext_allowed};

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
    /// Open jobs of a lane at which it takes in no more.
    pub max_open_jobs: u32,
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
    pub people: PeopleConfig,
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

/// The values of the layers, read key by key, and their problems.
pub struct KeyValidator<'a> {
    entries: &'a BTreeMap<String, LayeredValue>,
    pub problems: Vec<(&'static str, ValueProblem)>,
}

impl<'a> KeyValidator<'a> {
    pub fn new(entries: &'a BTreeMap<String, LayeredValue>) -> Self {
        Self { entries, problems: Vec::new() }
    }

    pub fn add(&mut self, key: &'static str, message: impl Into<String>, fix: impl Into<String>) {
        self.problems.push((key, ValueProblem { message: message.into(), fix: fix.into() }));
    }

    fn value_or_add<T>(&mut self, key: &'static str, result: Result<T, ValueProblem>) -> Option<T> {
        result.map_err(|problem| self.problems.push((key, problem))).ok()
    }

    /// A value of the default's type, which the layers have checked.
    fn value<T>(&mut self, key: &'static str, read: impl FnOnce(&'a Value) -> Option<T>) -> Option<T> {
        let value = self.entries.get(key).and_then(|entry| read(&entry.value));
        if value.is_none() {
            self.add(key, "is not in the defaults", "This build is broken: config/default.toml and the code disagree");
        }
        value
    }

    pub fn text(&mut self, key: &'static str) -> &'a str {
        self.value(key, Value::as_str).unwrap_or_default()
    }

    pub fn texts(&mut self, key: &'static str) -> Vec<String> {
        let items = self.value(key, Value::as_array).map(Vec::as_slice).unwrap_or_default();
        items.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// The tables of a key that holds nothing else.
    pub fn tables(&mut self, key: &'static str) -> impl Iterator<Item = &'a Table> + use<'a> {
        let items = self.value(key, Value::as_array).map(Vec::as_slice).unwrap_or_default();
        items.iter().filter_map(Value::as_table)
    }

    fn integer(&mut self, key: &'static str, range: RangeInclusive<u32>) -> Option<u32> {
        let value = self.value(key, Value::as_integer)?;
        let fits = u32::try_from(value).ok().filter(|value| range.contains(value));
        if fits.is_none() {
            self.add(key, format!("is {value}"), format!("Use a number from {} to {}", range.start(), range.end()));
        }
        fits
    }

    fn prefix(&mut self, key: &'static str, punctuation: &str) -> Option<String> {
        let text = self.text(key);
        // RabbitMQ reserves names that begin with `amq.`.
        let fits = !text.starts_with("amq.")
            && (1..=63).contains(&text.len())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || punctuation.contains(c));
        if !fits {
            let what = format!("{} cannot begin a name", quote_if_safe(text));
            self.add(key, what, format!("Use 1 to 63 of A-Z a-z 0-9 {punctuation}, not beginning with amq."));
        }
        fits.then(|| text.to_owned())
    }

    pub fn choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(key);
        let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let what = format!("{} is not a valid value", quote_if_safe(text));
            self.add(key, what, format!("Use one of: {}", names.join(", ")));
        }
        found
    }
}

fn duration_of_days(days: u32) -> Duration {
    Duration::from_secs(u64::from(days) * 86_400)
}

/// Validates every key; `None` if a key has a problem.
pub fn validate(purpose: Purpose, keys: &mut KeyValidator<'_>) -> Option<Config> {
    let database_url = DatabaseUrl::parse(keys.text("database.url"));
    let database_url = keys.value_or_add("database.url", database_url);
    let max_connections = keys.integer("database.max_connections", 1..=1_000);
    let queue_url = QueueUrl::parse(keys.text("queue.url"));
    let queue_url = keys.value_or_add("queue.url", queue_url);
    let queue_prefix = keys.prefix("queue.prefix", "_.-");
    let limiter_url = LimiterUrl::parse(keys.text("limiter.url"));
    let limiter_url = keys.value_or_add("limiter.url", limiter_url);
    // Braces would change Redis' hash tag, and move the keys to other slots.
    let limiter_prefix = keys.prefix("limiter.prefix", "_.:-");
    let ops = validate_ops(keys);
    let max_open_jobs = keys.integer("intake.max_open_jobs", 1..=100_000_000);
    let worker = validate_worker(keys);
    let days = keys.integer("ledger.scrub_after_days", 1..=3_650);
    let review_days = keys.integer("ledger.scrub_review_after_days", 0..=3_650);
    let outbound_allow = keys.texts("outbound.allow");
    let plaintext_hosts = keys.texts("tls.plaintext_hosts");
    for (key, items) in [("outbound.allow", &outbound_allow), ("tls.plaintext_hosts", &plaintext_hosts)] {
        if items.iter().any(|item| item.trim().is_empty() || item.contains('*')) {
            keys.add(key, "has an empty entry or a wildcard", "Name each entry in full");
        } else if key == "outbound.allow" {
            validate_targets(items, keys);
        }
    }
    let outbound_secrets = validate_secrets(keys);
    let authorities = validate_authorities(keys);
    let log = validate_log(keys);
    let otlp_endpoint = validate_otlp_endpoint(&plaintext_hosts, keys);
    let parts = cross_checks::ParsedKeys {
        database: database_url.as_ref(),
        queue: queue_url.as_ref(),
        limiter: limiter_url.as_ref(),
        ops: ops.as_ref(),
        plaintext_hosts: &plaintext_hosts,
    };
    match purpose {
        Purpose::Run => cross_checks::check_all(&parts, keys),
        Purpose::Migrate => cross_checks::check_database_tls(&parts, keys),
    }
    Some(Config {
        database: DatabaseConfig { url: database_url?, max_connections: max_connections? },
        queue: QueueConfig { url: queue_url?, prefix: queue_prefix? },
        limiter: LimiterConfig { url: limiter_url?, prefix: limiter_prefix? },
        outbound_allow,
        outbound_secrets: outbound_secrets?,
        config_files: Vec::new(),
        exposed_secrets: Vec::new(),
        ops: ops?,
        max_open_jobs: max_open_jobs?,
        worker: worker?,
        scrub_after: duration_of_days(days?),
        scrub_review_after: review_days.map(|days| (days > 0).then(|| duration_of_days(days)))?,
        authorities: authorities?,
        plaintext_hosts,
        log: log?,
        otlp_endpoint: otlp_endpoint?,
    })
}

fn validate_ops(keys: &mut KeyValidator<'_>) -> Option<OpsConfig> {
    let people = people::validate(keys);
    let (address, token) = (keys.text("ops.listen"), keys.text("ops.token"));
    let listen = match address.replacen("localhost:", "127.0.0.1:", 1).as_str() {
        "none" => Some(None),
        text => text.parse().map(Some).ok(),
    };
    if listen.is_none() {
        let what = format!("{} is not an address", quote_if_safe(address));
        keys.add("ops.listen", what, "Write IP:PORT, like 127.0.0.1:9464 or [::1]:9464, or `none`");
    }
    if let Some(what) = unusable_token(token) {
        keys.add("ops.token", what, "Use the output of `openssl rand -hex 24`");
        return None;
    }
    Some(OpsConfig { listen: listen?, token: (!token.is_empty()).then(|| SecretString::from(token)), people: people? })
}

/// Why no token can be this text. Every reader of an example knows its placeholder.
pub fn unusable_token(token: &str) -> Option<&'static str> {
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some("contains characters that a header cannot carry");
    }
    let lower = token.to_ascii_lowercase();
    PLACEHOLDERS.iter().any(|placeholder| lower.contains(placeholder)).then_some("is the placeholder of an example")
}

fn validate_targets(entries: &[String], keys: &mut KeyValidator<'_>) {
    if let Err(problems) = validate_outbound(entries) {
        let fix = "Write each as loopback, host:port, a CIDR like 10.0.0.0/8, or http://host:port";
        keys.add("outbound.allow", problems.join("; "), fix);
    }
}

fn validate_secrets(keys: &mut KeyValidator<'_>) -> Option<SecretGrants> {
    let fix = "Write each as env:NAME@HOST or file:/PATH@HOST, like env:STRIPE_KEY@api.stripe.com or file:/run/secrets/adyen@*.adyen.com";
    let grants = SecretGrants::parse(&keys.texts("outbound.secrets"));
    grants.map_err(|problems| keys.add("outbound.secrets", problems.join("; "), fix)).ok()
}

fn validate_authorities(keys: &mut KeyValidator<'_>) -> Option<Authorities> {
    let path = Path::new(keys.text("tls.ca_file"));
    if path.as_os_str().is_empty() {
        return Some(Authorities::default());
    }
    let fix = "Name a PEM file with the certificates of your authorities that this process's user may read";
    let read = Authorities::read(path);
    read.map_err(|problem| keys.add("tls.ca_file", format!("{} {problem}", path_if_safe(path)), fix)).ok()
}

fn validate_worker(keys: &mut KeyValidator<'_>) -> Option<WorkerConfig> {
    let choices = [("refuse", CardNumbers::Refuse), ("warn", CardNumbers::Warn), ("off", CardNumbers::Off)];
    let card_numbers = keys.choice("worker.card_numbers", &choices);
    let drain_ms = keys.integer("worker.drain_timeout_ms", 0..=3_600_000);
    Some(WorkerConfig { drain_timeout: Duration::from_millis(u64::from(drain_ms?)), card_numbers: card_numbers? })
}

fn validate_log(keys: &mut KeyValidator<'_>) -> Option<LogConfig> {
    use tracing::Level;
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let level = keys.choice("log.level", &levels);
    let format = keys.choice("log.format", &[("text", LogFormat::Text), ("json", LogFormat::Json)]);
    Some(LogConfig { level: level?, format: format? })
}

const OTLP_KEY: &str = "telemetry.otlp_endpoint";

/// Validates the address that spans are sent to. Plain text to other machines is rejected, because spans tell who pays
/// whom when. `Some(None)`: no spans are sent. `None`: a problem was added.
fn validate_otlp_endpoint(plaintext_hosts: &[String], keys: &mut KeyValidator<'_>) -> Option<Option<String>> {
    let text = keys.text(OTLP_KEY);
    if text == "none" {
        return Some(None);
    }
    if !cfg!(feature = "otlp") {
        let what = "is set, and this build has no OpenTelemetry";
        keys.add(OTLP_KEY, what, "Build with `cargo build --release --features otlp`, or set it to `none`");
        return None;
    }
    let url = url::Url::parse(text).ok().filter(|url| {
        let is_bare = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && is_bare && url.fragment().is_none()
    });
    let Some((scheme, host)) = url.as_ref().and_then(|url| Some((url.scheme(), url.host_str()?))) else {
        let fix = "Write http://127.0.0.1:4318 or https://HOST, or `none`";
        keys.add(OTLP_KEY, "is not the address of a collector", fix);
        return None;
    };
    if scheme == "http" && !is_plaintext_allowed(host, plaintext_hosts) {
        let what = format!("the connection to {host} would be plain text");
        keys.add(OTLP_KEY, what, format!("Use https://; or add \"{host}\" to tls.plaintext_hosts at your own risk"));
        return None;
    }
    Some(Some(text.to_owned()))
}
