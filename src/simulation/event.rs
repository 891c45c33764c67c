//! Event queue of the simulation: events sorted by their instants, and by their creation at the same instant.
//!
//! A heap would break ties in any order. The creation number makes the order fixed, so the same seed gives the same
//! run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Index of a job among the arrivals.
pub(super) type JobIndex = u32;
/// Index of a worker process.
pub(super) type ProcessIndex = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The next job arrives.
    Arrive,
    /// A job returns from a delay queue.
    Return(JobIndex),
    /// A job is recorded and its lease is acquired.
    Claimed(JobIndex),
    /// A job that stayed in the worker has waited long enough.
    WaitOver(JobIndex),
    /// The lane's pause may be over.
    ResumeIntake(ProcessIndex),
    GateWake(ProcessIndex),
    /// A job is recorded in the backlog.
    Recorded(JobIndex),
    /// The dispatcher of a process looks at the backlog.
    Dispatch(ProcessIndex),
    /// A call reaches the limiter.
    LimiterCall(ProcessIndex),
    /// A reply reaches the gate.
    LimiterReply(ProcessIndex),
    /// The attempt is recorded, before its start.
    Persisted(JobIndex),
    /// The attempt is recorded and its start has come.
    Begin(JobIndex),
    /// The response was read, or its timeout is over.
    Answer(JobIndex),
    /// The result is recorded.
    Committed(JobIndex),
}

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
}

impl EventQueue {
    pub fn at(&mut self, at_us: u64, event: Event) {
        self.made += 1;
        self.heap.push(Reverse((at_us, self.made, event)));
    }

    pub fn next(&mut self) -> Option<(u64, Event)> {
        self.heap.pop().map(|Reverse((at_us, _, event))| (at_us, event))
    }
}
