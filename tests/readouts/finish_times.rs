//! Shown finish times, compared with the actual finish times of the providers' backlogs.

use std::time::Duration;

use super::History;
use super::judge::{Around, open};

/// A shown finish time, and the actual one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishTime {
    pub provider: String,
    /// Payments waiting and in flight.
    pub open: u64,
    pub shown_at: Duration,
    pub shown: Duration,
    pub came: Duration,
}

impl FinishTime {
    /// Correct if it is off by at most a fifth of the remaining time, or five seconds.
    pub fn is_right(&self) -> bool {
        let left = self.came.saturating_sub(self.shown_at);
        self.shown.abs_diff(self.came) <= (left / 5).max(Duration::from_secs(5))
    }
}

/// Finish times shown while the deployment was calm and no more payments were published, of providers that finished.
pub fn finish_times(history: &History) -> Vec<FinishTime> {
    let mut found = Vec::new();
    for sample in &history.samples {
        let around = Around::new(history, sample);
        for (name, shown) in around.providers().filter(|_| around.is_calm()) {
            let later = history.truths.iter().filter(|truth| truth.from >= sample.asked);
            let mut done = later.filter(|truth| open(truth, name).is_some_and(|open| open.least == 0));
            let (Some(ms), Some(done)) = (shown.clears_in_ms, done.next()) else { continue };
            let waiting = shown.waiting + shown.in_flight;
            if waiting == 0 {
                continue;
            }
            let (shown_at, shown) = (sample.asked, sample.asked + Duration::from_millis(ms));
            found.push(FinishTime { provider: name.to_owned(), open: waiting, shown_at, shown, came: done.from });
        }
    }
    found
}
