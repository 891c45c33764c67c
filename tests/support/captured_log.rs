//! The log of a test's thread.
//!
//! The tracing library asks, where a line is first logged, only that thread's subscriber while the process has no more
//! than one. Another test, without any, would thus switch the line off for the test that captures it. So a second
//! subscriber lives as long as the process.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};

use tracing::dispatcher::{DefaultGuard, Dispatch};
use tracing::subscriber::{Subscriber, set_default};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;

/// It takes lines alone: a test finds out that nothing takes spans.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::registry().with(filter_fn(|of| of.is_event()))));

/// What was written to the log so far.
#[derive(Clone, Default)]
pub struct LogText(Arc<Mutex<Vec<u8>>>);

impl LogText {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    pub fn lines_with(&self, text: &str) -> Vec<String> {
        self.text().lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }
}

impl Write for LogText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Captures all later lines of this thread while the guard is kept.
pub fn capture_log() -> (LogText, DefaultGuard) {
    capture_with(|log| tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone()).finish())
}

/// Captures what this subscriber writes to the log.
pub fn capture_with<S: Subscriber + Send + Sync>(subscriber: impl FnOnce(LogText) -> S) -> (LogText, DefaultGuard) {
    LazyLock::force(&SECOND_SUBSCRIBER);
    let log = LogText::default();
    let guard = set_default(subscriber(log.clone()));
    (log, guard)
}
