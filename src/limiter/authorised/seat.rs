//! What this worker knows of who may grant for one quota: the row as it was polled, and the store as its link shows it.
//!
//! Refuses to trust a link because it is there: only an answer makes a store reachable.

use std::time::Duration;

use tokio::time::Instant;

use super::clocks::Clocks;
use crate::domain::provider::StoreDown;
use crate::limiter::authority::{Decision, Polled, Row, SHARE, Store, Timing, decide};
use crate::limiter::{AuthorityRow, LimiterError, Linked};

pub(super) struct Seat {
    policy: StoreDown,
    timing: Timing,
    polled: Option<Told>,
    store: Seen,
    pub clocks: Clocks,
}

/// The row, as of the last poll that succeeded.
struct Told {
    departed: Instant,
    row: Option<AuthorityRow>,
    /// Arrival of the first reply that showed this holder in this term.
    seen_at: Instant,
}

enum Seen {
    Away { since: Instant, why: LimiterError },
    Reachable { link: Linked, since: Instant },
}

impl Seat {
    /// Of a quota that was opened now.
    pub fn new(policy: StoreDown, timing: Timing, now: Instant) -> Self {
        let why = LimiterError::Away("no link yet".to_owned());
        Self { policy, timing, polled: None, store: Seen::Away { since: now, why }, clocks: Clocks::default() }
    }

    /// The quota's settings have changed.
    pub fn follow(&mut self, policy: StoreDown, timing: Timing) {
        (self.policy, self.timing) = (policy, timing);
    }

    /// A poll, or a change of the row, that departed and arrived at these instants showed this row.
    pub fn told(&mut self, row: Option<AuthorityRow>, departed: Instant, arrived: Instant) {
        self.clocks.told(row.as_ref(), departed, arrived);
        let of = |row: &Option<AuthorityRow>| row.as_ref().map(|row| (row.holder.clone(), row.term));
        let known = self.polled.as_ref().filter(|told| of(&told.row) == of(&row));
        let seen_at = known.map_or(arrived, |told| told.seen_at);
        self.polled = Some(Told { departed, row, seen_at });
    }

    /// The store answered over this link. True if that is news.
    pub fn reachable(&mut self, link: Linked, now: Instant) -> bool {
        let (since, news) = match &self.store {
            Seen::Away { .. } => (now, true),
            Seen::Reachable { link: known, since } => (*since, *known != link),
        };
        self.store = Seen::Reachable { link, since };
        news
    }

    /// The store did not answer. True if that is news.
    pub fn away(&mut self, why: &LimiterError, now: Instant) -> bool {
        let (since, news) = match &self.store {
            Seen::Away { since, .. } => (*since, false),
            Seen::Reachable { .. } => (now, true),
        };
        self.store = Seen::Away { since, why: why.clone() };
        news
    }

    pub fn decide(&self, now: Instant) -> Decision {
        let since = |at: Instant| -> Duration { now.saturating_duration_since(at) };
        let store = match &self.store {
            Seen::Away { since: at, .. } => Store::Away { since: since(*at) },
            Seen::Reachable { link, since: at } => {
                Store::Reachable { run_id: &link.run_id, linked: since(link.made_at), since: since(*at) }
            }
        };
        let polled = self.polled.as_ref().map(|told| Polled {
            ago: since(told.departed),
            row: told.row.as_ref().map(|row| Row { holder: &row.holder, age: row.age, seen: since(told.seen_at) }),
        });
        decide(store, polled, self.policy, self.timing)
    }

    /// What the state of the present holder's term is called.
    pub fn identity(&self) -> Option<String> {
        let row = self.polled.as_ref()?.row.as_ref()?;
        let holder = row.holder.strip_prefix("redis:").unwrap_or(SHARE);
        Some(format!("{holder}/{}", row.term))
    }

    /// The link by which the store was reached last.
    pub fn link(&self) -> Option<&Linked> {
        match &self.store {
            Seen::Reachable { link, .. } => Some(link),
            Seen::Away { .. } => None,
        }
    }

    /// Why the store is away, in its own words.
    pub fn why_away(&self) -> LimiterError {
        match &self.store {
            Seen::Away { why, .. } => why.clone(),
            Seen::Reachable { .. } => LimiterError::Away("the limiter store was away until now".to_owned()),
        }
    }
}
