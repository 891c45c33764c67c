//! The ledger for the sweeper: early ends of waits, scrubbing, and the reconciliation of all jobs.
//!
//! Every bound is an argument. Each statement is safe when several sweepers run: they never get the same job. Work is
//! bounded by `at_most` and found by an index, however many jobs there are.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::operator::STATES;
use crate::domain::format::count;
use crate::domain::job::{ContentHash, Job};

/// A cause of delays that an operator can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitCause {
    Limit,
    /// A wait that the provider named, for this payment or another of its quota.
    RetryAfter,
}

/// Which delays end: those that began before the limits of the lane's quota changed, or soon after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeFilter {
    /// Time since the change was seen; `None`: no worker saw it, so only the rows' timestamps count.
    pub changed_ago: Option<Duration>,
    pub cause: WaitCause,
    /// For this long after a change, a worker may have used the former limits.
    pub propagation_time: Duration,
    /// Jobs that are due within this time return without being woken.
    pub due_within: Duration,
    pub at_most: u32,
}

/// A job as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedJob {
    pub job: Job,
    /// Of its message.
    pub hash: ContentHash,
}

/// Which jobs are scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubScope {
    Finished,
    InReview,
}

/// Which finished jobs a reconciliation compares with their events and attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckScope {
    /// None: all jobs are counted, and `without_event` and `without_accepted_attempt` are 0.
    CountsOnly,
    /// Those that finished less than this ago; earlier ones come from the kept totals. Cheap, whatever the table holds.
    Since(Duration),
    /// All of them: reads the whole table.
    All,
}

/// The jobs of one provider, by where they are, at one instant; also as the API and the overview show them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ProviderReconciliation {
    pub provider: String,
    /// Rows of the ledger: the sum over the states.
    pub recorded: u64,
    /// Jobs in each state that has any, by name.
    pub states: BTreeMap<String, u64>,
    /// Open, with a worker's lease.
    pub active: u64,
    /// Active jobs whose request is in flight, or about to be.
    pub in_flight: u64,
    /// Asleep: open, without a lease, not yet due.
    pub delayed: u64,
    /// Time until the last of the delayed jobs is due.
    #[serde(skip)]
    pub delayed_for: Option<Duration>,
    /// Open, without a lease, due, and not in the backlog yet: it enters the backlog within about a second.
    pub due: u64,
    /// In the backlog: a dispatcher may claim it.
    #[serde(default)]
    pub backlog: u64,
    /// Cost of the permits that open jobs without a request in flight wait for: those of [`Self::waiting`].
    #[serde(skip)]
    pub waiting_cost: u64,
    /// Those of them whose account a rule blocks.
    #[serde(skip)]
    pub account_blocked: u64,
    /// Due jobs that have been out of the backlog and without a lease for longer than their return should take.
    pub overdue: u64,
    /// Open, though their `expires_at` has passed.
    #[serde(skip)]
    pub past_deadline: u64,
    /// Age of the oldest open job: since it was recorded, or since its `not_before`.
    #[serde(skip)]
    pub oldest_open: Option<Duration>,
    /// Time since the first request of the open job of unknown outcome that was sent first.
    #[serde(skip)]
    pub oldest_unknown: Option<Duration>,
    /// Finished jobs without an event of their state.
    pub without_event: u64,
    /// Jobs that succeeded by an accepted attempt, and have none.
    #[serde(rename = "without_cause")]
    pub without_accepted_attempt: u64,
    /// Jobs that are open, in review or dead, and that lists and sweeps leave out, because an instant or a count in
    /// their row is invalid. They are counted here like the others.
    #[serde(default)]
    pub unreadable: u64,
    /// [`Self::discrepancies`], as the ledger found them.
    pub faults: Vec<String>,
}

impl ProviderReconciliation {
    /// Jobs in one state.
    pub fn in_state(&self, state: &str) -> u64 {
        self.states.get(state).copied().unwrap_or_default()
    }

    /// Open jobs without a request in flight.
    pub fn waiting(&self) -> u64 {
        self.delayed + self.due + self.backlog + self.active.saturating_sub(self.in_flight)
    }

    /// Jobs of the states that are not final.
    pub fn open(&self) -> u64 {
        ["waiting", "sending", "unknown"].map(|state| self.in_state(state)).into_iter().sum()
    }

    /// Takes the faults of finished jobs from an earlier reconciliation, after one of [`CheckScope::CountsOnly`].
    pub fn take_checks_of(&mut self, earlier: &Self) {
        self.without_event = earlier.without_event;
        self.without_accepted_attempt = earlier.without_accepted_attempt;
        self.faults = self.discrepancies();
    }

    /// The discrepancies as texts; empty when all jobs are accounted for. Overdue jobs are no discrepancy: the jobs of
    /// a paused lane become overdue, too.
    pub fn discrepancies(&self) -> Vec<String> {
        let mut discrepancies = Vec::new();
        let accounted = self.active + self.delayed + self.due + self.backlog;
        if accounted != self.open() {
            discrepancies.push(format!(
                "{} open, {accounted} active, delayed, due or in the backlog",
                count(self.open(), "job")
            ));
        }
        if self.without_event > 0 {
            discrepancies.push(format!("{} without an event of its state", count(self.without_event, "finished job")));
        }
        if self.without_accepted_attempt > 0 {
            discrepancies
                .push(format!("{} succeeded without an accepted attempt", count(self.without_accepted_attempt, "job")));
        }
        if self.unreadable > 0 {
            let unreadable = count(self.unreadable, "job");
            discrepancies.push(format!("{unreadable} whose row cannot be read: `jobs list` names it"));
        }
        for (state, jobs) in self.states.iter().filter(|(state, _)| !STATES.contains(&state.as_str())) {
            discrepancies.push(format!("{} in state `{state}`, which this program does not know", count(*jobs, "job")));
        }
        discrepancies
    }
}
