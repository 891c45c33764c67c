//! Repeated log lines: one of each kind a minute, and the number of the others.
//!
//! While the database fails over, hundreds of payments and a dozen tasks fail for the same cause. [`OutageLineFilter`]
//! leaves one warning of each cause, whatever failed for it, in whatever module. Errors stay: some of them are the only
//! record of an outcome.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

/// How the texts of errors begin whose cause is the backend, with the backend.
const CAUSES: [(&str, &str); 7] = [
    ("database unavailable", "database"),
    ("the database ", "database"),
    ("broker unavailable", "queue"),
    ("publish not confirmed", "queue"),
    ("the broker blocks", "queue"),
    ("limiter store unavailable", "limiter"),
    ("the limiter cannot be asked", "limiter"),
];

/// How lines begin that each quota has after a fail-over of the limiter's store.
const FAILED_OVER: [&str; 2] = ["the limiter leader has changed", "the limiter store was replaced"];

/// The backend that is the cause, and the error's text without its numbers.
type OutageLine = (&'static str, String);

static OUTAGE_LINES: LazyLock<RepeatedLines<OutageLine>> = LazyLock::new(RepeatedLines::default);

#[derive(Clone, Copy, Debug)]
struct Logged {
    at: Instant,
    /// Lines that were not logged since.
    suppressed: u64,
}

/// When each kind of line was last logged.
#[derive(Debug)]
pub struct RepeatedLines<K>(Mutex<BTreeMap<K, Logged>>);

impl<K> Default for RepeatedLines<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Clone + Ord> RepeatedLines<K> {
    /// Whether the line is to be logged now. If not, it is counted.
    pub fn admits(&self, kind: K) -> bool {
        let mut admitted = false;
        let mut kinds = self.0.lock();
        let logged = kinds.entry(kind).or_insert_with(|| {
            admitted = true;
            Logged { at: Instant::now(), suppressed: 0 }
        });
        if !admitted {
            logged.suppressed += 1;
        }
        admitted
    }

    /// The number of suppressed lines of each kind whose last line is at least this old. They count as logged now.
    pub fn take_suppressed(&self, at_least: Duration) -> Vec<(K, u64)> {
        let mut kinds = self.0.lock();
        let is_due = |logged: &Logged| logged.at.elapsed() >= at_least;
        kinds.retain(|_, logged| logged.suppressed > 0 || !is_due(logged));
        let due = kinds.iter_mut().filter(|(_, logged)| logged.suppressed > 0 && is_due(logged));
        due.map(|(kind, logged)| {
            let count = logged.suppressed;
            *logged = Logged { at: Instant::now(), suppressed: 0 };
            (kind.clone(), count)
        })
        .collect()
    }
}

/// Leaves out repeated lines about an unavailable backend, and lines of libraries about what is no fault.
pub struct OutageLineFilter;

impl<S> Filter<S> for OutageLineFilter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() == Level::WARN && metadata.target().starts_with("sluicegate") {
            let mut texts = Texts::default();
            event.record(&mut texts);
            return texts.outage.is_none_or(|outage| OUTAGE_LINES.admits(outage));
        }
        if *metadata.level() == Level::ERROR && metadata.target() == "lapin::channel" {
            let mut texts = Texts::default();
            event.record(&mut texts);
            // The broker closes the channel on which a queue or an exchange is used that does not exist yet.
            return !texts.is_missing;
        }
        true
    }
}

/// The fields of one line, as far as they tell its kind.
#[derive(Default)]
struct Texts {
    outage: Option<OutageLine>,
    is_missing: bool,
}

impl Visit for Texts {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.is_missing |= text.contains("NOT_FOUND - no ");
        let outage = if field.name() == "message" { failed_over(&text) } else { outage(&text) };
        self.outage = self.outage.take().or(outage);
    }
}

/// The kind of a line with this error; `None`: no backend is its cause.
fn outage(error: &str) -> Option<OutageLine> {
    let (_, backend) = CAUSES.into_iter().find(|(begins, _)| error.starts_with(begins))?;
    let words: Vec<&str> = error.split(' ').map(|word| if word.parse::<u64>().is_ok() { "N" } else { word }).collect();
    Some((backend, words.join(" ")))
}

fn failed_over(message: &str) -> Option<OutageLine> {
    FAILED_OVER.into_iter().find(|begins| message.starts_with(begins)).map(|begins| ("limiter", begins.to_owned()))
}

/// Logs the number of suppressed lines about unavailable backends, for kinds whose last line is at least this old.
pub fn log_suppressed(at_least: Duration) {
    for ((backend, cause), count) in OUTAGE_LINES.take_suppressed(at_least) {
        tracing::warn!(backend, count, "similar lines suppressed: {cause}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cause_is_one_kind_of_line() {
        let busy = |seconds| outage(&format!("database unavailable: every connection was busy for {seconds} s"));
        assert_eq!(busy(3), busy(10));
        assert_eq!(busy(3).unwrap().1, "database unavailable: every connection was busy for N s");
        let ended = outage("database unavailable: terminating connection (SQLSTATE 57P01)");
        assert_ne!(ended, busy(3));
        assert_ne!(outage("broker unavailable: x"), outage("database unavailable: x"));
        assert_eq!(outage("amount: must be above 0"), None);
        let changed =
            failed_over("the limiter leader has changed: it grants once no permit of the former one can start");
        assert_eq!(changed.unwrap().1, "the limiter leader has changed");
    }
}
