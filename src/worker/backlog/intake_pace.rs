//! The turns of records in the backlog, over all lanes of this process, at the pace of [`crate::domain::intake_pace`].
//!
//! Jobs take their turns in order of arrival. So a pace that changes holds for the next one, however many wait.

use parking_lot::Mutex;
use tokio::time::{Duration, Instant, sleep};

use crate::domain::intake_pace::IntakePace;

/// The pace of intake, which the starts of all lanes decide.
#[derive(Debug)]
pub struct IntakeTurns {
    pace: Mutex<IntakePace>,
    origin: Instant,
    /// Held by the job that waits for its turn.
    next: tokio::sync::Mutex<()>,
}

impl Default for IntakeTurns {
    fn default() -> Self {
        Self { pace: Mutex::default(), origin: Instant::now(), next: tokio::sync::Mutex::default() }
    }
}

impl IntakeTurns {
    /// Records a request that was sent this long after the start that its permit names.
    pub fn record_start(&self, lateness: Duration) {
        self.pace.lock().record_start(lateness, self.origin.elapsed());
    }

    /// Waits for the turn of one record. Cancel-safe: a turn that is not used is lost.
    pub async fn wait(&self) {
        let _first = self.next.lock().await;
        let wait = self.pace.lock().take_turn(self.origin.elapsed());
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::task::JoinSet;

    use super::*;
    use crate::domain::intake_pace::RATE_MIN;

    /// Records for some seconds, beside starts that are this late.
    async fn records_within(seconds: u64, lateness: Duration) -> f64 {
        let turns = Arc::new(IntakeTurns::default());
        turns.record_start(Duration::ZERO);
        let (mut recording, recorded) = (JoinSet::new(), Arc::new(Mutex::new(0_u32)));
        for _ in 0..100 {
            let (turns, recorded) = (Arc::clone(&turns), Arc::clone(&recorded));
            recording.spawn(async move {
                loop {
                    turns.wait().await;
                    *recorded.lock() += 1;
                    // Its commit.
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
        for _ in 0..seconds * 100 {
            sleep(Duration::from_millis(10)).await;
            turns.record_start(lateness);
        }
        let recorded = *recorded.lock();
        f64::from(recorded) / f64::from(u32::try_from(seconds).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn late_starts_slow_intake_and_do_not_stop_it() {
        let free = records_within(30, Duration::ZERO).await;
        assert!(free > 7_000.0, "{free}/s");
        let paced = records_within(10, Duration::from_millis(5)).await;
        assert!((RATE_MIN * 0.95..RATE_MIN * 1.3).contains(&paced), "{paced}/s");
    }
}
