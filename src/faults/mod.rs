//! Faults on purpose: places at which the process can be made to die, and known bugs that can be switched on, so that the
//! fault harness (tests/faults) can show that it notices.
//!
//! Refuses to be in anybody's way: without the cargo feature `faults`, which nothing turns on by default, every call in
//! here is an empty constant function and no name of a fault is in the program (`tests/cli/no_fault_injection.rs` looks for them).

#[cfg(feature = "faults")]
mod armed;

#[cfg(feature = "faults")]
pub use armed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};
#[cfg(not(feature = "faults"))]
pub use unarmed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};

/// Where the process dies when `SLUICEGATE_CRASH_AT=name:n` says so and the place is passed for the n-th time. Names as here,
/// in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// A message has been delivered; nothing knows of it.
    AfterDelivery,
    /// The job is recorded and claimed.
    AfterClaim,
    /// The limiter has granted a permit.
    AfterPermit,
    /// `sending` is committed, and nothing has left.
    AfterSending,
    /// Half of the request has left.
    RequestHalfWritten,
    /// All of the request has left, and no answer has come.
    RequestUnanswered,
    /// The answer has been read.
    AfterAnswer,
    /// The answer to a look-up has been read.
    AfterLookup,
    /// The limiter has taken a settlement.
    AfterSettle,
    /// The outcome has been sent to the database, whose reply nobody reads.
    OutcomeCommitUnacknowledged,
    /// The outcome is committed.
    AfterOutcome,
    /// The copy in a delay queue is confirmed, and the original is not acknowledged.
    AfterDelayCopy,
    /// The acknowledgement has been written.
    AfterAck,
    /// An outcome event is confirmed, and not marked as published.
    AfterEvent,
    /// The sweeper has published a job again, and not written that down.
    SweeperAfterPublish,
}

/// What `SLUICEGATE_BUG=name` breaks. Names as here, in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The message is acknowledged when it arrives.
    AckBeforeCommit,
    /// Each request carries an idempotency key of its own.
    NewKeyPerAttempt,
    /// A slot is taken for one window from its grant, however long the request takes.
    SlotFreedAtGrant,
    /// A limiter that has lost its state grants at once.
    NoColdStart,
    /// Permits granted together are counted as one.
    PermitsCountedAsOne,
    /// Copies for delay queues need not reach any queue.
    DelayNotMandatory,
    /// A publish counts as done once it is written.
    AckWithoutConfirm,
}

#[cfg(not(feature = "faults"))]
mod unarmed {
    use std::borrow::Cow;

    use super::{Bug, CrashPoint};
    use crate::provider::FrozenRequest;
    use crate::queue::Receipt;

    /// Dies here if this place was armed.
    #[inline(always)]
    pub const fn crash(_: CrashPoint) {}

    /// Whether this bug was switched on.
    #[inline(always)]
    #[must_use]
    pub const fn bug(_: Bug) -> bool {
        false
    }

    /// The one request on its way; dies with a part of it written, or before it is answered.
    #[inline(always)]
    pub const fn on_the_wire<F: Future>(_: &FrozenRequest, send: F) -> F {
        send
    }

    /// A write to the ledger; dies before its reply is read.
    #[inline(always)]
    pub const fn unread<F: Future>(_: CrashPoint, write: F) -> F {
        write
    }

    /// The receipt, used up already if the bug was switched on.
    #[inline(always)]
    pub fn acknowledged_early(receipt: Box<dyn Receipt>) -> std::future::Ready<Box<dyn Receipt>> {
        std::future::ready(receipt)
    }

    /// The limiter's functions, with their bugs.
    #[inline(always)]
    #[must_use]
    pub const fn patched(source: &str) -> Cow<'_, str> {
        Cow::Borrowed(source)
    }
}
