//! The configuration as meant: checked values with their types and units.
//!
//! Refuses to stop at the first value that cannot be meant; hazards between keys are `hazards`' part, and are looked for
//! among the values that can be meant even when others cannot.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use super::Purpose;
use super::address::{Bad, DatabaseUrl, LimiterUrl, QueueUrl};
use super::hazards;
use super::problem::Problem;
use super::written::Written;
use crate::domain::sensitive::repeatable::{repeated, repeated_path};
use crate::provider::outbound;
use crate::provider::secret_grants::SecretGrants;
pub use crate::queue::message::CardNumbers;
use crate::tls::Authorities;

/// What examples have where a secret shall be.
const PLACEHOLDERS: [&str; 4] = ["random-characters", "changeme", "change-me", "placeholder"];

/// All that a process is told from outside, apart from provider rows.
#[derive(Clone, Debug)]
pub struct Config {
    pub database: Database,
    pub queue: Queue,
    pub limiter: Limiter,
    /// Entries of `outbound.allow`, as written.
    pub outbound_allow: Vec<String>,
    /// Of `outbound.secrets`.
    pub outbound_secrets: SecretGrants,
    /// The files that keys were read from.
    pub own_files: Vec<PathBuf>,
    /// Secrets in files that others on this machine may read.
    pub exposed: Vec<Problem>,
    pub ops: Ops,
    pub worker: Worker,
    /// Age at which payload and request body of settled jobs are emptied.
    pub scrub_after: Duration,
    /// `None`: never.
    pub scrub_review_after: Option<Duration>,
    /// Of `tls.ca_file`, read once.
    pub authorities: Authorities,
    /// Host names that may be spoken to without TLS.
    pub plaintext_hosts: Vec<String>,
    pub log: Log,
    /// Of a collector that spans are sent to; never there in a build without the feature `otlp`.
    pub otlp_endpoint: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Database {
    pub url: DatabaseUrl,
    /// Per process, 1–1000.
    pub max_connections: u32,
}

#[derive(Clone, Debug)]
pub struct Queue {
    pub url: QueueUrl,
    pub prefix: String,
}

#[derive(Clone, Debug)]
pub struct Limiter {
    pub url: LimiterUrl,
    pub prefix: String,
}

#[derive(Clone, Debug)]
pub struct Ops {
    /// `None`: no ops server.
    pub listen: Option<SocketAddr>,
    pub token: Option<SecretString>,
}

#[derive(Clone, Debug)]
pub struct Worker {
    pub drain_timeout: Duration,
    pub card_numbers: CardNumbers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
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
pub struct Complaints(pub Vec<(&'static str, Bad)>);

impl Complaints {
    pub fn add(&mut self, key: &'static str, what: impl Into<String>, mend: impl Into<String>) {
        self.0.push((key, Bad { what: what.into(), mend: mend.into() }));
    }

    fn keep<T>(&mut self, key: &'static str, result: Result<T, Bad>) -> Option<T> {
        result.map_err(|bad| self.0.push((key, bad))).ok()
    }

    fn whole(&mut self, key: &'static str, value: i64, low: u32, high: u32) -> Option<u32> {
        let fits = u32::try_from(value).ok().filter(|value| (low..=high).contains(value));
        if fits.is_none() {
            self.add(key, format!("is {value}"), format!("Use a number from {low} to {high}"));
        }
        fits
    }

    fn prefix(&mut self, key: &'static str, text: &str, marks: &str) -> Option<String> {
        // RabbitMQ keeps names that begin with `amq.` for itself.
        let fits = !text.starts_with("amq.")
            && (1..=63).contains(&text.len())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || marks.contains(c));
        if !fits {
            self.add(
                key,
                format!("{} cannot begin a name", repeated(text)),
                format!("Use 1 to 63 of A-Z a-z 0-9 {marks}, not beginning with amq."),
            );
        }
        fits.then(|| text.to_owned())
    }

    fn word<T: Copy>(&mut self, key: &'static str, text: &str, words: &[(&str, T)]) -> Option<T> {
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
        if found.is_none() {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.add(
                key,
                format!("{} is none of its words", repeated(text)),
                format!("Use one of: {}", words.join(", ")),
            );
        }
        found
    }
}

fn days_long(days: u32) -> Duration {
    Duration::from_secs(u64::from(days) * 86_400)
}

/// Translates every key; `None` when any of them complained.
pub fn translate(written: &Written, purpose: Purpose, complaints: &mut Complaints) -> Option<Config> {
    let database = translate_database(&written.database, complaints);
    let queue_url = complaints.keep("queue.url", QueueUrl::parse(&written.queue.url));
    let queue_prefix = complaints.prefix("queue.prefix", &written.queue.prefix, "_.-");
    let limiter_url = complaints.keep("limiter.url", LimiterUrl::parse(&written.limiter.url));
    // Braces would move Redis' hash tag, and with it the keys, to other slots.
    let limiter_prefix = complaints.prefix("limiter.prefix", &written.limiter.prefix, "_.:-");
    let ops = translate_ops(&written.ops, complaints);
    let worker = translate_worker(&written.worker, complaints);
    let days = complaints.whole("ledger.scrub_after_days", written.ledger.scrub_after_days, 1, 3_650);
    let review_days =
        complaints.whole("ledger.scrub_review_after_days", written.ledger.scrub_review_after_days, 0, 3_650);
    for (key, items) in
        [("outbound.allow", &written.outbound.allow), ("tls.plaintext_hosts", &written.tls.plaintext_hosts)]
    {
        if items.iter().any(|item| item.trim().is_empty() || item.contains('*')) {
            complaints.add(key, "has an empty entry or a wildcard", "Name each entry in full");
        } else if key == "outbound.allow" {
            translate_targets(items, complaints);
        }
    }
    let outbound_secrets = translate_secrets(&written.outbound.secrets, complaints);
    let authorities = translate_authorities(&written.tls.ca_file, complaints);
    let log = translate_log(&written.log, complaints);
    let otlp_endpoint = super::otlp::translate(&written.telemetry, &written.tls.plaintext_hosts, complaints);
    let parts = hazards::Parts {
        database: database.as_ref().map(|database| &database.url),
        queue: queue_url.as_ref(),
        limiter: limiter_url.as_ref(),
        ops: ops.as_ref(),
        plaintext_hosts: &written.tls.plaintext_hosts,
    };
    match purpose {
        Purpose::Work => hazards::find(&parts, complaints),
        Purpose::Migration => hazards::find_in_database(&parts, complaints),
    }
    Some(Config {
        database: database?,
        queue: Queue { url: queue_url?, prefix: queue_prefix? },
        limiter: Limiter { url: limiter_url?, prefix: limiter_prefix? },
        outbound_allow: written.outbound.allow.clone(),
        outbound_secrets: outbound_secrets?,
        own_files: Vec::new(),
        exposed: Vec::new(),
        ops: ops?,
        worker: worker?,
        scrub_after: days_long(days?),
        scrub_review_after: review_days.map(|days| (days > 0).then(|| days_long(days)))?,
        authorities: authorities?,
        plaintext_hosts: written.tls.plaintext_hosts.clone(),
        log: log?,
        otlp_endpoint: otlp_endpoint?,
    })
}

fn translate_database(written: &super::written::Database, complaints: &mut Complaints) -> Option<Database> {
    let url = complaints.keep("database.url", DatabaseUrl::parse(&written.url));
    let max_connections = complaints.whole("database.max_connections", written.max_connections, 1, 1_000);
    Some(Database { url: url?, max_connections: max_connections? })
}

fn translate_ops(written: &super::written::Ops, complaints: &mut Complaints) -> Option<Ops> {
    let text = written.listen.replacen("localhost:", "127.0.0.1:", 1);
    let listen = match text.as_str() {
        "none" => Some(None),
        text => text.parse().map(Some).ok(),
    };
    if listen.is_none() {
        let what = format!("{} is not an address", repeated(&written.listen));
        complaints.add("ops.listen", what, "Write IP:PORT, like 127.0.0.1:9464 or [::1]:9464, or `none`");
    }
    let sendable = written.token.bytes().all(|byte| byte.is_ascii_graphic());
    if !sendable {
        let what = "holds characters that a header cannot carry";
        complaints.add("ops.token", what, "Use visible ASCII characters without spaces");
    }
    let is_secret = written.token.is_empty()
        || !sendable
        || placeholder(&written.token).is_none_or(|what| {
            complaints.add("ops.token", what, "Use what `openssl rand -hex 24` writes");
            false
        });
    let token = (!written.token.is_empty()).then(|| SecretString::from(written.token.as_str()));
    (sendable && is_secret).then_some(Ops { listen: listen?, token })
}

/// A placeholder is known to whoever has read the example.
fn placeholder(token: &str) -> Option<&'static str> {
    let lower = token.to_ascii_lowercase();
    PLACEHOLDERS.iter().any(|words| lower.contains(words)).then_some("is the placeholder of an example")
}

fn translate_targets(entries: &[String], complaints: &mut Complaints) {
    if let Err(problems) = outbound::judge(entries) {
        let mend = "Write each as loopback, host:port, a CIDR like 10.0.0.0/8, or http://host:port";
        complaints.add("outbound.allow", problems.join("; "), mend);
    }
}

fn translate_secrets(entries: &[String], complaints: &mut Complaints) -> Option<SecretGrants> {
    let mend = "Write each as env:NAME@HOST or file:/PATH@HOST, like env:STRIPE_KEY@api.stripe.com or file:/run/secrets/adyen@*.adyen.com";
    let grants = SecretGrants::parse(entries);
    complaints
        .keep("outbound.secrets", grants.map_err(|problems| Bad { what: problems.join("; "), mend: mend.to_owned() }))
}

fn translate_authorities(path: &str, complaints: &mut Complaints) -> Option<Authorities> {
    if path.is_empty() {
        return Some(Authorities::default());
    }
    let path = Path::new(path);
    let read = Authorities::read(path);
    let mend = "Name a PEM file with the certificates of your authorities that this process's user may read";
    complaints.keep(
        "tls.ca_file",
        read.map_err(|problem| Bad { what: format!("{} {problem}", repeated_path(path)), mend: mend.to_owned() }),
    )
}

fn translate_worker(written: &super::written::Worker, complaints: &mut Complaints) -> Option<Worker> {
    let words = [("refuse", CardNumbers::Refuse), ("warn", CardNumbers::Warn), ("off", CardNumbers::Off)];
    let card_numbers = complaints.word("worker.card_numbers", &written.card_numbers, &words);
    let drain_ms = complaints.whole("worker.drain_timeout_ms", written.drain_timeout_ms, 0, 3_600_000);
    Some(Worker { drain_timeout: Duration::from_millis(u64::from(drain_ms?)), card_numbers: card_numbers? })
}

fn translate_log(written: &super::written::Log, complaints: &mut Complaints) -> Option<Log> {
    use tracing::Level;
    let levels = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let level = complaints.word("log.level", &written.level, &levels);
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let format = complaints.word("log.format", &written.format, &formats);
    Some(Log { level: level?, format: format? })
}
