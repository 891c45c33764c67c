//! Why a line stands, or why one kind of call does, and when it is worth asking again.
//!
//! Refuses to let the wait of one who is first hold somebody more urgent who comes later.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::BlockReason;
use super::wait_queue::QueueKey;
use crate::domain::permit_protocol::CallKind;

/// How long before the announced instant the gate asks again: within the booking horizon, so that the permit comes with
/// its exact start and the attempt can be committed meanwhile.
pub const RETRY_AHEAD: Duration = Duration::from_millis(100);
/// Shortest time between a refusal and the next call that only asks again.
pub const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);

/// Why nobody passes, until when at the earliest.
#[derive(Clone, Debug)]
pub(super) struct QueueBlock {
    pub reason: BlockReason,
    pub until: Instant,
    pub exact: bool,
    pub retry_at: Instant,
    /// Whose wait this is, where another one's may be shorter.
    first_waiter: Option<QueueKey>,
}

/// Kinds of calls that a limit on them alone refuses.
pub(super) type BlocksByKind = BTreeMap<CallKind, QueueBlock>;

impl QueueBlock {
    pub fn new(reason: BlockReason, until: Instant, exact: bool, now: Instant) -> Self {
        // Only an exact start can be booked; asking early for anything else would hear the same again.
        let ahead = if exact { RETRY_AHEAD } else { Duration::ZERO };
        let retry_at = until.checked_sub(ahead).unwrap_or(until).max(now + RETRY_PAUSE_MIN);
        Self { reason, until, exact, retry_at, first_waiter: None }
    }

    pub fn with_first_waiter(self, first: Option<QueueKey>) -> Self {
        Self { first_waiter: first, ..self }
    }

    pub fn is_overtaken_by(&self, place: QueueKey) -> bool {
        self.first_waiter.is_some_and(|first| place < first)
    }
}
