//! Checks across configuration keys: combinations of valid values that lose payments or expose them, and where secrets
//! are set.
//!
//! Each problem found here stops the start. Risky settings that work are warnings of `check`, such as a secret in a file
//! that others may read. No problem repeats a secret. A file that every user may write is rejected earlier, when it is
//! read.

use secrecy::ExposeSecret as _;

use crate::config::address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl, scheme_and_host};
use crate::config::layers::{LayeredValue, Layers, SECRET_KEYS, variable_name};
use crate::config::people::TOKEN_CHARS_MIN;
use crate::config::validated::{KeyValidator, OpsConfig};
use crate::config::{ConfigProblem, Origin};
use crate::domain::format::count;
use crate::domain::names::ENV_FILE_SUFFIX;
use crate::files::is_world_readable;
use crate::tls::is_plaintext_allowed;

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
pub fn check_all(parts: &ParsedKeys<'_>, problems: &mut KeyValidator<'_>) {
    check_door(parts, problems);
    if let Some(ops) = parts.ops {
        check_ops(ops, problems);
    }
    check_database_tls(parts, problems);
    check_plaintext(parts, problems);
}

/// Adds a problem if `queue.url` names the kind of database that `database.url` does not.
fn check_door(parts: &ParsedKeys<'_>, problems: &mut KeyValidator<'_>) {
    match (parts.queue, parts.database) {
        (Some(QueueUrl::Embedded), Some(DatabaseUrl::Postgres(_))) => {
            let what = "embedded: records payments in a SQLite database, and database.url is PostgreSQL";
            problems.add("queue.url", what, "Set queue.url to database:, or to a broker (amqps://…)");
        }
        (Some(QueueUrl::Database), Some(DatabaseUrl::Sqlite { .. })) => {
            let what = "database: records payments in PostgreSQL, and database.url is SQLite";
            problems.add("queue.url", what, "Set queue.url to embedded:, or database.url to postgres://…");
        }
        _ => {}
    }
}

/// Adds a problem if other machines can reach the ops server without a token, or with a short one.
fn check_ops(ops: &OpsConfig, problems: &mut KeyValidator<'_>) {
    let Some(listen) = ops.listen.filter(|listen| !listen.ip().is_loopback()) else { return };
    let Some(token) = &ops.token else {
        // A proxy is trusted by its address: it does not leave the server open.
        if ops.people.tokens.is_empty() && ops.people.proxy.is_none() {
            let what =
                format!("{listen} is reachable from other machines, and neither ops.token nor ops.tokens is set");
            problems.add("ops.listen", what, "Set ops.token (SLUICEGATE_OPS__TOKEN_FILE), or listen on 127.0.0.1");
        }
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
pub fn check_database_tls(parts: &ParsedKeys<'_>, problems: &mut KeyValidator<'_>) {
    if let Some(database) = parts.database.filter(|database| !database.is_verified()) {
        for host in database.hosts().iter().filter(|host| !parts.allows_plaintext(host)) {
            let fix = plaintext_fix(host, "Add ?sslmode=verify-full");
            problems.add("database.url", format!("the connection to {host} would not be verified by TLS"), fix);
        }
    }
}

fn check_plaintext(parts: &ParsedKeys<'_>, problems: &mut KeyValidator<'_>) {
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

/// The fix for a secret's file that other users can read.
pub const FIX_FILE_MODE: &str = "`chmod o-r` it; in Kubernetes set the volume's defaultMode to 0440, and fsGroup";
/// Read permission of group and others, for configuration files: an administrator's group may read those without
/// secrets.
const READ_BY_GROUP_OR_OTHERS: u32 = 0o044;

/// Secrets in flags, one problem each.
pub fn secrets_in_flags(layers: &Layers) -> Vec<ConfigProblem> {
    let by_flag = secret_values(layers).filter(|(_, entry)| entry.origin == Origin::Flag);
    let problem = |(key, _): (&'static str, &LayeredValue)| {
        secret_problem(key, &Origin::Flag, "is a secret, and process lists show flags", &own_file_fix(key))
    };
    by_flag.map(problem).collect()
}

/// Secrets in files that other users may read, one problem each. They do not stop a start.
pub fn secrets_readable_by_others(layers: &Layers) -> Vec<ConfigProblem> {
    let check_entry = |(key, entry): (&'static str, &LayeredValue)| {
        let (Origin::File { path, .. } | Origin::SecretFile { path, .. }) = &entry.origin else { return None };
        let mode = layers.files.iter().find(|file| file.path == *path)?.mode?;
        let (is_exposed, fix) = match entry.origin {
            Origin::SecretFile { .. } => (is_world_readable(mode), FIX_FILE_MODE.to_owned()),
            _ => (
                mode & READ_BY_GROUP_OR_OTHERS != 0,
                format!("{}; or `chmod 600` the configuration file", own_file_fix(key)),
            ),
        };
        let what = format!("is a secret in a file that others on this machine may read: its mode is {mode:03o}");
        is_exposed.then(|| secret_problem(key, &entry.origin, &what, &fix))
    };
    secret_values(layers).filter_map(check_entry).collect()
}

fn own_file_fix(key: &str) -> String {
    format!("Write it into its own file, and set {}{} to the path", variable_name(key), ENV_FILE_SUFFIX)
}

fn secret_problem(key: &str, origin: &Origin, message: &str, fix: &str) -> ConfigProblem {
    ConfigProblem { key: key.to_owned(), origin: origin.clone(), message: message.to_owned(), fix: fix.to_owned() }
}

/// Keys whose value contains a secret. An address without a password has none.
fn secret_values(layers: &Layers) -> impl Iterator<Item = (&'static str, &LayeredValue)> {
    let entries = SECRET_KEYS.into_iter().filter_map(|key| Some((key, layers.entries.get(key)?)));
    entries.filter(|(key, entry)| entry.value.as_str().is_some_and(|text| is_secret(key, text)))
}

fn is_secret(key: &str, text: &str) -> bool {
    match key {
        "database.url" => match DatabaseUrl::parse(text) {
            Ok(DatabaseUrl::Postgres(url)) => url.holds_secret(),
            // An invalid address has its own problem.
            Ok(DatabaseUrl::Sqlite { .. }) | Err(_) => false,
        },
        "queue.url" => match QueueUrl::parse(text) {
            Ok(QueueUrl::Amqp(url)) => url.holds_secret(),
            Ok(QueueUrl::Embedded | QueueUrl::Database) | Err(_) => false,
        },
        "limiter.url" => LimiterUrl::parse(text).is_ok_and(|url| url.nodes().iter().any(SecretUrl::holds_secret)),
        _ => !text.is_empty(),
    }
}
