//! The pace at which intake records new jobs in the backlog, so that a full queue makes no request start late.
//!
//! To empty a queue takes the processor, the broker and the database from the requests that are due. While starts are
//! later than without that, the pace falls by a part. Otherwise it grows, slowly beside starts, until it holds nothing
//! back. It never falls below [`RATE_MIN`], so a queue empties however late starts are. The time is an argument, from
//! any monotonic clock. See `docs/decisions/0042-limited-lane-empties-its-queue.md`.

use std::time::Duration;

/// Least records a second of one process, whatever starts do. A process begins with it.
pub const RATE_MIN: f64 = 2_600.0;
/// From this rate on, nothing is held back: no process records as much.
const RATE_MAX: f64 = 20_000.0;
/// Time between two changes of the rate.
const JUDGE_INTERVAL: Duration = Duration::from_millis(100);
const DECREASE: f64 = 0.8;
/// While starts are seen, which are too few to say soon that a rate is too high.
const INCREASE: f64 = 1.01;
/// While nothing starts that could be late.
const INCREASE_WITHOUT_STARTS: f64 = 1.1;
/// The records of this time may come together, because a timer counts milliseconds and rounds up.
const SLACK: Duration = Duration::from_millis(3);
/// Records are being made while the last one is at most as old. So long a start counts, too.
const RECENT: Duration = Duration::from_secs(1);
/// How much later starts may be than without intake, on average: far less than the worst of them.
const LATER_MAX_S: f64 = 0.000_1;
/// What is assumed of starts without intake before one was seen.
const CALM_FIRST_S: f64 = 0.000_2;
/// Part of a mean that one start decides.
const WEIGHT: f64 = 1.0 / 32.0;
/// A later start counts as so late: one hiccup of the machine is no reason for a second of low pace.
const LATENESS_MAX: Duration = Duration::from_millis(10);

/// The pace of one process, over all of its lanes: they share processor, broker and database.
#[derive(Clone, Debug, PartialEq)]
pub struct IntakePace {
    /// Records a second.
    rate: f64,
    next_at: Duration,
    judged_at: Duration,
    /// Records since then.
    recorded: u32,
    last_record: Option<Duration>,
    last_start: Option<Duration>,
    /// Lateness of starts while nothing is recorded, and while records are made.
    calm: MeanLateness,
    busy: MeanLateness,
}

/// In seconds; `None`: no start was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct MeanLateness(Option<f64>);

impl MeanLateness {
    fn record(&mut self, lateness: Duration) {
        let seconds = lateness.min(LATENESS_MAX).as_secs_f64();
        self.0 = Some(self.0.map_or(seconds, |mean| mean + (seconds - mean) * WEIGHT));
    }
}

impl Default for IntakePace {
    fn default() -> Self {
        Self {
            rate: RATE_MIN,
            next_at: Duration::ZERO,
            judged_at: Duration::ZERO,
            recorded: 0,
            last_record: None,
            last_start: None,
            calm: MeanLateness::default(),
            busy: MeanLateness::default(),
        }
    }
}

impl IntakePace {
    /// Records a request that was sent this long after the start that its permit names.
    pub fn record_start(&mut self, lateness: Duration, now: Duration) {
        self.last_start = Some(now);
        if is_recent(self.last_record, now) {
            self.busy.record(lateness);
        } else {
            // What follows is compared with this.
            self.busy = MeanLateness::default();
            self.calm.record(lateness);
        }
    }

    /// Takes the turn of one record; returns how long it waits. The next turn is taken after that.
    pub fn take_turn(&mut self, now: Duration) -> Duration {
        self.judge(now);
        self.recorded = self.recorded.saturating_add(1);
        if self.rate >= RATE_MAX {
            (self.next_at, self.last_record) = (now, Some(now));
            return Duration::ZERO;
        }
        let at = self.next_at.max(now.saturating_sub(SLACK));
        self.next_at = at + Duration::from_secs_f64(self.rate.recip());
        self.last_record = Some(at.max(now));
        at.saturating_sub(now)
    }

    fn judge(&mut self, now: Duration) {
        let span = now.saturating_sub(self.judged_at);
        if span < JUDGE_INTERVAL {
            return;
        }
        // A rate that is not used holds nothing back, so what was recorded is cut.
        let used = f64::from(self.recorded) / span.as_secs_f64();
        let calm_s = self.calm.0.unwrap_or(CALM_FIRST_S);
        let rate = if self.busy.0.is_some_and(|busy_s| busy_s > calm_s + LATER_MAX_S) {
            // The next starts are judged by themselves: those until now were made at the higher rate.
            self.busy = MeanLateness(Some(calm_s));
            self.rate.min(used) * DECREASE
        } else if is_recent(self.last_start, now) {
            self.rate * INCREASE
        } else {
            self.rate * INCREASE_WITHOUT_STARTS
        };
        self.rate = rate.clamp(RATE_MIN, RATE_MAX);
        (self.judged_at, self.recorded) = (now, 0);
    }
}

fn is_recent(last: Option<Duration>, now: Duration) -> bool {
    last.is_some_and(|last| now.saturating_sub(last) <= RECENT)
}

#[cfg(test)]
#[path = "intake_pace_tests.rs"]
mod tests;
