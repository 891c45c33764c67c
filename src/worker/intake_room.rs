//! The room of a lane for more open payments, up to `intake.max_open_jobs`.
//!
//! A lane goes on recording while its provider takes no payments, so that they are seen, counted and ordered. Beyond the
//! bound its messages stay in the queue. The bound is for all processes together. Each process counts again after a part
//! of the room is used, so that several processes exceed the bound by little.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::lane::LaneContext;

/// Longest time between two counts: other processes record, too.
const COUNT_INTERVAL: Duration = Duration::from_secs(60);
/// The same while the lane is full, and after a count that failed.
const RECOUNT_INTERVAL: Duration = Duration::from_secs(1);
/// A count takes at most this part of the time.
const COUNT_TIME_DIVISOR: u32 = 20;

/// How many payments this process records before the lane's open payments are counted again.
#[derive(Debug, Default)]
pub struct IntakeRoom {
    unused: AtomicU32,
    is_used_up: Notify,
}

impl IntakeRoom {
    /// Records that a payment was recorded.
    pub fn record(&self) {
        if self.unused.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.is_used_up.notify_one();
        }
    }
}

/// Whether a lane with this many open payments is full. It has room again at 95 %, so that its consumer does not stop and
/// start at each payment.
fn is_full(was_full: bool, open: u32, max: u32) -> bool {
    if was_full { u64::from(open) * 100 > u64::from(max) * 95 } else { open >= max }
}

/// Payments that may be recorded before the next count.
fn next_count_after(open: u32, max: u32) -> u32 {
    let room = max.saturating_sub(open);
    (room / 4).max(max / 100).max(1).min(room)
}

/// Keeps the lane's room current until the lane is stopped.
pub async fn run(lane: Arc<LaneContext>) {
    let max = lane.worker.options.max_open_jobs;
    let mut was_full = false;
    loop {
        let began = Instant::now();
        let wait = match lane.worker.backends.ledger.count_open_jobs(&lane.name, max).await {
            Ok(open) => {
                let full = is_full(was_full, open, max);
                if full != was_full {
                    report(&lane, full, max);
                    was_full = full;
                }
                lane.room.unused.store(next_count_after(open, max), Ordering::Relaxed);
                if full { RECOUNT_INTERVAL } else { COUNT_INTERVAL }
            }
            Err(error) => {
                tracing::debug!(provider = %lane.name, %error, "failed to count the open payments, retrying");
                RECOUNT_INTERVAL
            }
        };
        tokio::select! {
            () = lane.stop.cancelled() => return,
            () = sleep(wait.max(began.elapsed() * COUNT_TIME_DIVISOR)) => {}
            () = lane.room.is_used_up.notified() => {}
        }
    }
}

fn report(lane: &LaneContext, is_full: bool, max: u32) {
    if is_full {
        tracing::warn!(provider = %lane.name, max, "the lane has as many open payments as intake.max_open_jobs allows");
    } else {
        tracing::info!(provider = %lane.name, "the lane has room for more open payments");
    }
    lane.control.set_full(is_full.then(|| {
        format!("it has {max} open payments, as many as intake.max_open_jobs allows: its queue keeps the others")
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lane_is_full_at_its_bound_and_has_room_at_95_percent() {
        for (was_full, open, max, full) in [
            (false, 99, 100, false),
            (false, 100, 100, true),
            (true, 100, 100, true),
            (true, 96, 100, true),
            (true, 95, 100, false),
            (false, 1, 1, true),
            (true, 1, 1, true),
            (true, 0, 1, false),
            (true, u32::MAX, u32::MAX, true),
        ] {
            assert_eq!(is_full(was_full, open, max), full, "{open} of {max}");
        }
    }

    #[test]
    fn count_is_due_before_the_room_is_used_up() {
        for (open, max, payments) in [
            (0, 1_000_000, 250_000),
            (980_000, 1_000_000, 10_000),
            (999_000, 1_000_000, 1_000),
            (1_000_000, 1_000_000, 0),
            (2_000_000, 1_000_000, 0),
            (0, 1, 1),
            (98, 100, 1),
        ] {
            assert_eq!(next_count_after(open, max), payments, "{open} of {max}");
        }
    }
}
