//! Unpublished outcome events: which are leased next, how many there are, and when to warn an operator.

use std::time::Duration;

use crate::domain::format::{count, is_or_are};

/// Selection of events to lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventSelection {
    NeverRejected,
    /// Rejected by a queue that is bound to their exchange, and due for the next try.
    RejectedBefore,
}

/// Counts of unpublished events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnpublishedEvents {
    pub events: u64,
    /// Those that a queue has rejected.
    pub rejected: u64,
    /// Time since the oldest was written; `None` when there is none.
    pub oldest: Option<Duration>,
}

/// Events that wait for longer cause a warning.
const LATE_AFTER: Duration = Duration::from_secs(60);

impl UnpublishedEvents {
    /// The warning for the operator, if there is one.
    pub fn warning(&self) -> Option<String> {
        let Self { events, rejected, oldest } = *self;
        let oldest_s = oldest.unwrap_or_default().as_secs();
        if rejected > 0 {
            return Some(format!(
                "{} {} rejected by a queue that is bound to the exchange of outcomes (full, with x-overflow = reject-publish?); \
                 its other queues get each of them again with every try. The oldest of {} has waited for {oldest_s} s",
                count(rejected, "outcome event"),
                is_or_are(rejected),
                count(events, "unpublished event")
            ));
        }
        let late = oldest.is_some_and(|oldest| oldest >= LATE_AFTER);
        late.then(|| {
            let (events, are) = (count(events, "outcome event"), is_or_are(events));
            format!("{events} {are} not published; the oldest has waited for {oldest_s} s")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_or_rejected_events_cause_a_warning() {
        let warning = |rejected, oldest_s| {
            UnpublishedEvents { events: 9, rejected, oldest: Some(Duration::from_secs(oldest_s)) }.warning()
        };
        assert_eq!(UnpublishedEvents::default().warning(), None);
        assert_eq!(warning(0, 59), None);
        assert_eq!(warning(0, 61).unwrap(), "9 outcome events are not published; the oldest has waited for 61 s");
        let one = warning(1, 5).unwrap();
        assert!(one.starts_with("1 outcome event is rejected by a queue"), "{one}");
        let rejected = warning(3, 5).unwrap();
        assert!(rejected.starts_with("3 outcome events are rejected by a queue"), "{rejected}");
        assert!(rejected.ends_with("The oldest of 9 unpublished events has waited for 5 s"), "{rejected}");
    }
}
