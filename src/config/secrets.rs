//! Where the secrets of a configuration were written: refused as flags, and warned of in files that others may read.
//!
//! Never repeats a value. What every user of the machine may write is refused before, when it is read.

use super::address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
use super::keys::{SECRET_KEYS, variable_of};
use super::layers::{Entry, Layers};
use super::problem::{Origin, Problem};
use crate::domain::variable;
use crate::files::is_read_by_others;

/// How to take a secret's file away from others.
pub const CLOSE_TO_OTHERS: &str = "`chmod o-r` it; in Kubernetes set the volume's defaultMode to 0440, and fsGroup";
/// Permission to read for group and others: an administrator's group reads configurations.
const READ_BY_GROUP_OR_OTHERS: u32 = 0o044;

/// Secrets that were given as flags, one problem each.
pub fn in_flags(layers: &Layers) -> Vec<Problem> {
    let by_flag = secrets(layers).filter(|(_, entry)| entry.origin == Origin::Flag);
    let problem = |(key, _): (&'static str, &Entry)| {
        problem(key, &Origin::Flag, "is a secret, and process lists show flags", &own_file(key))
    };
    by_flag.map(problem).collect()
}

/// Secrets in files that others may read, one problem each: nothing that stops a start.
pub fn readable_by_others(layers: &Layers) -> Vec<Problem> {
    let judge = |(key, entry): (&'static str, &Entry)| {
        let (Origin::File { path, .. } | Origin::SecretFile { path, .. }) = &entry.origin else { return None };
        let mode = layers.files.iter().find(|file| file.path == *path)?.mode?;
        let (is_exposed, mend) = match entry.origin {
            Origin::SecretFile { .. } => (is_read_by_others(mode), CLOSE_TO_OTHERS.to_owned()),
            _ => (
                mode & READ_BY_GROUP_OR_OTHERS != 0,
                format!("{}; or `chmod 600` the configuration file", own_file(key)),
            ),
        };
        let what = format!("is a secret in a file that others on this machine may read: its mode is {mode:03o}");
        is_exposed.then(|| problem(key, &entry.origin, &what, &mend))
    };
    secrets(layers).filter_map(judge).collect()
}

fn own_file(key: &str) -> String {
    format!("Write it into a file of its own, and set {}{} to its path", variable_of(key), variable::OF_FILE)
}

fn problem(key: &str, origin: &Origin, what: &str, mend: &str) -> Problem {
    Problem { key: key.to_owned(), origin: origin.clone(), what: what.to_owned(), mend: mend.to_owned() }
}

/// Keys whose value holds a secret. An address without a password is none.
fn secrets(layers: &Layers) -> impl Iterator<Item = (&'static str, &Entry)> {
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
