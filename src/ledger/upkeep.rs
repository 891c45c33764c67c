//! The sweeper's interface to the ledger: overdue jobs, expiry, scrubbing, and the reconciliation of all jobs.
//!
//! Every bound is an argument. Each statement is safe when several sweepers run: they never get the same job. Work is
//! bounded by `at_most` and found by an index, however many jobs there are. See
//! `docs/decisions/0002-republish-lost-messages.md`.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;

use super::operator::STATES;
use super::{FencedWrite, LeaseToken, LedgerError};
use crate::domain::disposition::RetryPolicy;
use crate::domain::explain::format::count;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::provider::ProviderName;

/// Which open jobs of a lane are overdue, and when each may be published once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverduePolicy {
    /// Due, and without a lease, for at least this long.
    pub grace: Duration,
    /// Not again before this, nor before the job has been overdue for twice as long as now.
    pub republish_after: Duration,
    /// The longest interval between two copies.
    pub republish_interval_max: Duration,
    pub at_most: u32,
}

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

/// A job whose message is to be published again, as the ledger has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobToRepublish {
    pub job: Job,
    /// Content hash from when the job was recorded. The new message must have the same.
    pub hash: ContentHash,
    /// Copies published by a sweeper so far, this one included.
    pub sweeps: u32,
    /// The number of the copy to publish.
    pub copy: i64,
}

/// Which jobs are scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubScope {
    Finished,
    InReview,
}

/// A message's state in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageState {
    /// It never became a job.
    NotRecorded,
    Open,
    /// The job is open, and a newer copy of its message was published.
    Superseded,
    Finished,
    /// The id belongs to a payment with other content.
    Conflict,
}

/// Which finished jobs a reconciliation reads one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckScope {
    /// Those that finished less than this ago; earlier ones come from the kept totals. Cheap, whatever the table holds.
    Since(Duration),
    /// All of them: reads the whole table.
    All,
}

/// The jobs of one provider, by where they are, at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerReconciliation {
    pub provider: String,
    /// Rows of the ledger: the sum over the states.
    pub recorded: u64,
    /// Jobs in each state that has any, by name.
    pub states: Vec<(String, u64)>,
    /// Open, with a worker's lease.
    pub active: u64,
    /// Active jobs whose request is in flight, or about to be.
    pub in_flight: u64,
    /// Open, without a lease, not yet due.
    pub delayed: u64,
    /// Time until the last of the delayed jobs is due.
    pub delayed_for: Option<Duration>,
    /// Open, without a lease, due: its message is in a queue, or the sweeper will publish it.
    pub due: u64,
    /// Open and due, without a lease or a message: only a dispatcher brings it back.
    pub backlog: u64,
    /// Those of them whose account a rule blocks.
    pub account_blocked: u64,
    /// Due jobs that have been so for longer than any queue and the sweeper should need.
    pub overdue: u64,
    /// Lower and upper bound of the messages of recorded open jobs that are ready in the lane's queue. The two differ
    /// by messages that return from a delay queue at this moment, and by copies that sweepers have published.
    pub messages_min: u64,
    pub messages_max: u64,
    /// Open, though their `expires_at` has passed.
    pub past_deadline: u64,
    /// Age of the oldest open job: since it was recorded, or since its `not_before`.
    pub oldest_open: Option<Duration>,
    /// Finished jobs without an event of their state.
    pub without_event: u64,
    /// Jobs that succeeded by an accepted attempt, and have none.
    pub without_accepted_attempt: u64,
    /// Jobs that are open, in review or dead, and that lists and sweeps leave out, because an instant or a count in
    /// their row is invalid. They are counted here like the others.
    pub unreadable: u64,
}

impl LedgerReconciliation {
    /// Jobs of the states that are not final.
    pub fn open(&self) -> u64 {
        let open = |state: &str| matches!(state, "waiting" | "sending" | "unknown");
        self.states.iter().filter(|(state, _)| open(state)).map(|(_, jobs)| jobs).sum()
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

#[async_trait]
pub trait Upkeep: Send + Sync {
    /// Leases a duty for this long; false when another worker has it.
    async fn lease_duty(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError>;

    /// The lanes with a job that waits, is being sent, or has an unknown outcome. The others need no sweep of their own.
    async fn lanes_with_open_jobs(&self) -> Result<BTreeSet<ProviderName>, LedgerError>;

    /// Takes the right to publish one copy of each overdue job of a lane, longest overdue first.
    async fn take_overdue(
        &self,
        lane: &ProviderName,
        which: &OverduePolicy,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Records that no queue has a message for a delayed job. [`FencedWrite::Stale`] when a worker claimed it
    /// meanwhile.
    async fn keep_unqueued(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError>;

    /// Takes the right to publish the messages of jobs that no queue has and that are due within `ahead`. From then on
    /// they are like any other job, and are not overdue before `again_after`.
    async fn take_unqueued(
        &self,
        lane: &ProviderName,
        ahead: Duration,
        again_after: Duration,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Jobs that are due for a look-up by this policy, longest due first. They have no lease, and their message, the
    /// copy that `copy` names, is in no delay queue. The call claims none of them.
    async fn due_lookups(
        &self,
        lane: &ProviderName,
        policy: &RetryPolicy,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Ends delays for a limit or a named wait: the jobs are due now, and those that were certainly never sent have no
    /// message in a queue. Returns how many.
    async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError>;

    /// Expires waiting jobs whose `expires_at` has passed, with their events; returns how many. Jobs that may have been
    /// charged, and active jobs, stay as they are.
    async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError>;

    /// Moves an open job to review. [`FencedWrite::Stale`] when it is finished, or a worker holds its lease. If its
    /// request was in flight, its outcome is unknown from then on.
    async fn move_to_review(&self, id: &JobId, reason: &str) -> Result<FencedWrite, LedgerError>;

    /// `copy` is the number of the message.
    async fn message_state(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<MessageState, LedgerError>;

    /// Empties payload, reference, and the address and body of the request of jobs that finished, or entered review,
    /// longer than this ago; returns how many. Id and hash stay. A job that was emptied in review can still be
    /// resolved, but not be sent again.
    async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError>;

    /// Empties the references of requests that no limit can count any more; returns how many.
    async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError>;

    /// Updates the totals of finished jobs, which a reconciliation adds to its own counts. One worker at a time calls
    /// this every few minutes. From time to time it counts all jobs, which takes long: the count goes on even when the
    /// caller gets a timeout.
    async fn update_finished_totals(&self) -> Result<(), LedgerError>;

    /// The jobs by provider and by where they are, at one instant. Counts the jobs that may change their state, and
    /// those that finished since the last update of the totals; `scope` bounds the rest.
    async fn reconcile(
        &self,
        overdue_after: Duration,
        scope: CheckScope,
    ) -> Result<Vec<LedgerReconciliation>, LedgerError>;
}
