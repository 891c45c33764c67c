//! Who may grant, decided from what one worker sees: its link to the store, and the one row in SQL that names the holder.
//!
//! The row is polled by every worker, so at most one holder is believed in at a time, but for a while: a worker may act on
//! the former holder until [`Timing::stale`] after its last poll. Therefore a new holder grants nothing before everybody
//! has seen it. Refuses all I/O and every clock; a verdict holds for the instant at which it was asked for, and is asked
//! for again before each use.

use std::time::Duration;

use crate::domain::provider::StoreDown;

/// The row's word for "each worker grants its own share".
pub const SHARE: &str = "share";
/// What the clocks of two machines may go apart by while a holder changes.
const CLOCKS_DIFFER: Duration = Duration::from_millis(50);

/// The row's word for the primary with this run id, or for the process with it whose limiter is embedded.
#[must_use]
pub fn holder_of(run_id: &str) -> String {
    format!("redis:{run_id}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How often the row is polled.
    pub poll: Duration,
    /// How long permits of a former holder may still start after they were granted (booking horizon and send budget),
    /// and what clocks may differ by.
    pub slack: Duration,
    /// How long the store is away before shares are used.
    pub share_after: Duration,
    /// How long the store must have been reachable without a break before shares end.
    pub share_ends_after: Duration,
    /// How long shares last at least: where some workers reach the store and some do not, the row would else be passed to
    /// and fro, and each change costs a cold start.
    pub share_lasts: Duration,
}

impl Timing {
    /// With the row polled so often, and nothing in hands yet.
    #[must_use]
    pub const fn polled_every(poll: Duration) -> Self {
        Self {
            poll,
            slack: CLOCKS_DIFFER,
            share_after: Duration::from_secs(5),
            share_ends_after: Duration::from_secs(10),
            share_lasts: Duration::from_secs(60),
        }
    }

    /// For a quota whose permits may still start this long after they were granted.
    #[must_use]
    pub fn with_in_hand(mut self, in_hand: Duration) -> Self {
        self.slack += in_hand;
        self
    }

    /// A row that was polled longer ago than this, counted from the departure of the poll, says nothing any more.
    #[must_use]
    pub fn stale(&self) -> Duration {
        self.poll * 3
    }

    /// Once a holder has been in sight for this long, nobody acts on the former one, and nothing that the former one
    /// granted can still start.
    #[must_use]
    pub fn settled(&self) -> Duration {
        self.stale() + self.slack
    }
}

/// The store as this worker's link sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store<'a> {
    /// No link, for this long.
    Away { since: Duration },
    Reachable {
        /// Of the primary that the link leads to.
        run_id: &'a str,
        /// How long ago this link was made: asked for afresh then, by name.
        linked: Duration,
        /// How long the store has been reachable without a break.
        since: Duration,
    },
}

/// The row as of the last poll that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polled<'a> {
    /// How long ago the poll departed.
    pub ago: Duration,
    pub row: Option<Row<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    pub holder: &'a str,
    /// Age by the database, when it was polled.
    pub age: Duration,
    /// How long ago, until now, the reply arrived that first showed this holder in this term to us: a change is seen by
    /// others only once it is committed, and its age begins before that.
    pub seen: Duration,
}

/// Who may grant now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The store, if its state was warmed in this row's term. Only with `may_warm` may a state be warmed.
    Store {
        may_warm: bool,
    },
    /// This worker, out of its own share, from a state that is rebuilt when this verdict first comes.
    OwnShare,
    Nobody(Cause),
}

/// Why nobody may grant, for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    #[error("the database has not said yet which limiter store grants")]
    NotPolled,
    #[error("the database cannot be asked which limiter store grants")]
    DatabaseAway,
    #[error("the limiter store is away")]
    StoreAway,
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
pub struct Take {
    pub from: Option<String>,
    pub to: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Decision {
    pub verdict: Verdict,
    pub take: Option<Take>,
    /// Drop the link and make it anew, by name: it may lead to a store that was replaced.
    pub reconnect: bool,
}

impl Decision {
    fn only(verdict: Verdict) -> Self {
        Self { verdict, take: None, reconnect: false }
    }

    fn nobody(cause: Cause) -> Self {
        Self::only(Verdict::Nobody(cause))
    }

    fn take(mut self, from: Option<&str>, to: String) -> Self {
        self.take = Some(Take { from: from.map(str::to_owned), to });
        self
    }
}

/// Who may grant, and what to change, for one quota at one instant. `polled`: `None` until the first poll succeeded.
pub fn decide(store: Store<'_>, polled: Option<Polled<'_>>, policy: StoreDown, timing: Timing) -> Decision {
    let Some(polled) = polled else { return Decision::nobody(Cause::NotPolled) };
    if polled.ago > timing.stale() {
        return Decision::nobody(Cause::DatabaseAway);
    }
    let Some(row) = polled.row else { return nobody_yet(store, policy, timing) };
    // The database's clock may be set, and ages begin before their commit; what was seen is later than both.
    let age = row.seen.min(row.age + polled.ago);
    if row.holder == SHARE {
        return shared(store, policy, age, timing);
    }
    match store {
        Store::Away { since } => away(since, policy, Some(row.holder), timing),
        Store::Reachable { run_id, .. } if row.holder == holder_of(run_id) => {
            Decision::only(Verdict::Store { may_warm: age >= timing.settled() })
        }
        // Made after we saw who holds: the holder is gone, or somebody's link leads elsewhere.
        Store::Reachable { run_id, linked, .. } if linked < row.seen => {
            Decision::nobody(Cause::TwoStores).take(Some(row.holder), holder_of(run_id))
        }
        Store::Reachable { .. } => Decision { reconnect: true, ..Decision::nobody(Cause::AnotherStore) },
    }
}

fn nobody_yet(store: Store<'_>, policy: StoreDown, timing: Timing) -> Decision {
    match store {
        Store::Away { since } => away(since, policy, None, timing),
        Store::Reachable { run_id, .. } => Decision::nobody(Cause::NoHolder).take(None, holder_of(run_id)),
    }
}

fn away(since: Duration, policy: StoreDown, from: Option<&str>, timing: Timing) -> Decision {
    let decision = Decision::nobody(Cause::StoreAway);
    match policy {
        StoreDown::Share { .. } if since >= timing.share_after => decision.take(from, SHARE.to_owned()),
        StoreDown::Share { .. } | StoreDown::Wait => decision,
    }
}

fn shared(store: Store<'_>, policy: StoreDown, age: Duration, timing: Timing) -> Decision {
    let decision = match policy {
        StoreDown::Share { .. } if age >= timing.settled() => Decision::only(Verdict::OwnShare),
        StoreDown::Share { .. } => Decision::nobody(Cause::Changing),
        StoreDown::Wait => Decision::nobody(Cause::StoreAway),
    };
    let Store::Reachable { run_id, since, .. } = store else { return decision };
    let ends = policy == StoreDown::Wait || (since >= timing.share_ends_after && age >= timing.share_lasts);
    if ends { decision.take(Some(SHARE), holder_of(run_id)) } else { decision }
}

#[cfg(test)]
#[path = "authority_tests.rs"]
mod tests;
