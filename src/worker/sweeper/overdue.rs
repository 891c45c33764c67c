//! The rule for overdue jobs: when another copy of the message of a due job without a lease is published.
//!
//! No broker can tell whether the first message still exists, and an overdue job is no sign of loss. On billing day a
//! lane holds 300,000 messages for an hour, and delayed jobs queue behind them. An extra copy is harmless, because the
//! ledger absorbs it, but each costs a delivery. So the copies per job are bounded.

use std::time::Duration;

use crate::ledger::upkeep::OverduePolicy;
use crate::worker::active_jobs::LEASE;

/// Grace of a lane with nothing ready. A delayed copy returns no later than its time, and a claim follows its delivery
/// at once. Beyond 15 s (also the longest step in which a copy waits for another worker's lease) there is no message.
pub const GRACE_EMPTY: Duration = Duration::from_secs(15);
const _: () = assert!(GRACE_EMPTY.as_secs() * 2 >= LEASE.as_secs(), "a copy waits half a lease for another worker's");
/// Least grace of a lane with messages ready.
pub const GRACE_BUSY: Duration = Duration::from_secs(5 * 60);
/// Longest grace of a lane with messages ready: a lost job of a lane that is never empty waits this long.
pub const GRACE_MAX: Duration = Duration::from_secs(60 * 60);
/// Factor on the estimated time through the lane's queue. The real rate may be a fraction of the limit: responses are
/// slow, accounts are limited, and others use the quota too.
const TRANSIT_FACTOR: f64 = 4.0;
/// Longest interval between two copies of one job. The intervals double, so that a job which queues for a day gets
/// five copies, and three more for each further day.
pub const REPUBLISH_INTERVAL_MAX: Duration = Duration::from_secs(6 * 60 * 60);
/// Least copies per lane and sweep, so that a slow lane's jobs return soon.
const BATCH_MIN: f64 = 100.0;
/// Most copies per lane and sweep; the next sweep continues.
const BATCH_MAX: f64 = 2_000.0;

/// State of a lane, as the sweeper sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaneView {
    /// Messages ready in its queue.
    pub ready: u64,
    /// Mean rate of a long backlog at least, by its row; 0 when a limit is closed.
    pub jobs_per_second: f64,
    /// Time for which jobs have been sent since its provider was last down or misconfigured; `None`: they are not sent.
    pub healthy_for: Option<Duration>,
}

/// Which of a lane's jobs to republish, with sweeps this far apart; `None`: none. While a provider is down, its overdue
/// jobs have their messages in the queue. After that, they need their time through the queue first.
pub fn overdue_query(lane: LaneView, every: Duration) -> Option<OverduePolicy> {
    let grace = grace(lane);
    if lane.ready > 0 && lane.healthy_for.is_none_or(|healthy_for| healthy_for < grace) {
        return None;
    }
    // Twice what the lane sends until the next sweep: a lane whose messages are all lost is refilled without a gap.
    let batch = (lane.jobs_per_second * every.as_secs_f64() * 2.0).clamp(BATCH_MIN, BATCH_MAX);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between the two bounds above")]
    let at_most = batch as u32;
    Some(OverduePolicy { grace, republish_after: grace, republish_interval_max: REPUBLISH_INTERVAL_MAX, at_most })
}

/// Pause after a batch of jobs that were ended or emptied: as long as the batch took, so that the payments get at least
/// half of the database's time. `None`: the batch was not full, or the next sweep continues.
pub fn pause_before_next(full: bool, took: Duration, left: Duration) -> Option<Duration> {
    (full && !left.is_zero() && took.saturating_mul(2) <= left).then_some(took)
}

fn grace(lane: LaneView) -> Duration {
    if lane.ready == 0 {
        return GRACE_EMPTY;
    }
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    let transit_s = lane.ready as f64 / lane.jobs_per_second * TRANSIT_FACTOR;
    // The transit time of a closed lane is infinite.
    Duration::try_from_secs_f64(transit_s)
        .map_or(GRACE_MAX, |transit| GRACE_BUSY.saturating_add(transit).min(GRACE_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(ready: u64, jobs_per_second: f64) -> LaneView {
        LaneView { ready, jobs_per_second, healthy_for: Some(Duration::MAX) }
    }

    #[test]
    fn grace_grows_with_the_queue() {
        // ready, jobs per second → seconds
        for (ready, jobs_per_second, grace_s) in [
            (0, 100.0, 15),
            (0, 0.0, 15),
            (1, 100.0, 300),
            (2_500, 100.0, 400),
            (300_000, 100.0, 3_600),
            (300_000, 5_000.0, 540),
            (1, 0.001, 3_600),
            (1, 0.0, 3_600),
            (u64::MAX, f64::MIN_POSITIVE, 3_600),
        ] {
            let got = overdue_query(view(ready, jobs_per_second), EVERY).unwrap();
            assert_eq!(got.grace.as_secs(), grace_s, "{ready} ready at {jobs_per_second}/s");
            assert_eq!((got.republish_after, got.republish_interval_max), (got.grace, REPUBLISH_INTERVAL_MAX));
        }
    }

    #[test]
    fn sweep_batch_matches_the_lane_rate() {
        for (jobs_per_second, at_most) in [(0.0, 100), (5.0, 100), (50.0, 500), (100.0, 1_000), (9_999.0, 2_000)] {
            assert_eq!(overdue_query(view(0, jobs_per_second), EVERY).unwrap().at_most, at_most);
        }
        assert_eq!(overdue_query(view(0, f64::NAN), EVERY).unwrap().at_most, 0);
    }

    #[test]
    fn unhealthy_lane_with_messages_gets_no_copies() {
        let s = Duration::from_secs;
        for (ready, healthy_for, copies) in [
            (13, None, false),
            (13, Some(s(0)), false),
            (13, Some(s(299)), false),
            (13, Some(s(301)), true),
            // Lost jobs of an empty queue return whatever the provider does.
            (0, None, true),
            (0, Some(s(0)), true),
        ] {
            let lane = LaneView { healthy_for, ..view(ready, 100.0) };
            assert_eq!(overdue_query(lane, EVERY).is_some(), copies, "{ready} ready, healthy for {healthy_for:?}");
        }
    }

    #[test]
    fn batches_continue_while_full_and_in_time() {
        let ms = Duration::from_millis;
        for (full, took, left, pause) in [
            (true, 20, 2_500, Some(20)),
            (true, 0, 10, Some(0)),
            (true, 20, 40, Some(20)),
            (true, 20, 39, None),
            (true, 0, 0, None),
            (true, 5_000, 0, None),
            (false, 20, 2_500, None),
        ] {
            assert_eq!(pause_before_next(full, ms(took), ms(left)), pause.map(ms), "{full} in {took}, {left} left");
        }
    }

    /// The bound that the documentation names: intervals double, from the grace to the longest.
    #[test]
    fn copies_per_job_grow_logarithmically() {
        let policy = overdue_query(view(300_000, 100.0), EVERY).unwrap();
        let copies = |within: Duration| {
            let (mut overdue, mut copies) = (policy.grace, 0);
            while overdue <= within {
                copies += 1;
                // As the ledger moves `sweep_after`, plus the grace.
                overdue += overdue.clamp(policy.republish_after, policy.republish_interval_max) + policy.grace;
            }
            copies
        };
        let hours = |hours: u64| Duration::from_secs(hours * 3_600);
        assert_eq!((copies(hours(1)), copies(hours(2)), copies(hours(24)), copies(hours(168))), (1, 1, 5, 26));
    }

    const EVERY: Duration = Duration::from_secs(5);
}
