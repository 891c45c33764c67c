//! Headers that we add to messages, the same in every implementation.
//!
//! Refuses anything that a producer wrote: those pass through untouched.

use super::{Destination, Outgoing, Properties};

/// On an invalid message: the code of its reason.
pub const REASON: &str = "x-sluicegate-reason";
/// On an invalid message: field and mend, for people.
pub const DETAIL: &str = "x-sluicegate-detail";

/// On a message that was given up and published again: how often that happened.
pub const DEAD_ROUNDS: &str = "x-sluicegate-dead-rounds";

/// The message's properties, with the headers that its destination adds.
pub(super) fn with_destination(message: &Outgoing) -> Properties {
    let mut properties = message.properties.clone();
    if let Destination::Invalid { reason, detail } = &message.destination {
        properties.headers.insert(REASON.to_owned(), reason.code().to_owned());
        properties.headers.insert(DETAIL.to_owned(), detail.clone());
    }
    properties
}
