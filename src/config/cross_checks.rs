//! Checks across configuration keys: combinations of valid values that lose payments or expose them.
//!
//! Each problem found here stops the start. Risky settings that work are warnings of `check`.

use secrecy::ExposeSecret as _;

use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, scheme_and_host};
use super::validated::{OpsConfig, ProblemCollector};
use crate::domain::format::count;
use crate::tls::is_plaintext_allowed;

/// Minimum length of an `ops.token` on an address that other machines can reach, in characters.
const TOKEN_CHARS_MIN: usize = 32;

/// The valid values; `None` already has its own problem.
pub struct ParsedKeys<'a> {
    pub database: Option<&'a DatabaseUrl>,
    pub queue: Option<&'a QueueUrl>,
    pub limiter: Option<&'a LimiterUrl>,
    pub ops: Option<&'a OpsConfig>,
    pub plaintext_hosts: &'a [String],
}

impl ParsedKeys<'_> {
    /// Whether a connection to this host may be without TLS.
    fn allows_plaintext(&self, host: &str) -> bool {
        is_plaintext_allowed(host, self.plaintext_hosts)
    }
}

/// Adds one problem per unsafe combination.
pub fn check_all(parts: &ParsedKeys<'_>, problems: &mut ProblemCollector) {
    if let (Some(QueueUrl::Embedded), Some(DatabaseUrl::Postgres(_))) = (parts.queue, parts.database) {
        let what = "the embedded queue is in a SQLite database, and database.url is PostgreSQL";
        problems.add("queue.url", what, "Set queue.url to a broker (amqps://…), or database.url to sqlite://PATH");
    }
    if let Some(ops) = parts.ops {
        check_ops(ops, problems);
    }
    check_database_tls(parts, problems);
    check_plaintext(parts, problems);
}

/// Adds a problem if other machines can reach the ops server without a token, or with a short one.
fn check_ops(ops: &OpsConfig, problems: &mut ProblemCollector) {
    let Some(listen) = ops.listen.filter(|listen| !listen.ip().is_loopback()) else { return };
    let Some(token) = &ops.token else {
        let what = format!("{listen} is reachable from other machines, and ops.token is not set");
        problems.add("ops.listen", what, "Set ops.token (SLUICEGATE_OPS__TOKEN_FILE), or listen on 127.0.0.1");
        return;
    };
    let chars = token.expose_secret().chars().count();
    if chars < TOKEN_CHARS_MIN {
        let what = format!(
            "has {}, and {listen} is reachable from other machines: it needs at least {TOKEN_CHARS_MIN}",
            count(chars as u64, "character")
        );
        problems.add(
            "ops.token",
            what,
            "Use the output of `openssl rand -hex 24`, or set ops.listen to 127.0.0.1:PORT",
        );
    }
}

/// Adds a problem for each host of the database whose connection would be plain text or unverified.
pub fn check_database_tls(parts: &ParsedKeys<'_>, problems: &mut ProblemCollector) {
    if let Some(database) = parts.database.filter(|database| !database.is_verified()) {
        for host in database.hosts().iter().filter(|host| !parts.allows_plaintext(host)) {
            let fix = plaintext_fix(host, "Add ?sslmode=verify-full");
            problems.add("database.url", format!("the connection to {host} would not be verified by TLS"), fix);
        }
    }
}

fn check_plaintext(parts: &ParsedKeys<'_>, problems: &mut ProblemCollector) {
    if let Some(QueueUrl::Amqp(url)) = parts.queue
        && let Some((scheme, host)) = scheme_and_host(url)
        && scheme == "amqp"
        && !parts.allows_plaintext(&host)
    {
        problems.add(
            "queue.url",
            format!("the connection to {host} would be plain text"),
            plaintext_fix(&host, "Use amqps://"),
        );
    }
    let nodes = parts.limiter.map(LimiterUrl::nodes).unwrap_or_default();
    for (scheme, host) in nodes.iter().filter_map(scheme_and_host) {
        if scheme == "redis" && !parts.allows_plaintext(&host) {
            let what = format!("the connection to {host} would be plain text");
            problems.add("limiter.url", what, plaintext_fix(&host, "Use rediss:// or rediss+cluster://"));
        }
    }
}

fn plaintext_fix(host: &str, tls: &str) -> String {
    format!("{tls}; or, at your own risk in a private network, add \"{host}\" to tls.plaintext_hosts")
}
