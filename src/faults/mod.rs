//! Fault injection: crash points at which the process can die, and known bugs that can be switched on.
//!
//! With them the fault harness (tests/faults) shows that it notices faults. Without the cargo feature `faults`, which
//! is off by default, every call here is an empty constant function. Then the program contains no name of a fault
//! (`tests/cli/no_fault_injection.rs` checks that).

#[cfg(feature = "faults")]
mod armed;

#[cfg(feature = "faults")]
pub use armed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};
#[cfg(not(feature = "faults"))]
pub use unarmed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};

/// A point at which the process dies when it is passed for the n-th time, by `SLUICEGATE_CRASH_AT=name:n`. The names
/// are the variants in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// A message is delivered and nothing is recorded.
    AfterDelivery,
    /// The job is recorded and claimed.
    AfterClaim,
    /// A new job is recorded in the backlog, and its message is not acknowledged.
    AfterBacklogRecord,
    /// A job has returned to the backlog, and its message is not acknowledged.
    AfterBacklogReturn,
    /// Jobs of the backlog are claimed.
    AfterBacklogClaim,
    /// The limiter has granted a permit.
    AfterPermit,
    /// `sending` is committed, and nothing is sent.
    AfterSending,
    /// Half of the request is sent.
    RequestHalfWritten,
    /// The whole request is sent, and there is no response yet.
    RequestUnanswered,
    /// The response has been read.
    AfterAnswer,
    /// The response to a look-up has been read.
    AfterLookup,
    /// The permit is released.
    AfterSettle,
    /// The outcome has been sent to the database, and its reply is not read.
    OutcomeCommitUnacknowledged,
    /// The outcome is committed.
    AfterOutcome,
    /// The copy in a delay queue is confirmed, and the original is not acknowledged.
    AfterDelayCopy,
    /// The acknowledgement has been written.
    AfterAck,
    /// An outcome event is confirmed, and not marked as published.
    AfterEvent,
    /// The sweeper has republished a job and not recorded that.
    SweeperAfterPublish,
}

/// A bug that `SLUICEGATE_BUG=name` switches on. The names are the variants in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// The message is acknowledged when it arrives.
    AckBeforeCommit,
    /// Each request has a new idempotency key.
    NewKeyPerAttempt,
    /// A slot is used for one window from its grant, however long the request takes.
    SlotFreedAtGrant,
    /// A limiter that lost its state grants at once.
    NoColdStart,
    /// Permits granted together are counted as one.
    PermitsCountedAsOne,
    /// Copies for delay queues are published without `mandatory`.
    DelayNotMandatory,
    /// A publish counts as done once it is written.
    AckWithoutConfirm,
    /// A new job of the backlog is not counted in its flow.
    FlowNotCounted,
    /// The tag of a flow stays where it is when its jobs are claimed.
    TagNotMoved,
    /// The block of a flow does not end at its instant.
    FlowNotWoken,
}

#[cfg(not(feature = "faults"))]
mod unarmed {
    use std::borrow::Cow;

    use super::{Bug, CrashPoint};
    use crate::provider::FrozenRequest;
    use crate::queue::Receipt;

    /// Dies here if this point is armed.
    #[inline(always)]
    pub const fn crash(_: CrashPoint) {}

    /// Whether this bug is switched on.
    #[inline(always)]
    pub const fn bug(_: Bug) -> bool {
        false
    }

    /// Wraps the one request; dies when half of it is sent, or before its response.
    #[inline(always)]
    pub const fn on_the_wire<F: Future>(_: &FrozenRequest, send: F) -> F {
        send
    }

    /// Wraps a write to the ledger; dies before its reply is read.
    #[inline(always)]
    pub const fn unread<F: Future>(_: CrashPoint, write: F) -> F {
        write
    }

    /// The receipt, already acknowledged if the bug is switched on.
    #[inline(always)]
    pub fn acknowledged_early(receipt: Box<dyn Receipt>) -> std::future::Ready<Box<dyn Receipt>> {
        std::future::ready(receipt)
    }

    /// The limiter's Lua functions, with the bugs that are switched on.
    #[inline(always)]
    pub const fn patched(source: &str) -> Cow<'_, str> {
        Cow::Borrowed(source)
    }
}
