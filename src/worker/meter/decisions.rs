//! The last decisions of a lane with their reasons, for operators who ask why it does what it does.
//!
//! Equal decisions within one second are one line with a count, and the oldest lines are dropped. The wall clock is
//! used only for the time that is shown.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::fleet::report::ReportedDecision;

/// Number of lines kept.
const LINES_MAX: usize = 50;
/// Time within which equal decisions are one line, in milliseconds.
const MERGE_WINDOW_MS: u64 = 1_000;

/// Kind of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionKind {
    Granted,
    Refused,
    Delayed,
    /// The provider throttled a request that the limits allowed.
    Throttled,
    Paused,
    Resumed,
    BreakerOpened,
    BreakerClosed,
}

impl DecisionKind {
    /// Code in JSON; stable.
    pub fn code(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Refused => "refused",
            Self::Delayed => "delayed",
            Self::Throttled => "throttled",
            Self::Paused => "paused",
            Self::Resumed => "resumed",
            Self::BreakerOpened => "breaker_opened",
            Self::BreakerClosed => "breaker_closed",
        }
    }
}

/// A decision to record.
#[derive(Clone, Debug)]
pub struct LaneDecision {
    pub kind: DecisionKind,
    /// Decisions of one kind with the same key are merged; not shown.
    pub merge_key: Cow<'static, str>,
    /// Text for operators.
    pub reason: Cow<'static, str>,
    pub permits: u32,
}

impl LaneDecision {
    /// A decision that is merged with any other of this kind and text.
    pub fn new(kind: DecisionKind, reason: &str) -> Self {
        let reason = Cow::<'static, str>::Owned(reason.to_owned());
        Self { kind, merge_key: reason.clone(), reason, permits: 0 }
    }
}

/// The decisions, each with the Unix time in milliseconds of the first one in its line.
#[derive(Debug, Default)]
pub(super) struct DecisionLog(Mutex<VecDeque<(u64, LaneDecision)>>);

impl DecisionLog {
    pub fn record(&self, decision: LaneDecision) {
        self.record_at(unix_ms(), decision);
    }

    fn record_at(&self, at_ms: u64, decision: LaneDecision) {
        let mut kept = self.0.lock();
        let lately = kept.iter_mut().rev().take_while(|(line_ms, _)| at_ms.saturating_sub(*line_ms) < MERGE_WINDOW_MS);
        let mut lately = lately.map(|(_, line)| line);
        if let Some(line) = lately.find(|line| line.kind == decision.kind && line.merge_key == decision.merge_key) {
            line.permits = line.permits.saturating_add(decision.permits);
            line.reason = decision.reason;
            return;
        }
        if kept.len() == LINES_MAX {
            kept.pop_front();
        }
        kept.push_back((at_ms, decision));
    }

    /// Newest first.
    pub fn read(&self) -> Vec<ReportedDecision> {
        let line = |(at_ms, decision): &(u64, LaneDecision)| ReportedDecision {
            at_ms: i64::try_from(*at_ms).unwrap_or(i64::MAX),
            kind: decision.kind.code().to_owned(),
            reason: decision.reason.clone().into_owned(),
            permits: decision.permits,
        };
        self.0.lock().iter().rev().map(line).collect()
    }
}

/// Unix time in milliseconds, for display.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(kind: DecisionKind, about: &str, reason: &str) -> LaneDecision {
        LaneDecision { kind, merge_key: about.to_owned().into(), reason: reason.to_owned().into(), permits: 1 }
    }

    #[test]
    fn equal_decisions_of_a_second_are_one_line() {
        let decisions = DecisionLog::default();
        decisions.record_at(1_000, decision(DecisionKind::Granted, "", "free"));
        decisions.record_at(1_400, decision(DecisionKind::Refused, "per-minute", "free in 2 s"));
        decisions.record_at(1_900, decision(DecisionKind::Granted, "", "free"));
        decisions.record_at(1_950, decision(DecisionKind::Refused, "per-minute", "free in 1 s"));
        decisions.record_at(1_960, decision(DecisionKind::Refused, "per-second", "free in 1 s"));
        decisions.record_at(2_000, decision(DecisionKind::Granted, "", "free"));
        let lines: Vec<_> = decisions.read().into_iter().map(|line| (line.at_ms, line.kind, line.permits)).collect();
        let wanted = [(2_000, "granted", 1), (1_960, "refused", 1), (1_400, "refused", 2), (1_000, "granted", 2)];
        assert_eq!(lines, wanted.map(|(at_ms, kind, permits)| (at_ms, kind.to_owned(), permits)));
        assert_eq!(decisions.read()[2].reason, "free in 1 s");
    }

    #[test]
    fn oldest_decisions_are_dropped() {
        let decisions = DecisionLog::default();
        for at in 0..60 {
            decisions.record_at(at, decision(DecisionKind::Delayed, &at.to_string(), "x"));
        }
        let at: Vec<i64> = decisions.read().iter().map(|line| line.at_ms).collect();
        assert_eq!(at, (10..60).rev().collect::<Vec<i64>>());
    }
}
