//! Checks of where the secrets of a configuration are set: flags are rejected, and readable files give a warning.
//!
//! No problem repeats a value. A file that every user may write is rejected earlier, when it is read.

use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
use super::keys::{SECRET_KEYS, variable_name};
use super::layers::{LayeredValue, Layers};
use super::problem::{ConfigProblem, Origin};
use crate::domain::names::ENV_FILE_SUFFIX;
use crate::files::is_world_readable;

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
            Ok(QueueUrl::Embedded) | Err(_) => false,
        },
        "limiter.url" => LimiterUrl::parse(text).is_ok_and(|url| url.nodes().iter().any(SecretUrl::holds_secret)),
        _ => !text.is_empty(),
    }
}
