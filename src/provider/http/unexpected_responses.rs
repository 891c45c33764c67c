//! Log of unexpected responses: bytes that answer no request, or another one. It has a line per provider and minute.
//!
//! A gateway that sends responses twice does so with every payment, so lines are limited. No byte of a response is
//! logged.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::domain::provider::ProviderName;

/// Shortest time between two lines of one provider.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Kind of an unexpected response. Each kind closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnexpectedResponse {
    BeforeRequest,
    WhileWriting,
    AfterResponse,
    NotEchoed,
}

impl UnexpectedResponse {
    fn describe(self) -> &'static str {
        match self {
            Self::BeforeRequest => {
                "bytes arrived before the request was written; the request went on another connection"
            }
            Self::WhileWriting => "the response began before its request was fully written; the outcome is unknown",
            Self::AfterResponse => "more bytes followed a response",
            Self::NotEchoed => "the response does not repeat the fields of `echo`; the outcome is unknown",
        }
    }
}

/// Unexpected responses of one provider.
#[derive(Debug)]
pub(super) struct UnexpectedResponseLog {
    provider: ProviderName,
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    logged_at: Option<Instant>,
    /// Number since the last line.
    unlogged: u64,
}

impl UnexpectedResponseLog {
    pub(super) fn new(provider: ProviderName) -> Self {
        Self { provider, state: Mutex::default() }
    }

    pub(super) fn record(&self, response: UnexpectedResponse) {
        if let Some(strays) = self.state.lock().count(Instant::now()) {
            let (provider, what) = (&self.provider, response.describe());
            tracing::warn!(%provider, strays, what, "provider sent an unexpected response; connection closed");
        }
    }
}

impl LogState {
    /// The number to log, if a line is due.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        if self.logged_at.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_log_line_per_minute_counts_all() {
        let (mut state, started) = (LogState::default(), Instant::now());
        let mut lines = Vec::new();
        for seconds in [0, 0, 1, 59, 60, 61, 119, 121] {
            lines.extend(state.count(started + Duration::from_secs(seconds)).map(|strays| (seconds, strays)));
        }
        assert_eq!(lines, [(0, 1), (60, 4), (121, 3)]);
    }
}
