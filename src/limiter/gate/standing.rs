//! Why a line stands, or why one kind of call does, and when it is worth asking again.
//!
//! Refuses to let the wait of one who is first hold somebody more urgent who comes later.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::RefusedBy;
use super::line::Place;
use crate::domain::decision::CallKind;

/// How long before the announced instant the gate asks again: within the booking horizon, so that the permit comes with
/// its exact start and the attempt can be committed meanwhile.
pub const ASK_AHEAD: Duration = Duration::from_millis(100);
/// Shortest time between a refusal and the next call that only asks again.
pub const ASK_PAUSE: Duration = Duration::from_millis(5);

/// Why nobody passes, until when at the earliest.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    pub by: RefusedBy,
    pub until: Instant,
    pub exact: bool,
    pub ask_at: Instant,
    /// Whose wait this is, where another one's may be shorter.
    first: Option<Place>,
}

/// Kinds of calls that a limit on them alone refuses.
pub(super) type Kinds = BTreeMap<CallKind, Standing>;

impl Standing {
    pub fn new(by: RefusedBy, until: Instant, exact: bool, now: Instant) -> Self {
        // Only an exact start can be booked; asking early for anything else would hear the same again.
        let ahead = if exact { ASK_AHEAD } else { Duration::ZERO };
        let ask_at = until.checked_sub(ahead).unwrap_or(until).max(now + ASK_PAUSE);
        Self { by, until, exact, ask_at, first: None }
    }

    pub fn for_first(self, first: Option<Place>) -> Self {
        Self { first, ..self }
    }

    pub fn is_overtaken_by(&self, place: Place) -> bool {
        self.first.is_some_and(|first| place < first)
    }
}
