//! The last decisions of a lane with their reasons, for people who ask why it does what it does.
//!
//! Refuses to grow: equal decisions of one second are one line with a count, and the oldest lines go. Reads the wall clock
//! only to say when.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Lines kept.
const LINES_MAX: usize = 50;
/// Equal decisions within so long are one line.
const MERGED_MS: u64 = 1_000;

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionKind {
    Granted,
    Refused,
    Parked,
    /// The provider refused what we allowed.
    Throttled,
    Paused,
    Resumed,
    BreakerOpened,
    BreakerClosed,
}

impl DecisionKind {
    /// Stable word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Refused => "refused",
            Self::Parked => "parked",
            Self::Throttled => "throttled",
            Self::Paused => "paused",
            Self::Resumed => "resumed",
            Self::BreakerOpened => "breaker_opened",
            Self::BreakerClosed => "breaker_closed",
        }
    }
}

/// A decision to be kept.
#[derive(Clone, Debug)]
pub struct Decision {
    pub kind: DecisionKind,
    /// What makes two of a kind the same; not shown.
    pub about: String,
    /// For a person.
    pub reason: String,
    pub permits: u32,
}

impl Decision {
    /// One that is the same as any other with these words.
    #[must_use]
    pub fn new(kind: DecisionKind, reason: &str) -> Self {
        Self { kind, about: reason.to_owned(), reason: reason.to_owned(), permits: 0 }
    }
}

/// A line of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionLine {
    /// Unix time in milliseconds, of the first of those in this line.
    pub at_ms: u64,
    /// [`DecisionKind::word`].
    pub kind: &'static str,
    /// Of the last of those in this line.
    pub reason: String,
    /// Permits that it was about.
    pub permits: u32,
}

#[derive(Debug)]
struct Kept {
    at_ms: u64,
    decision: Decision,
}

#[derive(Debug, Default)]
pub(super) struct Decisions(Mutex<VecDeque<Kept>>);

impl Decisions {
    pub fn keep(&self, decision: Decision) {
        self.keep_at(unix_ms(), decision);
    }

    fn keep_at(&self, at_ms: u64, decision: Decision) {
        let mut kept = self.lock();
        let lately = kept.iter_mut().rev().take_while(|line| at_ms.saturating_sub(line.at_ms) < MERGED_MS);
        let same = |line: &&mut Kept| (line.decision.kind, &line.decision.about) == (decision.kind, &decision.about);
        if let Some(line) = lately.into_iter().find(same) {
            line.decision.permits = line.decision.permits.saturating_add(decision.permits);
            line.decision.reason = decision.reason;
            return;
        }
        if kept.len() == LINES_MAX {
            kept.pop_front();
        }
        kept.push_back(Kept { at_ms, decision });
    }

    /// Newest first.
    pub fn read(&self) -> Vec<DecisionLine> {
        let line = |Kept { at_ms, decision }: &Kept| DecisionLine {
            at_ms: *at_ms,
            kind: decision.kind.word(),
            reason: decision.reason.clone(),
            permits: decision.permits,
        };
        self.lock().iter().rev().map(line).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unix time in milliseconds, for people.
pub(super) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(kind: DecisionKind, about: &str, reason: &str) -> Decision {
        Decision { kind, about: about.to_owned(), reason: reason.to_owned(), permits: 1 }
    }

    #[test]
    fn equal_decisions_of_a_second_are_one_line() {
        let decisions = Decisions::default();
        decisions.keep_at(1_000, decision(DecisionKind::Granted, "", "room"));
        decisions.keep_at(1_400, decision(DecisionKind::Refused, "per-minute", "free in 2 s"));
        decisions.keep_at(1_900, decision(DecisionKind::Granted, "", "room"));
        decisions.keep_at(1_950, decision(DecisionKind::Refused, "per-minute", "free in 1 s"));
        decisions.keep_at(1_960, decision(DecisionKind::Refused, "per-second", "free in 1 s"));
        decisions.keep_at(2_000, decision(DecisionKind::Granted, "", "room"));
        let lines: Vec<_> = decisions.read().into_iter().map(|line| (line.at_ms, line.kind, line.permits)).collect();
        assert_eq!(lines, [(2_000, "granted", 1), (1_960, "refused", 1), (1_400, "refused", 2), (1_000, "granted", 2)]);
        assert_eq!(decisions.read()[2].reason, "free in 1 s");
    }

    #[test]
    fn the_oldest_go() {
        let decisions = Decisions::default();
        for at in 0..60 {
            decisions.keep_at(at, decision(DecisionKind::Parked, &at.to_string(), "x"));
        }
        let at: Vec<u64> = decisions.read().iter().map(|line| line.at_ms).collect();
        assert_eq!(at, (10..60).rev().collect::<Vec<u64>>());
    }
}
