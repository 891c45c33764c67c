//! The block of a wait queue or of one kind of call: its reason, its end, and when the gate asks the limiter again.
//!
//! A block names the waiter that was first. A more urgent waiter that arrives later lifts the block.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::BlockReason;
use super::wait_queue::QueueKey;
use crate::domain::permit_protocol::{CallKind, LimiterReply, RefusalReason, Shortage, SkippedRequest};
use crate::domain::quota_spec::QuotaSpec;

/// Shortest time between a refusal and the next call that only asks again.
pub const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);

/// The longest time until the gate asks again because of a limit, in microseconds. Everything that a payment can wait for
/// under these settings is over by then. Some limits keep a use up to 1/256 of its window longer.
pub(super) fn longest_wait_us(spec: &QuotaSpec) -> u64 {
    spec.cold_start_us() + spec.longest_window_us() / 128
}

/// The longest wait that settings allow, if a limit in this reply exceeds it. Skipped requests that exceed this worker's
/// share wait for the store instead.
pub(super) fn exceeded_wait(
    spec: &QuotaSpec,
    reply: &LimiterReply,
    exceeds_share: impl Fn(&SkippedRequest) -> bool,
) -> Option<Duration> {
    let skipped =
        reply.skipped.iter().filter(|skipped| skipped.shortage == Shortage::NoSlot && !exceeds_share(skipped));
    let refused = reply.refused.filter(|refused| matches!(refused.reason, RefusalReason::Limit { .. }));
    let mut waits = skipped.map(|skipped| skipped.wait_us).chain(refused.map(|refused| refused.wait_us));
    let longest_us = longest_wait_us(spec);
    waits.any(|wait_us| wait_us > longest_us).then(|| Duration::from_micros(longest_us))
}

/// Why no waiter gets a permit, and the earliest instant at which one may.
#[derive(Clone, Debug)]
pub(super) struct QueueBlock {
    pub reason: BlockReason,
    pub until: Instant,
    pub exact: bool,
    pub retry_at: Instant,
    /// The waiter that was refused costs more than 1, so that a cheaper one might pass. It is soon over.
    pub is_by_cost: bool,
    /// The waiter that was refused; a waiter before it may have a shorter wait.
    first_waiter: Option<QueueKey>,
}

/// Blocks of single kinds of call, by a limit that counts only that kind.
pub(super) type BlocksByKind = BTreeMap<CallKind, QueueBlock>;

impl QueueBlock {
    pub fn new(reason: BlockReason, until: Instant, exact: bool, now: Instant) -> Self {
        let retry_at = until.max(now + RETRY_PAUSE_MIN);
        Self { reason, until, exact, retry_at, is_by_cost: false, first_waiter: None }
    }

    /// The block with the waiter that was first. The limiter is asked again so long before the end. Only an exact start
    /// can be booked ahead; asking early for any other gets the same refusal again.
    pub fn with_first_waiter(self, first: Option<QueueKey>, retry_ahead: Duration, now: Instant) -> Self {
        let ahead = if self.exact { retry_ahead } else { Duration::ZERO };
        let retry_at = self.until.checked_sub(ahead).unwrap_or(self.until).max(now + RETRY_PAUSE_MIN);
        Self { retry_at, first_waiter: first, ..self }
    }

    /// The block by a waiter of this cost.
    pub fn by_cost(self, cost: u32) -> Self {
        Self { is_by_cost: cost > 1, ..self }
    }

    pub fn is_overtaken_by(&self, key: QueueKey) -> bool {
        self.first_waiter.is_some_and(|first| key < first)
    }
}
