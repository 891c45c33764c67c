//! The limit that a provider seems to allow, judged by the requests that were sent and those that met a 429.
//!
//! For each candidate window it compares two counts. One is the largest number of requests that the provider accepted
//! within the window. The other is the smallest number that had used the window up when a 429 came. A provider may count
//! refused requests too, and it may count in fixed windows, so each window is judged in four ways. A window explains the
//! 429s if no request was accepted beyond the smaller count.
//!
//! Invariant: the suggested rate is never above what the provider accepted within its window (held by
//! `suggestion_is_never_above_what_was_accepted`). The result is a hint for an operator, and changes nothing itself.

use std::time::Duration;

use super::limit::Rate;
use super::time::{EpochMs, millis_up};

/// Fewer 429s than this may be an accident: then nothing is suggested.
pub const REPEATED: usize = 3;
/// The 429s count as repeated if that many came within this time before the last look.
pub const RECENT: Duration = Duration::from_secs(15 * 60);
/// Candidate windows beside those of the configured limits.
pub const COMMON_WINDOWS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(60), Duration::from_secs(3_600)];

/// Share of the accepted requests that may contradict a window, because our instants are not the provider's.
const CONTRADICTIONS_MAX: f64 = 0.01;
/// Rates that differ by less are taken as equal.
const SAME_RATE: f64 = 1.05;

/// A request that the provider answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnsweredRequest {
    pub at: EpochMs,
    /// The provider refused it with 429.
    pub is_throttled: bool,
}

/// What the 429s say.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedLimit {
    /// The largest number of requests in a window beyond which no request was accepted; `None`: no window explains the
    /// 429s.
    pub rate: Option<Rate>,
}

/// Judges the requests, the oldest first. Before `from`, nothing is known. `configured`: windows of the configured
/// limits, which are preferred to [`COMMON_WINDOWS`]. `None`: there are no repeated 429s.
pub fn observe(
    requests: &[AnsweredRequest],
    from: EpochMs,
    now: EpochMs,
    configured: &[Duration],
) -> Option<ObservedLimit> {
    let recent_ms = now.0.saturating_sub(ms(RECENT));
    let recent = requests.iter().filter(|request| request.is_throttled && request.at.0 >= recent_ms);
    (recent.count() >= REPEATED).then(|| ObservedLimit { rate: explaining_rate(requests, from, configured) })
}

/// The rate that explains the 429s best: without contradictions if there is one, then the slowest, then by the order of
/// the candidates.
fn explaining_rate(requests: &[AnsweredRequest], from: EpochMs, configured: &[Duration]) -> Option<Rate> {
    let mut windows = configured.to_vec();
    windows.sort();
    windows.extend(COMMON_WINDOWS);
    let judged = windows.iter().filter_map(|window| judge_window(requests, from, *window));
    let judged: Vec<ExplainedWindow> = judged.collect();
    let strict: Vec<ExplainedWindow> = judged.iter().copied().filter(|window| window.is_strict).collect();
    let candidates = if strict.is_empty() { judged } else { strict };
    let slowest = candidates.iter().map(ExplainedWindow::per_second).min_by(f64::total_cmp)?;
    let best = candidates.iter().find(|window| window.per_second() <= slowest * SAME_RATE)?;
    Rate::new(best.max_requests, best.window).ok()
}

/// A window that explains the 429s.
#[derive(Clone, Copy, Debug)]
struct ExplainedWindow {
    window: Duration,
    max_requests: u32,
    /// No request at all contradicts it.
    is_strict: bool,
}

impl ExplainedWindow {
    fn per_second(&self) -> f64 {
        f64::from(self.max_requests) / self.window.as_secs_f64()
    }
}

/// The ways in which a provider may count.
#[derive(Clone, Copy)]
struct CountingRule {
    counts_refused: bool,
    /// Windows begin at multiples of their length; otherwise they end with each request.
    is_fixed: bool,
}

const COUNTING_RULES: [CountingRule; 4] = [
    CountingRule { counts_refused: false, is_fixed: false },
    CountingRule { counts_refused: true, is_fixed: false },
    CountingRule { counts_refused: false, is_fixed: true },
    CountingRule { counts_refused: true, is_fixed: true },
];

/// The most cautious explanation by this window; those without contradictions come first.
fn judge_window(requests: &[AnsweredRequest], from: EpochMs, window: Duration) -> Option<ExplainedWindow> {
    if window.is_zero() {
        return None;
    }
    // Whatever the provider counts, no more than this was accepted within a window.
    let accepted_at_once = largest_accepted(requests, window);
    let explained = COUNTING_RULES.iter().filter_map(|rule| judge_rule(requests, from, window, *rule));
    let capped = explained
        .map(|explained| ExplainedWindow { max_requests: explained.max_requests.min(accepted_at_once), ..explained });
    capped
        .filter(|explained| explained.max_requests > 0)
        .min_by_key(|explained| (!explained.is_strict, explained.max_requests))
}

fn judge_rule(
    requests: &[AnsweredRequest],
    from: EpochMs,
    window: Duration,
    rule: CountingRule,
) -> Option<ExplainedWindow> {
    let before = counts_before(requests, window, rule);
    let mut refusals =
        before.iter().zip(requests).filter(|(count, request)| request.is_throttled && count.since_ms >= from.0);
    let first = refusals.next()?;
    let used_up =
        refusals.map(|(count, _)| count.requests).min().map_or(first.0.requests, |least| least.min(first.0.requests));
    // Only after a whole window could a request have been accepted again.
    let observed_ms = requests.last()?.at.0.saturating_sub(first.1.at.0);
    if observed_ms < ms(window) {
        return None;
    }
    let accepted =
        || before.iter().zip(requests).filter(|(_, request)| !request.is_throttled).map(|(count, _)| count.requests);
    let tolerance = (used_up / 20).max(1);
    let beyond = |least: u32| accepted().filter(|count| *count >= least).count();
    if beyond(used_up.saturating_add(tolerance)) as f64 > accepted().count() as f64 * CONTRADICTIONS_MAX {
        return None;
    }
    let largest = accepted().max()?.saturating_add(1);
    Some(ExplainedWindow { window, max_requests: used_up.min(largest), is_strict: beyond(used_up) == 0 })
}

/// Requests that count in the window of another one, before it.
struct CountBefore {
    /// Start of that window.
    since_ms: i64,
    requests: u32,
}

fn counts_before(requests: &[AnsweredRequest], window: Duration, rule: CountingRule) -> Vec<CountBefore> {
    let window_ms = ms(window).max(1);
    let counts = |request: &AnsweredRequest| u32::from(rule.counts_refused || !request.is_throttled);
    let (mut oldest, mut sum) = (0, 0_u32);
    let mut all = Vec::with_capacity(requests.len());
    for request in requests {
        let since_ms = match rule.is_fixed {
            true => request.at.0.div_euclid(window_ms) * window_ms,
            // A request leaves the window when it is as old as the window is long.
            false => request.at.0.saturating_sub(window_ms).saturating_add(1),
        };
        while let Some(left) = requests.get(oldest).filter(|left| left.at.0 < since_ms) {
            sum = sum.saturating_sub(counts(left));
            oldest += 1;
        }
        all.push(CountBefore { since_ms, requests: sum });
        sum = sum.saturating_add(counts(request));
    }
    all
}

fn largest_accepted(requests: &[AnsweredRequest], window: Duration) -> u32 {
    let before = counts_before(requests, window, COUNTING_RULES[0]);
    let accepted = before.iter().zip(requests).filter(|(_, request)| !request.is_throttled);
    accepted.map(|(count, _)| count.requests.saturating_add(1)).max().unwrap_or(0)
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(millis_up(duration)).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "observed_limit_tests.rs"]
mod tests;
