//! Events: what happened to payments, in the one order in which readers get them.
//!
//! See `docs/decisions/0053-one-order-of-events.md`.

use std::time::Duration;

use crate::domain::format::{count, is_or_are};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;

/// How long events are kept, and longer as long as their publisher has not passed them.
pub const EVENTS_KEPT_FOR: Duration = Duration::from_secs(35 * 86_400);

/// A change of a payment to a final state, `dead` or `review`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutcomeEvent {
    /// Names its row.
    pub sequence: i64,
    /// Names it for consumers: a UUID.
    pub event_id: String,
    /// It is the n-th event of its payment, from 1 on.
    pub n: u32,
    /// The payment.
    pub id: String,
    pub provider: ProviderName,
    pub state: FinalState,
    pub provider_reference: Option<String>,
    /// ISO 4217 minor units, where another sum than the payment's was charged.
    pub charged_amount: Option<i64>,
    pub reason: Option<String>,
    pub attempts: u32,
    /// Milliseconds since the Unix epoch, the database's clock.
    pub at_ms: i64,
}

/// Events that follow each other in the one order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventPage {
    pub events: Vec<OutcomeEvent>,
    /// Sequences of events between them that cannot be read.
    pub unreadable: Vec<i64>,
    /// The place of the last one: the next page begins after it.
    pub upto: i64,
}

/// What comes after a position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventsAfter {
    Page(EventPage),
    /// No further event has its place yet.
    End,
    /// Some were deleted; those after this position are kept.
    Deleted {
        kept_after: i64,
    },
}

/// A reader's place in the order, kept in the ledger for all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventCursor {
    /// The place of the last event that it has passed.
    pub position: i64,
    /// Fences its writes: each write of its holder raises it.
    pub turn: i64,
    /// The process that reads for it.
    pub holder: Option<String>,
}

/// What became of published events, by their sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishResults {
    /// Confirmed after they had left the order.
    pub published: Vec<i64>,
    /// Rejected by a queue that is bound to their exchange: they leave the order, and are tried later and later.
    pub rejected: Vec<i64>,
    /// Their confirms are late: they leave the order, and are published again unless they are confirmed.
    pub unconfirmed: Vec<i64>,
}

impl PublishResults {
    pub fn is_empty(&self) -> bool {
        self.published.is_empty() && self.rejected.is_empty() && self.unconfirmed.is_empty()
    }

    pub fn extend(&mut self, others: Self) {
        self.published.extend(others.published);
        self.rejected.extend(others.rejected);
        self.unconfirmed.extend(others.unconfirmed);
    }
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
            let are = is_or_are(events);
            let unpublished = count(events, "outcome event");
            format!("{unpublished} {are} not published; the oldest has waited for {oldest_s} s")
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
