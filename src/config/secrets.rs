//! Where the secrets of a configuration were written: refused as flags, and warned of in files that others may read.
//!
//! Never repeats a value. What every user of the machine may write is refused before, when it is read.

use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
use super::keys::{SECRET_KEYS, variable_name};
use super::layers::{LayeredValue, Layers};
use super::problem::{ConfigProblem, Origin};
use crate::domain::env_variable;
use crate::files::is_world_readable;

/// How to take a secret's file away from others.
pub const FIX_FILE_MODE: &str = "`chmod o-r` it; in Kubernetes set the volume's defaultMode to 0440, and fsGroup";
/// Permission to read for group and others: an administrator's group reads configurations.
const READ_BY_GROUP_OR_OTHERS: u32 = 0o044;

/// Secrets that were given as flags, one problem each.
pub fn secrets_in_flags(layers: &Layers) -> Vec<ConfigProblem> {
    let by_flag = secret_values(layers).filter(|(_, entry)| entry.origin == Origin::Flag);
    let problem = |(key, _): (&'static str, &LayeredValue)| {
        secret_problem(key, &Origin::Flag, "is a secret, and process lists show flags", &own_file_fix(key))
    };
    by_flag.map(problem).collect()
}

/// Secrets in files that others may read, one problem each: nothing that stops a start.
pub fn secrets_readable_by_others(layers: &Layers) -> Vec<ConfigProblem> {
    let judge = |(key, entry): (&'static str, &LayeredValue)| {
        let (Origin::File { path, .. } | Origin::SecretFile { path, .. }) = &entry.origin else { return None };
        let mode = layers.files.iter().find(|file| file.path == *path)?.mode?;
        let (is_exposed, mend) = match entry.origin {
            Origin::SecretFile { .. } => (is_world_readable(mode), FIX_FILE_MODE.to_owned()),
            _ => (
                mode & READ_BY_GROUP_OR_OTHERS != 0,
                format!("{}; or `chmod 600` the configuration file", own_file_fix(key)),
            ),
        };
        let what = format!("is a secret in a file that others on this machine may read: its mode is {mode:03o}");
        is_exposed.then(|| secret_problem(key, &entry.origin, &what, &mend))
    };
    secret_values(layers).filter_map(judge).collect()
}

fn own_file_fix(key: &str) -> String {
    format!("Write it into a file of its own, and set {}{} to its path", variable_name(key), env_variable::FILE_SUFFIX)
}

fn secret_problem(key: &str, origin: &Origin, what: &str, mend: &str) -> ConfigProblem {
    ConfigProblem { key: key.to_owned(), origin: origin.clone(), message: what.to_owned(), fix: mend.to_owned() }
}

/// Keys whose value holds a secret. An address without a password is none.
fn secret_values(layers: &Layers) -> impl Iterator<Item = (&'static str, &LayeredValue)> {
    let entries = SECRET_KEYS.into_iter().filter_map(|key| Some((key, layers.entries.get(key)?)));
    entries.filter(|(key, entry)| entry.value.as_str().is_some_and(|text| is_secret(key, text)))
}

fn is_secret(key: &str, text: &str) -> bool {
    match key {
        "database.url" => match DatabaseUrl::parse(text) {
            Ok(DatabaseUrl::Postgres(url)) => url.holds_secret(),
            // The second is refused for that.
            Ok(DatabaseUrl::Sqlite { .. }) | Err(_) => false,
        },
        "queue.url" => match QueueUrl::parse(text) {
            Ok(QueueUrl::Amqp(url)) => url.holds_secret(),
            Ok(QueueUrl::Embedded) | Err(_) => false,
        },
        "limiter.url" => LimiterUrl::parse(text).is_ok_and(|url| url.nodes().iter().any(SecretUrl::holds_secret)),
        _ => !text.is_empty(),
    }
}
