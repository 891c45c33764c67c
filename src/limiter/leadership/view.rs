//! What this worker knows of who may grant for one quota: the row as it was polled, and the store as its link shows it.
//!
//! Refuses to trust a link because it is there: only an answer makes a store reachable.

use std::time::Duration;

use tokio::time::Instant;

use super::attestation::AttestationTracker;
use crate::domain::provider::StoreDown;
use crate::limiter::leader_election::{
    LeadershipDecision, LeadershipTiming, ObservedLeader, ObservedStore, PollResult, SHARE_HOLDER, decide,
};
use crate::limiter::{LeaderRow, LimiterError, StoreConnection};

pub(super) struct LeadershipView {
    policy: StoreDown,
    timing: LeadershipTiming,
    polled: Option<PolledRow>,
    store: StoreStatus,
    pub attestations: AttestationTracker,
}

/// The row, as of the last poll that succeeded.
struct PolledRow {
    sent_at: Instant,
    row: Option<LeaderRow>,
    /// Arrival of the first reply that showed this holder in this term.
    first_seen_at: Instant,
}

enum StoreStatus {
    Unavailable { since: Instant, error: LimiterError },
    Reachable { connection: StoreConnection, since: Instant },
}

impl LeadershipView {
    /// Of a quota that was opened now.
    pub fn new(policy: StoreDown, timing: LeadershipTiming, now: Instant) -> Self {
        let why = LimiterError::Unavailable("no link yet".to_owned());
        Self {
            policy,
            timing,
            polled: None,
            store: StoreStatus::Unavailable { since: now, error: why },
            attestations: AttestationTracker::default(),
        }
    }

    /// The quota's settings have changed.
    pub fn apply_settings(&mut self, policy: StoreDown, timing: LeadershipTiming) {
        (self.policy, self.timing) = (policy, timing);
    }

    /// A poll, or a change of the row, that departed and arrived at these instants showed this row.
    pub fn record_row(&mut self, row: Option<LeaderRow>, departed: Instant, arrived: Instant) {
        self.attestations.record_row(row.as_ref(), departed, arrived);
        let of = |row: &Option<LeaderRow>| row.as_ref().map(|row| (row.holder.clone(), row.term));
        let known = self.polled.as_ref().filter(|told| of(&told.row) == of(&row));
        let seen_at = known.map_or(arrived, |told| told.first_seen_at);
        self.polled = Some(PolledRow { sent_at: departed, row, first_seen_at: seen_at });
    }

    /// The store answered over this link. True if that is news.
    pub fn record_reachable(&mut self, link: StoreConnection, now: Instant) -> bool {
        let (since, news) = match &self.store {
            StoreStatus::Unavailable { .. } => (now, true),
            StoreStatus::Reachable { connection: known, since } => (*since, *known != link),
        };
        self.store = StoreStatus::Reachable { connection: link, since };
        news
    }

    /// The store did not answer. True if that is news.
    pub fn record_unavailable(&mut self, why: &LimiterError, now: Instant) -> bool {
        let (since, news) = match &self.store {
            StoreStatus::Unavailable { since, .. } => (*since, false),
            StoreStatus::Reachable { .. } => (now, true),
        };
        self.store = StoreStatus::Unavailable { since, error: why.clone() };
        news
    }

    pub fn decide(&self, now: Instant) -> LeadershipDecision {
        let since = |at: Instant| -> Duration { now.saturating_duration_since(at) };
        let store = match &self.store {
            StoreStatus::Unavailable { since: at, .. } => ObservedStore::Unavailable { unavailable_for: since(*at) },
            StoreStatus::Reachable { connection: link, since: at } => ObservedStore::Reachable {
                run_id: &link.run_id,
                connected_for: since(link.connected_at),
                reachable_for: since(*at),
            },
        };
        let polled = self.polled.as_ref().map(|told| PollResult {
            age: since(told.sent_at),
            row: told.row.as_ref().map(|row| ObservedLeader {
                holder: &row.holder,
                age: row.age,
                known_for: since(told.first_seen_at),
            }),
        });
        decide(store, polled, self.policy, self.timing)
    }

    /// What the state of the present holder's term is called.
    pub fn term_run_id(&self) -> Option<String> {
        let row = self.polled.as_ref()?.row.as_ref()?;
        let holder = row.holder.strip_prefix("redis:").unwrap_or(SHARE_HOLDER);
        Some(format!("{holder}/{}", row.term))
    }

    /// The link by which the store was reached last.
    pub fn connection(&self) -> Option<&StoreConnection> {
        match &self.store {
            StoreStatus::Reachable { connection: link, .. } => Some(link),
            StoreStatus::Unavailable { .. } => None,
        }
    }

    /// Why the store is away, in its own words.
    pub fn unavailable_error(&self) -> LimiterError {
        match &self.store {
            StoreStatus::Unavailable { error: why, .. } => why.clone(),
            StoreStatus::Reachable { .. } => {
                LimiterError::Unavailable("the limiter store was away until now".to_owned())
            }
        }
    }
}
