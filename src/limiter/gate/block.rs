//! The block of a wait queue or of one kind of call: its reason, its end, and when the gate asks the limiter again.
//!
//! A block names the waiter that was first. A more urgent waiter that arrives later lifts the block.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::wait_queue::QueueKey;
use super::{BlockReason, PAUSE_SPREAD_MAX};
use crate::domain::disposition::HONOURED_WAIT_MAX;
use crate::domain::permit_protocol::{CallKind, LimiterReply, RefusalReason, Shortage, SkippedRequest};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::micros_up;

/// Shortest time between a refusal and the next call that only asks again.
pub const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);

/// The longest time until the gate asks again during a pause: the longest wait that a provider may name, and the
/// spread.
const PAUSE_MAX: Duration = HONOURED_WAIT_MAX.saturating_add(PAUSE_SPREAD_MAX);

/// The longest time until the gate asks again, in microseconds, whatever the store says. Everything that a payment can
/// wait for under these settings is over by then.
pub(super) fn longest_wait_us(spec: &QuotaSpec, reason: RefusalReason) -> u64 {
    match reason {
        RefusalReason::Paused => micros_up(PAUSE_MAX),
        // Some limits keep a use up to 1/256 of its window longer.
        _ => spec.cold_start_us() + spec.longest_window_us() / 128,
    }
}

/// The longest wait that settings allow, if a limit or a pause in this reply exceeds it. Skipped requests that exceed
/// this worker's share wait for the store instead.
pub(super) fn exceeded_wait(
    spec: &QuotaSpec,
    reply: &LimiterReply,
    exceeds_share: impl Fn(&SkippedRequest) -> bool,
) -> Option<Duration> {
    let skipped =
        reply.skipped.iter().filter(|skipped| skipped.shortage == Shortage::NoSlot && !exceeds_share(skipped));
    let skipped = skipped.map(|skipped| (RefusalReason::Limit { index: skipped.limit }, skipped.wait_us));
    let refused = reply.refused.iter().map(|refused| (refused.reason, refused.wait_us));
    let refused = refused.filter(|(reason, _)| matches!(reason, RefusalReason::Limit { .. } | RefusalReason::Paused));
    let waits = refused.chain(skipped).map(|(reason, wait_us)| (longest_wait_us(spec, reason), wait_us));
    let exceeded = waits.filter(|(longest_us, wait_us)| wait_us > longest_us);
    exceeded.map(|(longest_us, _)| Duration::from_micros(longest_us)).max()
}

/// Why no waiter gets a permit, and the earliest instant at which one may.
#[derive(Clone, Debug)]
pub(super) struct QueueBlock {
    pub reason: BlockReason,
    pub until: Instant,
    pub exact: bool,
    pub retry_at: Instant,
    /// The waiter that was refused; a waiter before it may have a shorter wait.
    first_waiter: Option<QueueKey>,
}

/// Blocks of single kinds of call, by a limit that counts only that kind.
pub(super) type BlocksByKind = BTreeMap<CallKind, QueueBlock>;

impl QueueBlock {
    pub fn new(reason: BlockReason, until: Instant, exact: bool, now: Instant) -> Self {
        Self { reason, until, exact, retry_at: until.max(now + RETRY_PAUSE_MIN), first_waiter: None }
    }

    /// The block with the waiter that was first. The limiter is asked again so long before the end. Only an exact start
    /// can be booked ahead; asking early for any other gets the same refusal again.
    pub fn with_first_waiter(self, first: Option<QueueKey>, retry_ahead: Duration, now: Instant) -> Self {
        let ahead = if self.exact { retry_ahead } else { Duration::ZERO };
        let retry_at = self.until.checked_sub(ahead).unwrap_or(self.until).max(now + RETRY_PAUSE_MIN);
        Self { retry_at, first_waiter: first, ..self }
    }

    pub fn is_overtaken_by(&self, key: QueueKey) -> bool {
        self.first_waiter.is_some_and(|first| key < first)
    }
}
