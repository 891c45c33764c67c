//! Log of what a provider sends that answers no request, or not the request that was made: a line per provider and minute.
//!
//! A gateway that sends answers twice does so with every payment. No byte of an answer is logged.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::provider::ProviderName;

const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What made a connection unusable.
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
            Self::BeforeRequest => "bytes came before a request was written, which went on another connection",
            Self::WhileWriting => {
                "an answer began before its request was written to its end, so the outcome is unknown"
            }
            Self::AfterResponse => "more bytes came behind an answer",
            Self::NotEchoed => "an answer does not repeat what `echo` names, so the outcome is unknown",
        }
    }
}

/// The strays of one provider.
#[derive(Debug)]
pub(super) struct UnexpectedResponseLog {
    provider: ProviderName,
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    logged_at: Option<Instant>,
    /// Since the last line.
    unlogged: u64,
}

impl UnexpectedResponseLog {
    pub(super) fn new(provider: ProviderName) -> Self {
        Self { provider, state: Mutex::default() }
    }

    pub(super) fn record(&self, stray: UnexpectedResponse) {
        if let Some(strays) = self.state.lock().unwrap_or_else(PoisonError::into_inner).count(Instant::now()) {
            let (provider, what) = (&self.provider, stray.describe());
            tracing::warn!(%provider, strays, what, "provider sent what answers no request of ours; connection closed");
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
        let (mut state, begun) = (LogState::default(), Instant::now());
        let mut lines = Vec::new();
        for seconds in [0, 0, 1, 59, 60, 61, 119, 121] {
            lines.extend(state.count(begun + Duration::from_secs(seconds)).map(|strays| (seconds, strays)));
        }
        assert_eq!(lines, [(0, 1), (60, 4), (121, 3)]);
    }
}
