//! The leader election as one worker decides it, from its connection to the store and from the leader row in SQL.
//!
//! Every worker polls the row. A worker may act on the former holder until [`LeadershipTiming::stale_after`] after its
//! last poll. Therefore a new holder grants nothing until every worker has seen it. The module does no I/O and reads no
//! clock. A decision holds for one instant; each use asks again. See `docs/decisions/0014-leader-row-in-sql.md`.

use std::time::Duration;

use crate::domain::provider::StoreDown;

/// The holder's name while each worker grants its own share.
pub const SHARE_HOLDER: &str = "share";
/// Largest drift between the clocks of two machines while a holder changes.
const CLOCK_SKEW_MAX: Duration = Duration::from_millis(50);

/// The holder's name for the Redis primary with this run id, or for the process with this run id and an embedded
/// limiter.
pub fn holder_name(run_id: &str) -> String {
    format!("redis:{run_id}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeadershipTiming {
    /// How often the row is polled.
    pub poll_interval: Duration,
    /// How long permits of a former holder may still start after they were granted (booking horizon and send budget),
    /// plus the clock drift.
    pub slack: Duration,
    /// How long the store is unavailable before shares are used.
    pub share_after: Duration,
    /// How long the store must be reachable without a break before shares end.
    pub share_ends_after: Duration,
    /// Shortest time that shares last. If only some workers reach the store, the row would otherwise change back and
    /// forth, and each change costs a cold start.
    pub share_min_duration: Duration,
}

impl LeadershipTiming {
    /// Timing with this poll interval, and without outstanding permits.
    pub const fn with_poll_interval(poll_interval: Duration) -> Self {
        Self {
            poll_interval,
            slack: CLOCK_SKEW_MAX,
            share_after: Duration::from_secs(5),
            share_ends_after: Duration::from_secs(10),
            share_min_duration: Duration::from_secs(60),
        }
    }

    /// Timing for a quota whose permits may start this long after they were granted.
    pub fn with_start_delay_max(mut self, start_delay_max: Duration) -> Self {
        self.slack += start_delay_max;
        self
    }

    /// Age at which a polled row is no longer valid, counted from the start of the poll.
    pub fn stale_after(&self) -> Duration {
        self.poll_interval * 3
    }

    /// Time after which no worker acts on the former holder, and no permit of the former holder can start. It counts
    /// from when the new holder was first seen.
    pub fn handover(&self) -> Duration {
        self.stale_after() + self.slack
    }
}

/// The store as this worker's connection shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedStore<'a> {
    /// No connection, for this long.
    Unavailable { unavailable_for: Duration },
    Reachable {
        /// Run id of the primary that the connection leads to.
        run_id: &'a str,
        /// Age of this connection; the host name was resolved then.
        connected_for: Duration,
        /// How long the store has been reachable without a break.
        reachable_for: Duration,
    },
}

/// The row as of the last successful poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollResult<'a> {
    /// Time since the poll was sent.
    pub age: Duration,
    pub row: Option<ObservedLeader<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedLeader<'a> {
    pub holder: &'a str,
    /// Age by the database's clock when the row was polled.
    pub age: Duration,
    /// Time since a reply first showed this holder in this term. Other workers see a change only once it is committed,
    /// and the row's age begins before that.
    pub known_for: Duration,
}

/// The limiter leader now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leader {
    /// The store, if its state was rebuilt in this row's term. Only with `may_rebuild` may a state be rebuilt.
    Store {
        may_rebuild: bool,
    },
    /// This worker, with its own share. Its state is rebuilt when this decision first applies.
    FallbackShare,
    NoLeader(NoLeaderCause),
}

/// Why no limiter may grant, as text for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLeaderCause {
    #[error("the leader row has not been read from the database yet")]
    NotPolled,
    #[error("the leader row cannot be read: the database is unreachable")]
    DatabaseUnavailable,
    #[error("the limiter store is unavailable")]
    StoreUnavailable,
    #[error("no limiter store is leader of this quota yet")]
    NoHolder,
    #[error("another limiter store is leader of this quota; reconnecting")]
    AnotherStore,
    #[error(
        "another limiter store is leader of this quota, but a new connection leads elsewhere: the connected store \
         takes over. If this repeats, workers are connected to two writable primaries, and no permit is granted until \
         they agree: check limiter.url of all workers, and the failover"
    )]
    TwoStores,
    #[error("the limiter leader is changing: waiting until every worker has seen it")]
    Changing,
}

/// A compare-and-set on the leader row.
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
    /// Drop the connection and resolve the host name again: it may lead to a store that was replaced.
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

/// The leader of one quota at one instant, and what to change. `polled`: `None` until the first poll succeeds.
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
    // The database's clock may be set, and an age begins before its commit. The first sight is later than both.
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
        // Connected after this holder was first seen: the holder is gone, or another worker's connection leads
        // elsewhere.
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
