//! This worker's view of one quota's leadership: the leader row as last polled, and the store's reachability.
//!
//! A store counts as reachable only after it has responded; an open connection is not enough.

use std::time::Duration;

use tokio::time::Instant;

use super::attestation::AttestationTracker;
use crate::domain::clock_comparison::LeaderRow;
use crate::domain::provider::StoreDown;
use crate::limiter::leader_election::{
    LeadershipDecision, LeadershipTiming, ObservedLeader, ObservedStore, PollResult, SHARE_HOLDER, decide,
};
use crate::limiter::{LimiterError, StoreConnection};

pub(super) struct LeadershipView {
    policy: StoreDown,
    timing: LeadershipTiming,
    polled: Option<PolledRow>,
    store: StoreStatus,
    pub attestations: AttestationTracker,
}

/// The row as of the last successful poll.
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
    /// The view of a quota that opens now: nothing polled, nothing connected.
    pub fn new(policy: StoreDown, timing: LeadershipTiming, now: Instant) -> Self {
        let error = LimiterError::Unavailable("not connected yet".to_owned());
        Self {
            policy,
            timing,
            polled: None,
            store: StoreStatus::Unavailable { since: now, error },
            attestations: AttestationTracker::default(),
        }
    }

    /// Applies changed settings of the quota.
    pub fn apply_settings(&mut self, policy: StoreDown, timing: LeadershipTiming) {
        (self.policy, self.timing) = (policy, timing);
    }

    /// Records the row that a poll or a change of the row returned; it was sent and answered at these instants.
    pub fn record_row(&mut self, row: Option<LeaderRow>, sent_at: Instant, received_at: Instant) {
        self.attestations.record_row(row.as_ref(), sent_at, received_at);
        let holder_and_term = |row: &Option<LeaderRow>| row.as_ref().map(|row| (row.holder.clone(), row.term));
        let known = self.polled.as_ref().filter(|polled| holder_and_term(&polled.row) == holder_and_term(&row));
        let first_seen_at = known.map_or(received_at, |polled| polled.first_seen_at);
        self.polled = Some(PolledRow { sent_at, row, first_seen_at });
    }

    /// Records that the store responded over this connection. `true` if that is a change.
    pub fn record_reachable(&mut self, connection: StoreConnection, now: Instant) -> bool {
        let (since, is_change) = match &self.store {
            StoreStatus::Unavailable { .. } => (now, true),
            StoreStatus::Reachable { connection: known, since } => (*since, *known != connection),
        };
        self.store = StoreStatus::Reachable { connection, since };
        is_change
    }

    /// Records that the store did not respond. `true` if that is a change.
    pub fn record_unavailable(&mut self, error: &LimiterError, now: Instant) -> bool {
        let (since, is_change) = match &self.store {
            StoreStatus::Unavailable { since, .. } => (*since, false),
            StoreStatus::Reachable { .. } => (now, true),
        };
        self.store = StoreStatus::Unavailable { since, error: error.clone() };
        is_change
    }

    pub fn decide(&self, now: Instant) -> LeadershipDecision {
        let since = |at: Instant| -> Duration { now.saturating_duration_since(at) };
        let store = match &self.store {
            StoreStatus::Unavailable { since: at, .. } => ObservedStore::Unavailable { unavailable_for: since(*at) },
            StoreStatus::Reachable { connection, since: at } => ObservedStore::Reachable {
                run_id: &connection.run_id,
                connected_for: since(connection.connected_at),
                reachable_for: since(*at),
            },
        };
        let polled = self.polled.as_ref().map(|polled| PollResult {
            age: since(polled.sent_at),
            row: polled.row.as_ref().map(|row| ObservedLeader {
                holder: &row.holder,
                age: row.age,
                known_for: since(polled.first_seen_at),
            }),
        });
        decide(store, polled, self.policy, self.timing)
    }

    /// Run id of the limiter state in the current holder's term.
    pub fn term_run_id(&self) -> Option<String> {
        let row = self.polled.as_ref()?.row.as_ref()?;
        let holder = row.holder.strip_prefix("redis:").unwrap_or(SHARE_HOLDER);
        Some(format!("{holder}/{}", row.term))
    }

    /// The connection over which the store is reachable.
    pub fn connection(&self) -> Option<&StoreConnection> {
        match &self.store {
            StoreStatus::Reachable { connection, .. } => Some(connection),
            StoreStatus::Unavailable { .. } => None,
        }
    }

    /// Why the store is unavailable, as the store or the connection reported it.
    pub fn unavailable_error(&self) -> LimiterError {
        match &self.store {
            StoreStatus::Unavailable { error, .. } => error.clone(),
            StoreStatus::Reachable { .. } => {
                LimiterError::Unavailable("the limiter store is only just available again".to_owned())
            }
        }
    }
}
