//! Who may grant, decided from what one worker sees: its link to the store, and the one row in SQL that names the holder.
//!
//! The row is polled by every worker, so at most one holder is believed in at a time, but for a while: a worker may act on
//! the former holder until [`Timing::stale`] after its last poll. Therefore a new holder grants nothing before everybody
//! has seen it. Refuses all I/O and every clock; a verdict holds for the instant at which it was asked for, and is asked
//! for again before each use.

use std::time::Duration;

use crate::domain::provider::StoreDown;

/// The row's word for "each worker grants its own share".
pub const SHARE_HOLDER: &str = "share";
/// What the clocks of two machines may go apart by while a holder changes.
const CLOCK_SKEW_MAX: Duration = Duration::from_millis(50);

/// The row's word for the primary with this run id, or for the process with it whose limiter is embedded.
#[must_use]
pub fn holder_name(run_id: &str) -> String {
    format!("redis:{run_id}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeadershipTiming {
    /// How often the row is polled.
    pub poll_interval: Duration,
    /// How long permits of a former holder may still start after they were granted (booking horizon and send budget),
    /// and what clocks may differ by.
    pub slack: Duration,
    /// How long the store is away before shares are used.
    pub share_after: Duration,
    /// How long the store must have been reachable without a break before shares end.
    pub share_ends_after: Duration,
    /// How long shares last at least: where some workers reach the store and some do not, the row would else be passed to
    /// and fro, and each change costs a cold start.
    pub share_min_duration: Duration,
}

impl LeadershipTiming {
    /// With the row polled so often, and nothing in hands yet.
    #[must_use]
    pub const fn with_poll_interval(poll_interval: Duration) -> Self {
        Self {
            poll_interval,
            slack: CLOCK_SKEW_MAX,
            share_after: Duration::from_secs(5),
            share_ends_after: Duration::from_secs(10),
            share_min_duration: Duration::from_secs(60),
        }
    }

    /// For a quota whose permits may still start this long after they were granted.
    #[must_use]
    pub fn with_start_delay_max(mut self, in_hand: Duration) -> Self {
        self.slack += in_hand;
        self
    }

    /// A row that was polled longer ago than this, counted from the departure of the poll, says nothing any more.
    #[must_use]
    pub fn stale_after(&self) -> Duration {
        self.poll_interval * 3
    }

    /// Once a holder has been in sight for this long, nobody acts on the former one, and nothing that the former one
    /// granted can still start.
    #[must_use]
    pub fn handover(&self) -> Duration {
        self.stale_after() + self.slack
    }
}

/// The store as this worker's link sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedStore<'a> {
    /// No link, for this long.
    Unavailable { unavailable_for: Duration },
    Reachable {
        /// Of the primary that the link leads to.
        run_id: &'a str,
        /// How long ago this link was made: asked for afresh then, by name.
        connected_for: Duration,
        /// How long the store has been reachable without a break.
        reachable_for: Duration,
    },
}

/// The row as of the last poll that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollResult<'a> {
    /// How long ago the poll departed.
    pub age: Duration,
    pub row: Option<ObservedLeader<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedLeader<'a> {
    pub holder: &'a str,
    /// Age by the database, when it was polled.
    pub age: Duration,
    /// How long ago, until now, the reply arrived that first showed this holder in this term to us: a change is seen by
    /// others only once it is committed, and its age begins before that.
    pub known_for: Duration,
}

/// Who may grant now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leader {
    /// The store, if its state was warmed in this row's term. Only with `may_warm` may a state be warmed.
    Store {
        may_rebuild: bool,
    },
    /// This worker, out of its own share, from a state that is rebuilt when this verdict first comes.
    FallbackShare,
    NoLeader(NoLeaderCause),
}

/// Why nobody may grant, for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLeaderCause {
    #[error("the database has not said yet which limiter store grants")]
    NotPolled,
    #[error("the database cannot be asked which limiter store grants")]
    DatabaseUnavailable,
    #[error("the limiter store is away")]
    StoreUnavailable,
    #[error("no limiter store has been given this quota yet")]
    NoHolder,
    #[error("another limiter store grants for this quota; the link is made anew")]
    AnotherStore,
    #[error(
        "another limiter store grants for this quota, but our link leads elsewhere even when made anew: this one takes \
         over. If this repeats, workers are linked to two writable primaries, and nobody is granted anything until they \
         agree: check limiter.url of all workers, and the failover"
    )]
    TwoStores,
    #[error("the holder is changing: others may not have noticed yet")]
    Changing,
}

/// Compare and set on the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Takeover {
    pub from: Option<String>,
    pub to: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct LeadershipDecision {
    pub leader: Leader,
    pub takeover: Option<Takeover>,
    /// Drop the link and make it anew, by name: it may lead to a store that was replaced.
    pub reconnect: bool,
}

impl LeadershipDecision {
    fn from_leader(leader: Leader) -> Self {
        Self { leader, takeover: None, reconnect: false }
    }

    fn no_leader(cause: NoLeaderCause) -> Self {
        Self::from_leader(Leader::NoLeader(cause))
    }

    fn with_takeover(mut self, from: Option<&str>, to: String) -> Self {
        self.takeover = Some(Takeover { from: from.map(str::to_owned), to });
        self
    }
}

/// Who may grant, and what to change, for one quota at one instant. `polled`: `None` until the first poll succeeded.
pub fn decide(
    store: ObservedStore<'_>,
    polled: Option<PollResult<'_>>,
    policy: StoreDown,
    timing: LeadershipTiming,
) -> LeadershipDecision {
    let Some(polled) = polled else { return LeadershipDecision::no_leader(NoLeaderCause::NotPolled) };
    if polled.age > timing.stale_after() {
        return LeadershipDecision::no_leader(NoLeaderCause::DatabaseUnavailable);
    }
    let Some(row) = polled.row else { return without_holder(store, policy, timing) };
    // The database's clock may be set, and ages begin before their commit; what was seen is later than both.
    let age = row.known_for.min(row.age + polled.age);
    if row.holder == SHARE_HOLDER {
        return while_shared(store, policy, age, timing);
    }
    match store {
        ObservedStore::Unavailable { unavailable_for: since } => {
            while_unavailable(since, policy, Some(row.holder), timing)
        }
        ObservedStore::Reachable { run_id, .. } if row.holder == holder_name(run_id) => {
            LeadershipDecision::from_leader(Leader::Store { may_rebuild: age >= timing.handover() })
        }
        // Made after we saw who holds: the holder is gone, or somebody's link leads elsewhere.
        ObservedStore::Reachable { run_id, connected_for: linked, .. } if linked < row.known_for => {
            LeadershipDecision::no_leader(NoLeaderCause::TwoStores).with_takeover(Some(row.holder), holder_name(run_id))
        }
        ObservedStore::Reachable { .. } => {
            LeadershipDecision { reconnect: true, ..LeadershipDecision::no_leader(NoLeaderCause::AnotherStore) }
        }
    }
}

fn without_holder(store: ObservedStore<'_>, policy: StoreDown, timing: LeadershipTiming) -> LeadershipDecision {
    match store {
        ObservedStore::Unavailable { unavailable_for: since } => while_unavailable(since, policy, None, timing),
        ObservedStore::Reachable { run_id, .. } => {
            LeadershipDecision::no_leader(NoLeaderCause::NoHolder).with_takeover(None, holder_name(run_id))
        }
    }
}

fn while_unavailable(
    since: Duration,
    policy: StoreDown,
    from: Option<&str>,
    timing: LeadershipTiming,
) -> LeadershipDecision {
    let decision = LeadershipDecision::no_leader(NoLeaderCause::StoreUnavailable);
    match policy {
        StoreDown::Share { .. } if since >= timing.share_after => decision.with_takeover(from, SHARE_HOLDER.to_owned()),
        StoreDown::Share { .. } | StoreDown::Wait => decision,
    }
}

fn while_shared(
    store: ObservedStore<'_>,
    policy: StoreDown,
    age: Duration,
    timing: LeadershipTiming,
) -> LeadershipDecision {
    let decision = match policy {
        StoreDown::Share { .. } if age >= timing.handover() => LeadershipDecision::from_leader(Leader::FallbackShare),
        StoreDown::Share { .. } => LeadershipDecision::no_leader(NoLeaderCause::Changing),
        StoreDown::Wait => LeadershipDecision::no_leader(NoLeaderCause::StoreUnavailable),
    };
    let ObservedStore::Reachable { run_id, reachable_for: since, .. } = store else { return decision };
    let ends = policy == StoreDown::Wait || (since >= timing.share_ends_after && age >= timing.share_min_duration);
    if ends { decision.with_takeover(Some(SHARE_HOLDER), holder_name(run_id)) } else { decision }
}

#[cfg(test)]
#[path = "leader_election_tests.rs"]
mod tests;
