//! The log of a gate: what its core notices, and how long and why a quota has no permits.
//!
//! A cause that lasts gets one line a minute. A wait that is known to be long is logged at once. A limit that is used in
//! full is logged as information.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::PermitDispatcher;
use crate::domain::provider::ProviderName;
use crate::limiter::LimiterError;
use crate::limiter::gate::core::Notice;
use crate::limiter::gate::{BlockReason, GateView};

/// Shortest stall that is logged.
const STALL_MIN: Duration = Duration::from_secs(5);
/// Shortest time between two lines of one cause.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

const LATE_PERMITS: &str = "permits arrive too late: the limiter takes longer than the send budget";

impl PermitDispatcher {
    pub(super) fn log_notices(&mut self) {
        for notice in self.core.take_notices() {
            self.log_notice(&notice, Instant::now());
        }
    }

    fn log_notice(&mut self, notice: &Notice, now: Instant) {
        let quota = &self.core.spec().quota;
        match *notice {
            Notice::PauseLifted => tracing::info!(%quota, "an operator has lifted the wait that the provider named"),
            Notice::StoreReplaced => {
                tracing::warn!(%quota, "the limiter store was replaced: its clock must be verified first");
            }
            Notice::ClockStepped { by, direction } => {
                tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step: its state is reset");
            }
            Notice::StateReset(problem) => {
                if self.stall.should_log(problem, now) {
                    tracing::error!(%quota, "{problem}: the state is reset");
                }
            }
            Notice::LimitSlowed => tracing::info!(
                %quota, "a limit holds more uses than its slower settings allow; rebuilding the state from the ledger"
            ),
            Notice::NewerSettings { ours, theirs } => {
                tracing::warn!(%quota, ours, theirs, "no permits: the limiter has newer settings than this worker");
            }
            // So it is after every pause of all workers, and on a busy machine when two of them start together.
            Notice::Unattested => tracing::info!(
                %quota, "no clock attestation covers the limiter's state; rebuilding it from the ledger"
            ),
            Notice::LatePermits => {
                let stalled = self.stall.observe(LATE_PERMITS.to_owned(), false, now, now);
                self.log_stall_report(stalled, &self.core.spec().quota);
            }
        }
    }

    pub(super) fn log_stall(&mut self, view: &GateView, now: Instant) {
        let Some((by, until)) = &view.block else {
            if !self.core.is_asking() {
                self.stall.end();
            }
            return;
        };
        let stalled = self.stall.observe_block(by, *until, now);
        self.log_stall_report(stalled, &self.core.spec().quota);
    }

    fn log_stall_report(&self, stalled: Option<StallReport>, quota: &ProviderName) {
        let Some(StallReport { cause, lasted, wait, is_expected }) = stalled else { return };
        let waiting = self.core.view().waiting;
        if is_expected {
            tracing::info!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        } else {
            tracing::warn!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        }
    }

    pub(super) fn log_failure(&self, error: &LimiterError) {
        if self.core.has_failed() {
            return;
        }
        let quota = &self.core.spec().quota;
        // A start takes a moment. If it takes longer, the stall is logged.
        if self.core.is_starting() && matches!(error, LimiterError::Unavailable(_)) {
            tracing::info!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
        } else {
            tracing::warn!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct StallMonitor {
    since: Option<Instant>,
    logged_at: BTreeMap<String, Instant>,
}

/// A stall that is to be logged.
#[derive(Debug, PartialEq, Eq)]
struct StallReport {
    pub cause: String,
    /// Time without a permit so far.
    pub lasted: Duration,
    /// Shortest time that it will still last.
    pub wait: Duration,
    /// The limits work as configured; it is no fault.
    pub is_expected: bool,
}

impl StallMonitor {
    /// A payment is given a permit that it can use, or none wants one.
    pub fn end(&mut self) {
        self.since = None;
    }

    /// Records that no job gets a permit until then; returns a report if one is due.
    fn observe_block(&mut self, by: &BlockReason, until: Instant, now: Instant) -> Option<StallReport> {
        let (cause, is_expected) = describe(by);
        self.observe(cause, is_expected, until, now)
    }

    /// No payment gets a permit until then, for this cause.
    fn observe(&mut self, cause: String, is_expected: bool, until: Instant, now: Instant) -> Option<StallReport> {
        let since = *self.since.get_or_insert(now);
        let (lasted, wait) = (now - since, until.saturating_duration_since(now));
        let is_worth_a_line = until.max(now) - since > STALL_MIN && self.should_log(&cause, now);
        is_worth_a_line.then_some(StallReport { cause, lasted, wait, is_expected })
    }

    /// Whether this cause was not logged within the last minute. Then it counts as logged now.
    fn should_log(&mut self, cause: &str, now: Instant) -> bool {
        self.logged_at.retain(|_, at| *at + LOG_INTERVAL > now);
        let is_news = !self.logged_at.contains_key(cause);
        if is_news {
            self.logged_at.insert(cause.to_owned(), now);
        }
        is_news
    }
}

fn describe(by: &BlockReason) -> (String, bool) {
    match by {
        BlockReason::Limit(name) => (format!("limit `{name}` is used in full"), true),
        BlockReason::Paused => ("the provider asked for a pause".to_owned(), true),
        BlockReason::Cold => ("the limiter starts cold: past usage is not known yet".to_owned(), false),
        BlockReason::NeedsHistory => ("past usage of a limit is not known yet".to_owned(), false),
        BlockReason::StoreUnavailable(problem) => (format!("the limiter cannot be asked: {problem}"), false),
        BlockReason::StaleSettings => ("the limiter has newer settings than this process".to_owned(), false),
        BlockReason::Oversized { limit, .. } => (format!("limit `{limit}` never admits so high a cost"), true),
        BlockReason::AccountBlocked { account } => (format!("account `{account}` is blocked"), true),
        BlockReason::Stopping => ("this process is stopping".to_owned(), true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_is_logged_once_per_cause_and_minute() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let unavailable = BlockReason::StoreUnavailable("gone".to_owned());
        let mut stall = StallMonitor::default();
        // Each wait is short; together they are long.
        assert_eq!(stall.observe_block(&unavailable, at(1), at(0)), None);
        assert_eq!(stall.observe_block(&unavailable, at(5), at(4)), None);
        let report = stall.observe_block(&unavailable, at(6), at(5)).unwrap();
        assert_eq!(
            (report.lasted, report.wait, report.is_expected),
            (Duration::from_secs(5), Duration::from_secs(1), false)
        );
        assert!(report.cause.contains("gone"), "{report:?}");
        assert_eq!(stall.observe_block(&unavailable, at(65), at(64)), None);
        assert!(stall.observe_block(&unavailable, at(66), at(65)).is_some());
        assert!(stall.observe_block(&BlockReason::Cold, at(66), at(65)).is_some(), "another cause");
        stall.end();
        assert_eq!(stall.observe_block(&BlockReason::StaleSettings, at(71), at(66)), None);
        // A wait that is known to be long.
        let report = stall.observe_block(&BlockReason::Paused, at(72), at(66)).unwrap();
        assert_eq!((report.lasted, report.wait, report.is_expected), (Duration::ZERO, Duration::from_secs(6), true));
    }
}
