//! The pace that gets through while a provider refuses requests with 429.
//!
//! A row may allow more than its provider does. Then requests start at the row's pace until a 429 pauses them, and
//! neither the limits nor the rate of a few seconds says how fast the backlog shrinks. The requests that got through from
//! one pause to another say it, over at least ten pauses and at least a minute.

use std::time::Duration;

use super::time::{EpochMs, millis_up};

/// Pauses over which the pace is measured, at least.
pub const PAUSES_MIN: usize = 10;
/// Time over which the pace is measured, at least. For this long after a 429, others are expected.
pub const SPAN_MIN: Duration = Duration::from_secs(60);
/// Requests that meet a 429 within this time of each other meet the same pause.
const SAME_PAUSE: Duration = Duration::from_millis(400);
/// After a longer time without a 429, the next one has another cause.
const CYCLE_MAX: Duration = Duration::from_secs(10 * 60);

/// A request that the provider refused with 429.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThrottledRequest {
    pub began_at: EpochMs,
    /// When its outcome was recorded. That of an unconfirmed refusal is known only at the request's deadline.
    pub ended_at: EpochMs,
}

/// The time over which the pace is measured; requests that began in it count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredSpan {
    pub from: EpochMs,
    /// Exclusive.
    pub to: EpochMs,
}

impl MeasuredSpan {
    #[allow(clippy::cast_precision_loss, reason = "counts and milliseconds are far below 2^53")]
    pub fn per_second(self, requests: u64) -> f64 {
        let tenths = requests as f64 * 10_000.0 / self.to.0.saturating_sub(self.from.0).max(1) as f64;
        tenths.round() / 10.0
    }
}

/// The last requests of one provider that met a 429.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThrottledRequests {
    /// Start of each pause, oldest first, without those of an earlier cause.
    pauses: Vec<i64>,
    last_ended_at: Option<EpochMs>,
}

impl ThrottledRequests {
    /// In any order.
    pub fn new(mut requests: Vec<ThrottledRequest>) -> Self {
        requests.sort_unstable();
        let last_ended_at = requests.iter().map(|request| request.ended_at).max();
        let mut pauses: Vec<i64> = Vec::new();
        let mut before_ms = i64::MIN;
        for ThrottledRequest { began_at, .. } in requests {
            let since_ms = began_at.0.saturating_sub(before_ms);
            if since_ms > ms(CYCLE_MAX) {
                pauses.clear();
            }
            if since_ms > ms(SAME_PAUSE) {
                pauses.push(began_at.0);
            }
            before_ms = began_at.0;
        }
        Self { pauses, last_ended_at }
    }

    /// Whether the provider still refuses requests: the last 429 is younger than a minute, or than twice the longest
    /// time between two pauses.
    pub fn keep_coming(&self, now: EpochMs) -> bool {
        let longest_ms = self.pauses.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let expected_ms = ms(SPAN_MIN).max(longest_ms.saturating_mul(2));
        self.last_ended_at.is_some_and(|last| now.0.saturating_sub(last.0) <= expected_ms)
    }

    /// Whether requests were refused again after a pause.
    pub fn are_repeated(&self) -> bool {
        self.pauses.len() > 1
    }

    /// From one pause to the last one: over [`PAUSES_MIN`] pauses and [`SPAN_MIN`]. `None`: the 429s began too recently.
    pub fn measured_span(&self) -> Option<MeasuredSpan> {
        let to_ms = *self.pauses.last()?;
        let ten_before = self.pauses.len().checked_sub(PAUSES_MIN + 1)?;
        let from_ms = self.pauses[..=ten_before].iter().rev().find(|from_ms| to_ms - **from_ms >= ms(SPAN_MIN))?;
        Some(MeasuredSpan { from: EpochMs(*from_ms), to: EpochMs(to_ms) })
    }
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(millis_up(duration)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pause each `cycle_ms`, with five requests that met it; confirmed `late_ms` afterwards.
    fn cycles(pauses: i64, cycle_ms: i64, late_ms: i64) -> ThrottledRequests {
        let request =
            |began_ms| ThrottledRequest { began_at: EpochMs(began_ms), ended_at: EpochMs(began_ms + late_ms) };
        let each = (0..pauses).flat_map(|pause| (0..5).map(move |nth| pause * cycle_ms + nth * 33));
        ThrottledRequests::new(each.rev().map(request).collect())
    }

    #[test]
    fn pace_is_measured_over_ten_pauses_and_a_minute() {
        let span_s = |pauses, cycle_ms| {
            let span = cycles(pauses, cycle_ms, 10_000).measured_span();
            span.map(|MeasuredSpan { from, to }| (from.0 / 1_000, to.0 / 1_000))
        };
        for (pauses, cycle_ms, expected) in [
            // Pauses of two seconds: a minute is longer than ten of them.
            (20, 3_000, None),
            (21, 3_000, Some((0, 60))),
            (100, 3_000, Some((237, 297))),
            // Pauses of half a minute: ten of them are longer than a minute.
            (10, 30_000, None),
            (11, 30_000, Some((0, 300))),
            (50, 30_000, Some((1_170, 1_470))),
            // One in an hour, each with another cause.
            (50, 3_600_000, None),
            (0, 1, None),
            (1, 1, None),
        ] {
            assert_eq!(span_s(pauses, cycle_ms), expected, "{pauses} pauses, {cycle_ms} ms apart");
        }
        let span = cycles(21, 3_000, 5).measured_span().unwrap();
        assert!((span.per_second(374) - 6.2).abs() < 1e-9);
    }

    #[test]
    fn refusals_are_expected_for_a_minute_or_two_pauses() {
        for (pauses, cycle_ms, silent_s, expected) in [
            (1, 3_000, 59, true),
            (1, 3_000, 61, false),
            (5, 3_000, 61, false),
            (5, 300_000, 599, true),
            (5, 300_000, 602, false),
            (5, 3_600_000, 61, false),
        ] {
            let requests = cycles(pauses, cycle_ms, 10_000);
            let last_ms = (pauses - 1) * cycle_ms + 4 * 33 + 10_000;
            let kept = requests.keep_coming(EpochMs(last_ms + silent_s * 1_000));
            assert_eq!(kept, expected, "{pauses} pauses, {cycle_ms} ms apart, {silent_s} s ago");
            assert_eq!(requests.are_repeated(), pauses > 1 && cycle_ms < 3_600_000);
        }
        assert!(!ThrottledRequests::new(Vec::new()).keep_coming(EpochMs(0)));
    }
}
