//! A flow: one account's jobs of one class on one lane. Flows share a lane fairly, and a limit of an account blocks its
//! flows alone.
//!
//! See `docs/decisions/0040-flows-and-backlog.md`.

use super::job::{Identifier, Job};

/// The class of a flow: 0 for an unknown outcome, then 1 to 10 for the priorities 9 to 0. Lower is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowClass(u8);

impl FlowClass {
    /// Jobs whose outcome is unknown: their idempotency key ages.
    pub const UNKNOWN: Self = Self(0);
    /// Jobs of priority 0.
    pub const LAST: Self = Self(Self::MAX);
    const MAX: u8 = 10;

    /// The class of a job of this priority, 0 to 9, whose outcome is not unknown. A higher priority counts as 9.
    pub fn of_priority(priority: u8) -> Self {
        Self(Self::MAX - priority.min(Self::MAX - 1))
    }

    /// The priority of its jobs; `None`: their outcome is unknown.
    pub fn priority(self) -> Option<u8> {
        (self != Self::UNKNOWN).then_some(Self::MAX - self.0)
    }

    /// `None` above 10.
    pub fn from_number(number: u8) -> Option<Self> {
        (number <= Self::MAX).then_some(Self(number))
    }

    pub fn number(self) -> u8 {
        self.0
    }
}

/// The name of a flow on its lane. Jobs without an account share one flow of each class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow<A> {
    pub class: FlowClass,
    pub account: Option<A>,
}

/// A flow by its account's name, as the ledger has it.
pub type FlowKey = Flow<Identifier>;

impl FlowKey {
    /// The flow of a job whose outcome is not unknown.
    pub fn of(job: &Job) -> Self {
        Self { class: FlowClass::of_priority(job.priority), account: job.account.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_priorities() {
        let of = |priority| FlowClass::of_priority(priority).number();
        assert_eq!([of(9), of(5), of(0), of(200)], [1, 5, 10, 1]);
        assert!(FlowClass::UNKNOWN < FlowClass::of_priority(9));
        assert_eq!([0, 1, 5, 10].map(|class| FlowClass(class).priority()), [None, Some(9), Some(5), Some(0)]);
        assert_eq!((FlowClass::from_number(10).map(FlowClass::number), FlowClass::from_number(11)), (Some(10), None));
    }
}
