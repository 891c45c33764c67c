//! The durations of publishing: most of them depend on each other, so that a slow process is not taken for a dead one.

use std::time::Duration;

/// Least time between two readings of the order, so that one statement serves all events of that time.
pub const BATCH_INTERVAL: Duration = Duration::from_millis(20);
/// Time between two readings while this process writes no event: for those of other processes.
pub const POLL_INTERVAL: Duration = Duration::from_millis(75);
/// A confirm that takes longer is late.
pub const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a backend was unavailable.
pub const UNAVAILABLE_PAUSE: Duration = Duration::from_secs(1);
/// Time between two looks for events that are due again.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two writes of the process that publishes.
pub const RENEW_INTERVAL: Duration = Duration::from_millis(600);
/// How often the others look whether it still writes.
pub const TURN_INTERVAL: Duration = Duration::from_millis(300);
/// For how long it must have written nothing. A process that only was slow publishes some events twice.
pub const TAKE_OVER_AFTER: Duration = Duration::from_secs(3);

const _: () = assert!(BATCH_INTERVAL.as_millis() < POLL_INTERVAL.as_millis());
const _: () = assert!(TAKE_OVER_AFTER.as_millis() >= 3 * (RENEW_INTERVAL.as_millis() + TURN_INTERVAL.as_millis()));
