//! Delay queues: their lengths, and which of them a wait uses.
//!
//! The ledger records until when a copy is in one of them, so it uses the same steps as the queue.

use std::time::Duration;

/// A delayed job goes to the longest step that fits, and again if time remains.
pub const DELAY_STEPS: [Duration; 10] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(300),
    Duration::from_secs(900),
    Duration::from_secs(1_800),
];

/// The longest step not longer than `wait`. `None`: the wait is below the shortest step, and the worker keeps the job
/// meanwhile.
pub fn delay_step(wait: Duration) -> Option<Duration> {
    DELAY_STEPS.into_iter().rev().find(|step| *step <= wait)
}

/// The step that a delayed copy takes: the longest that fits, or the shortest.
pub fn copy_step(wait: Duration) -> Duration {
    delay_step(wait).unwrap_or(DELAY_STEPS[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_takes_the_longest_step_that_fits() {
        let ms = Duration::from_millis;
        for (wait, step) in
            [(249, None), (250, Some(250)), (999, Some(500)), (1_000, Some(1_000)), (59_999, Some(15_000))]
        {
            assert_eq!(delay_step(ms(wait)), step.map(ms), "{wait} ms");
            assert_eq!(copy_step(ms(wait)), ms(step.unwrap_or(250)), "{wait} ms");
        }
        assert_eq!(delay_step(Duration::from_secs(86_400)), Some(Duration::from_secs(1_800)));
    }
}
