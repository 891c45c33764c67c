//! Headers that Sluicegate adds to messages, the same in every implementation.
//!
//! Headers of a producer pass through unchanged.

use std::time::Duration;

use super::{Destination, OutgoingMessage, Properties};

/// On an invalid message: the code of its reason.
pub const REASON: &str = "x-sluicegate-reason";
/// On an invalid message: field and fix, for people.
pub const DETAIL: &str = "x-sluicegate-detail";

/// On a copy that we publish of a job's message: its number, from 1. A producer's message has none, and counts as 0.
pub const COPY: &str = "x-sluicegate-copy";

/// On a message that was given up and published again: how often that happened.
pub const DEAD_ROUNDS: &str = "x-sluicegate-dead-rounds";

/// On a message of a newer format that waits: since when, in seconds since the Unix epoch.
pub const WAITS_SINCE: &str = "x-sluicegate-waits-since";

/// Since when this message waits for a newer worker.
pub fn waits_since(properties: &Properties) -> Option<Duration> {
    let seconds = properties.headers.get(WAITS_SINCE).and_then(|text| text.parse().ok());
    seconds.map(Duration::from_secs)
}

/// The same properties for a message that waits since then.
pub fn with_waits_since(mut properties: Properties, since: Duration) -> Properties {
    properties.headers.insert(WAITS_SINCE.to_owned(), since.as_secs().to_string());
    properties
}

/// The same properties for a message whose wait has ended: publishing it again begins another.
pub fn without_waits_since(mut properties: Properties) -> Properties {
    properties.headers.remove(WAITS_SINCE);
    properties
}

/// The number of this copy of its job's message. A header that cannot be read was not written by us.
pub fn copy_number(properties: &Properties) -> i64 {
    let number = properties.headers.get(COPY).and_then(|text| text.parse().ok());
    number.filter(|number| *number > 0).unwrap_or(0)
}

/// The same properties for a copy with this number.
pub fn with_copy_number(mut properties: Properties, number: i64) -> Properties {
    if number > 0 {
        properties.headers.insert(COPY.to_owned(), number.to_string());
    }
    properties
}

/// The message's properties, with the headers that its destination adds.
pub(super) fn with_destination_headers(message: &OutgoingMessage) -> Properties {
    let mut properties = message.properties.clone();
    if let Destination::Invalid { reason, detail } = &message.destination {
        properties.headers.insert(REASON.to_owned(), reason.code().to_owned());
        properties.headers.insert(DETAIL.to_owned(), detail.clone());
    }
    properties
}
