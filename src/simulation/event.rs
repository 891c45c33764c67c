//! What happens when: events in the order of their instants, and of one instant in the order in which they were made.
//!
//! Refuses ties that a heap would break at random: the same seed must give the same run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Index of a job among the arrivals.
pub(super) type JobIndex = u32;
/// Index of a worker process.
pub(super) type ProcessIndex = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The next of the arrivals.
    Arrive,
    /// Back from a delay queue.
    Return(JobIndex),
    /// Recorded and claimed.
    Claimed(JobIndex),
    /// Has slept the rest of its wait in hand.
    WaitOver(JobIndex),
    /// Has waited for a turn long enough, if it still does on this delivery.
    EgressTimeout(JobIndex, u32),
    /// The steady outflow allows the next.
    Egress(ProcessIndex),
    /// The lane's rest may be over.
    ResumeIntake(ProcessIndex),
    GateWake(ProcessIndex),
    /// The call reaches the limiter.
    LimiterCall(ProcessIndex),
    /// Its reply reaches the gate.
    LimiterReply(ProcessIndex),
    /// The attempt is written down and its start has come.
    Begin(JobIndex),
    /// The answer has been read, or the time for it is over.
    Answer(JobIndex),
    /// What became of it is written down.
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
