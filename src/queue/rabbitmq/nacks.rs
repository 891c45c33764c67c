//! The decision to leave a connection on which the broker takes no more: nacks in a row with one routing key.
//!
//! A channel keeps to the queue leader that it knows. While that node is unavailable, the channel nacks, and a channel that
//! is opened then, through another node if there is one, finds the new leader. A queue that is full nacks everywhere. So
//! between two changes there are growing pauses.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// One nack may be a leader's last.
const NACKS_IN_A_ROW: u32 = 2;
/// Pauses between two changes, each twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Nacks of the present connection by routing key, since the key's last acknowledgement.
#[derive(Debug, Default)]
pub struct NackRuns {
    runs: HashMap<String, u32>,
    /// The generation that was left last, when, and for how long the next one is kept.
    left: Option<LeftConnection>,
}

#[derive(Clone, Copy, Debug)]
struct LeftConnection {
    generation: u64,
    at: Instant,
    pause: Duration,
}

impl NackRuns {
    /// Records a confirm of a generation's connection; returns whether that connection is to be left now. Confirms of one
    /// that was left already say nothing about the present one.
    pub fn record(&mut self, key: &str, accepted: bool, generation: u64, now: Instant) -> bool {
        if self.left.is_some_and(|left| generation <= left.generation) {
            return false;
        }
        if accepted {
            self.runs.remove(key);
            return false;
        }
        let run = self.runs.entry(key.to_owned()).or_default();
        *run += 1;
        if *run < NACKS_IN_A_ROW || self.left.is_some_and(|left| now < left.at + left.pause) {
            return false;
        }
        let lately = self.left.filter(|left| now < left.at + PAUSE_MAX * 2);
        let pause = lately.map_or(PAUSE_MIN, |left| (left.pause * 2).min(PAUSE_MAX));
        self.left = Some(LeftConnection { generation, at: now, pause });
        self.runs.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key, whether the broker took it, generation, milliseconds since the step before, and whether the connection is left.
    type Step = (&'static str, bool, u64, u64, bool);

    fn run(steps: &[Step]) {
        let (mut runs, mut now) = (NackRuns::default(), Instant::now());
        for (number, (key, accepted, generation, after_ms, left)) in steps.iter().enumerate() {
            now += Duration::from_millis(*after_ms);
            assert_eq!(runs.record(key, *accepted, *generation, now), *left, "step {number} of {steps:?}");
        }
    }

    #[test]
    fn two_nacks_in_a_row_leave_the_connection() {
        run(&[("a", false, 1, 0, false), ("a", false, 1, 0, true)]);
        // An acknowledgement of the key ends the run; one of another key does not.
        run(&[
            ("a", false, 1, 0, false),
            ("a", true, 1, 0, false),
            ("a", false, 1, 0, false),
            ("a", false, 1, 0, true),
        ]);
        run(&[("a", false, 1, 0, false), ("b", true, 1, 0, false), ("a", false, 1, 0, true)]);
        run(&[("a", false, 1, 0, false), ("b", false, 1, 0, false)]);
    }

    #[test]
    fn late_nacks_of_a_left_connection_do_not_count() {
        run(&[
            ("a", false, 1, 0, false),
            ("a", false, 1, 0, true),
            ("a", false, 1, 5_000, false),
            ("a", false, 1, 0, false),
            ("a", false, 2, 0, false),
            ("a", false, 2, 0, true),
        ]);
    }

    /// A full queue nacks on each connection.
    #[test]
    fn pauses_between_two_changes_grow() {
        let mut steps = vec![("a", false, 1, 0, false), ("a", false, 1, 0, true)];
        for (generation, pause_ms) in [(2, 1_000), (3, 2_000), (4, 4_000), (5, 8_000)] {
            steps.extend([("a", false, generation, 0, false), ("a", false, generation, pause_ms - 1, false)]);
            steps.push(("a", false, generation, 1, true));
        }
        run(&steps);
        // Long after the last one, they begin again.
        steps.extend([("a", false, 6, 120_000, false), ("a", false, 6, 0, true)]);
        steps.extend([("a", false, 7, 999, false), ("a", false, 7, 1, true)]);
        run(&steps);
    }
}
