//! Combinations of keys that are each valid and together lose payments or show them to strangers.
//!
//! Refuses to warn where it can refuse: what stands here stops the start.

use secrecy::ExposeSecret as _;

use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, scheme_and_host};
use super::validated::{OpsConfig, ProblemCollector};
use crate::domain::explain::format::count;
use crate::tls::is_plaintext_allowed;

/// Fewest characters of an `ops.token` that other machines can try.
const TOKEN_CHARS_MIN: usize = 32;

/// What could be meant; `None` has its own complaint already.
pub struct ParsedKeys<'a> {
    pub database: Option<&'a DatabaseUrl>,
    pub queue: Option<&'a QueueUrl>,
    pub limiter: Option<&'a LimiterUrl>,
    pub ops: Option<&'a OpsConfig>,
    pub plaintext_hosts: &'a [String],
}

impl ParsedKeys<'_> {
    /// Whether a host may be spoken to without TLS.
    fn allows_plaintext(&self, host: &str) -> bool {
        is_plaintext_allowed(host, self.plaintext_hosts)
    }
}

/// Adds a complaint per hazard.
pub fn check_all(parts: &ParsedKeys<'_>, complaints: &mut ProblemCollector) {
    if let (Some(QueueUrl::Embedded), Some(DatabaseUrl::Postgres(_))) = (parts.queue, parts.database) {
        let what = "the embedded queue lives in a SQLite database, and database.url is PostgreSQL";
        complaints.add("queue.url", what, "Set queue.url to a broker (amqps://…), or database.url to sqlite://PATH");
    }
    if let Some(ops) = parts.ops {
        check_ops(ops, complaints);
    }
    check_database_tls(parts, complaints);
    check_plaintext(parts, complaints);
}

/// Adds a complaint if other machines reach the ops server without a token, or with one that they could guess.
fn check_ops(ops: &OpsConfig, complaints: &mut ProblemCollector) {
    let Some(listen) = ops.listen.filter(|listen| !listen.ip().is_loopback()) else { return };
    let Some(token) = &ops.token else {
        let what = format!("{listen} is reachable from other machines, and ops.token is not set");
        complaints.add("ops.listen", what, "Set ops.token (SLUICEGATE_OPS__TOKEN_FILE), or listen on 127.0.0.1");
        return;
    };
    let chars = token.expose_secret().chars().count();
    if chars < TOKEN_CHARS_MIN {
        let what = format!(
            "has {}, and {listen} is reachable from other machines: it needs at least {TOKEN_CHARS_MIN}",
            count(chars as u64, "character")
        );
        complaints.add(
            "ops.token",
            what,
            "Use what `openssl rand -hex 24` writes, or set ops.listen to 127.0.0.1:PORT",
        );
    }
}

/// Adds a complaint per host of the database that would be spoken to in plain text, or unverified.
pub fn check_database_tls(parts: &ParsedKeys<'_>, complaints: &mut ProblemCollector) {
    if let Some(database) = parts.database.filter(|database| !database.is_verified()) {
        for host in database.hosts().iter().filter(|host| !parts.allows_plaintext(host)) {
            let mend = plaintext_fix(host, "Add ?sslmode=verify-full");
            complaints.add("database.url", format!("the connection to {host} would not be verified by TLS"), mend);
        }
    }
}

fn check_plaintext(parts: &ParsedKeys<'_>, complaints: &mut ProblemCollector) {
    if let Some(QueueUrl::Amqp(url)) = parts.queue
        && let Some((scheme, host)) = scheme_and_host(url)
        && scheme == "amqp"
        && !parts.allows_plaintext(&host)
    {
        complaints.add(
            "queue.url",
            format!("the connection to {host} would be plain text"),
            plaintext_fix(&host, "Use amqps://"),
        );
    }
    let nodes = parts.limiter.map(LimiterUrl::nodes).unwrap_or_default();
    for (scheme, host) in nodes.iter().filter_map(scheme_and_host) {
        if scheme == "redis" && !parts.allows_plaintext(&host) {
            let what = format!("the connection to {host} would be plain text");
            complaints.add("limiter.url", what, plaintext_fix(&host, "Use rediss:// or rediss+cluster://"));
        }
    }
}

fn plaintext_fix(host: &str, tls: &str) -> String {
    format!("{tls}; or, at your own risk in a private network, add \"{host}\" to tls.plaintext_hosts")
}
