//! The face of upkeep: what the sweeper asks of the ledger, and the account that must always add up.
//!
//! Refuses to decide how long is long: every bound is an argument. Each statement is safe when several sweepers run: what
//! one takes, another is not given. Work is bounded by `at_most` and found by an index, however many jobs there are.

use std::time::Duration;

use async_trait::async_trait;

use super::operator::STATES;
use super::{FencedWrite, LeaseToken, LedgerError};
use crate::domain::disposition::RetryPolicy;
use crate::domain::explain::format::count;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::provider::ProviderName;

/// Which open jobs of a lane count as overdue, and when each may be brought back once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverduePolicy {
    /// Due, and held by nobody, for at least this long.
    pub grace: Duration,
    /// Not again before this, nor before the job has been overdue for twice as long as now.
    pub republish_after: Duration,
    /// The longest interval between two copies.
    pub republish_interval_max: Duration,
    pub at_most: u32,
}

/// What has put jobs down that an operator can let go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitCause {
    Limit,
    /// A wait that the provider has named, to this payment or to another of its quota.
    RetryAfter,
}

/// Which waits for a limit end: those that began before the limits of the lane's quota were changed, or soon after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeFilter {
    /// How long ago they were seen to be others than before; `None`: nobody saw, and the rows alone tell.
    pub changed_ago: Option<Duration>,
    pub cause: WaitCause,
    /// For so long after a change the former limits may have been gone by.
    pub propagation_time: Duration,
    /// Who is due within this comes without being woken.
    pub due_within: Duration,
    pub at_most: u32,
}

/// A job whose message is to be published again, as the ledger has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobToRepublish {
    pub job: Job,
    /// What the message said when the job was recorded. A message that is made anew must say the same.
    pub hash: ContentHash,
    /// Copies published by a sweeper so far, this one included.
    pub sweeps: u32,
    /// The number of the copy that is to be published.
    pub copy: i64,
}

/// Which jobs are emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubScope {
    Finished,
    InReview,
}

/// What the ledger knows of a message.
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

/// Which settled jobs an account looks at one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckScope {
    /// Those that settled less than this ago, and what settled before is taken from its sum: cheap, whatever the table holds.
    Since(Duration),
    /// Every one, and all are counted: reads the whole table.
    All,
}

/// Where the jobs of one provider are, taken at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerReconciliation {
    pub provider: String,
    /// Rows of the ledger: the sum over the states.
    pub recorded: u64,
    /// Jobs in each state that has any, by name.
    pub states: Vec<(String, u64)>,
    /// Open, and a worker holds a lease.
    pub active: u64,
    /// Those of `in_hand` whose request is sent, or about to be.
    pub in_flight: u64,
    /// Open, held by nobody, not yet due.
    pub delayed: u64,
    /// Until the last of the parked ones is due.
    pub delayed_for: Option<Duration>,
    /// Open, held by nobody, due: a queue has it, or the sweeper will bring it back.
    pub due: u64,
    /// Those of `due` that have been so for longer than any queue and the sweeper should need.
    pub overdue: u64,
    /// Messages of recorded open jobs that are ready in the lane's queue: at least and at most so many. The two differ by what
    /// returns from a delay queue at this moment, and by copies that sweepers have published.
    pub messages_min: u64,
    pub messages_max: u64,
    /// Open, though their `expires_at` has passed.
    pub past_deadline: u64,
    /// How long the one that has waited longest of the open jobs has done so: since it was recorded, or might begin.
    pub oldest_open: Option<Duration>,
    /// Settled jobs without an event of their state.
    pub without_event: u64,
    /// Jobs that succeeded by an accepted attempt, and have none.
    pub without_accepted_attempt: u64,
    /// Jobs that are open, in review or dead, and whose rows lists and sweeps leave out, because an instant or a count in them
    /// is none. They are counted where they are, like the others.
    pub unreadable: u64,
}

impl LedgerReconciliation {
    /// Jobs of the states that are not final.
    #[must_use]
    pub fn open(&self) -> u64 {
        let open = |state: &str| matches!(state, "waiting" | "sending" | "unknown");
        self.states.iter().filter(|(state, _)| open(state)).map(|(_, jobs)| jobs).sum()
    }

    /// What does not add up, in words; empty when everything does. `astray` is no such fault: it is told apart because a
    /// lane that is paused has jobs that nobody takes.
    #[must_use]
    pub fn discrepancies(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let accounted = self.active + self.delayed + self.due;
        if accounted != self.open() {
            faults.push(format!("{} open, {accounted} in hand, parked or due", count(self.open(), "job")));
        }
        if self.without_event > 0 {
            faults.push(format!("{} without an event of its state", count(self.without_event, "settled job")));
        }
        if self.without_accepted_attempt > 0 {
            faults
                .push(format!("{} succeeded without an accepted attempt", count(self.without_accepted_attempt, "job")));
        }
        if self.unreadable > 0 {
            faults.push(format!("{} whose row cannot be read: `jobs list` names it", count(self.unreadable, "job")));
        }
        for (state, jobs) in self.states.iter().filter(|(state, _)| !STATES.contains(&state.as_str())) {
            faults.push(format!("{} in state `{state}`, which this program does not know", count(*jobs, "job")));
        }
        faults
    }
}

#[async_trait]
pub trait Upkeep: Send + Sync {
    /// Takes a duty for this long; false when somebody else has it.
    async fn lease_duty(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError>;

    /// Takes the right to publish one copy of each overdue job of a lane, longest overdue first.
    async fn take_overdue(
        &self,
        lane: &ProviderName,
        which: &OverduePolicy,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Notes that no queue has a message for a job that was put down. [`Written::Lost`] when it was taken up meanwhile.
    async fn keep_unqueued(&self, hold: &LeaseToken) -> Result<FencedWrite, LedgerError>;

    /// Takes the right to publish the messages of jobs that no queue has and that are due within `ahead`. From then on
    /// they are like any other job, and are not overdue before `again_after`.
    async fn take_unqueued(
        &self,
        lane: &ProviderName,
        ahead: Duration,
        again_after: Duration,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Jobs whose provider is to be asked about them now, by this policy, longest due first: held by nobody, and their message,
    /// as `copy` names it, is in no delay queue. None is taken by that.
    async fn due_lookups(
        &self,
        lane: &ProviderName,
        policy: &RetryPolicy,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError>;

    /// Ends waits of jobs that a limit or a named wait has put down: they are due now, and those that were surely never sent stand in no
    /// queue. Returns how many.
    async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError>;

    /// Ends waiting jobs whose `expires_at` has passed, with their events; returns how many. Those that may have been
    /// charged, or that somebody holds, are left alone.
    async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError>;

    /// Hands an open job to a person. [`Written::Lost`] when it is settled, or somebody holds it. One that was on the
    /// wire has an unknown outcome from then on.
    async fn move_to_review(&self, id: &JobId, reason: &str) -> Result<FencedWrite, LedgerError>;

    /// `copy` is the number of the message.
    async fn message_state(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<MessageState, LedgerError>;

    /// Empties payload, reference, and the address and body of the request of jobs that settled, or came to review, longer than
    /// this ago; returns how many. Id and hash stay. What was emptied in review can still be settled, and not be sent again.
    async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError>;

    /// Empties the references of requests that no limit can count any more; returns how many.
    async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError>;

    /// Keeps the sum of the jobs that have settled for good, with which an account begins. To be called every few minutes,
    /// by one at a time: an account counts what is not in the sum. Now and then it counts all anew and takes long; it goes on
    /// then, though the caller is told that no answer came in time.
    async fn update_finished_totals(&self) -> Result<(), LedgerError>;

    /// Where every job is, by provider, taken at one instant. Counts the jobs that may change their state, and those that
    /// have settled since they were summed up; `checked` bounds the rest.
    async fn reconcile(
        &self,
        astray_after: Duration,
        checked: CheckScope,
    ) -> Result<Vec<LedgerReconciliation>, LedgerError>;
}
