//! The ledger's interface: the state of every payment, its lease, and the limiter's leader rows.
//!
//! The ledger stores decisions and makes none: `domain::disposition` decides. Times are the database's own. Every write
//! on an active job names its [`LeaseToken`]. A write with a stale token changes nothing and returns
//! [`FencedWrite::Stale`]. See `docs/decisions/0001-ledger-is-the-source-of-truth.md`.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;

use self::copies::{Claimant, DeliveredCopy, RejectedMessage, ReturnPlan};
use self::outcomes::{EventSelection, UnpublishedEvents};
use crate::domain::clock_attestation::{ClockAttestation, QuotaAttestation};
use crate::domain::disposition::Resend;
use crate::domain::job::{ContentHash, InvalidMessage, Job, JobId};
use crate::domain::outcome::FinalState;
use crate::domain::permit_protocol::CostByKind;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, SubjectQuery};
use crate::domain::time::Micros;
use crate::domain::wait_reason::Wait;
use crate::provider::FrozenRequest;

pub mod backlog;
pub mod copies;
pub mod database;
pub mod decision_input;
pub mod deployment;
pub mod fleet;
mod migrate;
mod migrations;
pub mod operator;
pub mod outcomes;
pub mod provider_row;
pub mod queue_position;
pub mod settings;
pub mod settings_audit;
pub mod sql;
pub mod upkeep;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The database cannot be reached, or did not answer in time. It is unknown whether a write happened.
    #[error("database unavailable: {0}")]
    Unavailable(String),
    #[error("schema missing or outdated: run `sluicegate migrate`")]
    NotMigrated,
    /// A statement or a setting failed for a reason that a retry does not fix.
    #[error("database error: {0}")]
    StatementFailed(String),
    /// A row holds an invalid value.
    #[error("unreadable row: {0}")]
    Corrupt(String),
}

/// The right to write on one job. A claim grants it; it is void once the row's fencing token is higher.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub id: JobId,
    pub fence: i64,
}

/// Whether a write under a lease was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum FencedWrite {
    Applied,
    /// Another process holds the lease: stop, send nothing, do not acknowledge.
    Stale,
}

/// A claimed job with its history.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    pub lease: LeaseToken,
    pub attempts: u32,
    /// Consecutive workers that were lost before they began a request, the last one included.
    pub lost_holders: u32,
    /// An earlier attempt may have charged (state was `sending` or `unknown`).
    pub maybe_charged: bool,
    /// Time until the job is due (rest of a wait, or `not_before`); zero when it is due.
    pub wait: Duration,
    /// Time since the job could first be processed: since it was recorded, its `not_before`, or its last replay.
    pub age: Duration,
    /// Time until `expires_at`, by the database's clock; zero when it has passed.
    pub expires_in: Option<Duration>,
    /// Number of the last request that was begun, charge or look-up; 0 for none.
    pub last_attempt: u32,
    /// Look-ups begun so far.
    pub lookups: u32,
    pub resend: Resend,
    /// Time since the last charge began that has an unknown outcome, or that was in flight when its worker was lost.
    pub unknown_age: Option<Duration>,
    /// The frozen request of the first attempt, and the time since the first request began that may have been sent.
    /// That time is zero when every request so far certainly stayed unsent.
    pub frozen_request: Option<(FrozenRequest, Duration)>,
    /// Number of the newest copy of the job's message.
    pub copy: i64,
}

impl Claimed {
    /// A job that has just been recorded, and is due.
    pub fn new_job(lease: LeaseToken) -> Self {
        Self {
            lease,
            attempts: 0,
            lost_holders: 0,
            maybe_charged: false,
            wait: Duration::ZERO,
            age: Duration::ZERO,
            expires_in: None,
            last_attempt: 0,
            lookups: 0,
            resend: Resend::Never,
            unknown_age: None,
            frozen_request: None,
            copy: 0,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Claim {
    Claimed(Box<Claimed>),
    /// Already final: acknowledge, and do nothing else.
    Finished,
    /// A newer copy of the message was published: acknowledge, and do nothing else.
    Superseded,
    /// Another worker holds the lease, for at most this long unless it renews.
    LeasedElsewhere {
        lease_left: Duration,
    },
    /// The same id with other content, or an idempotency key that another payment of this provider uses.
    Conflict(InvalidMessage),
    /// The row holds an invalid value, which an operator must repair. Names the column and the fault.
    Unreadable(String),
}

/// Options of a write that takes a lease and may be committed in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Duration of the lease.
    pub lease: Duration,
    /// How long the write may wait for others to be committed with.
    pub max_batch_delay: Duration,
}

impl BatchOptions {
    pub fn immediate(lease: Duration) -> Self {
        Self { lease, max_batch_delay: Duration::ZERO }
    }
}

/// A job that is not recorded yet, with the request of its first attempt.
#[derive(Clone, Copy, Debug)]
pub struct NewJobAttempt<'a> {
    pub job: &'a Job,
    pub hash: ContentHash,
    /// The caller's fencing token, random: no other lease of this job has it.
    pub lease: &'a LeaseToken,
    pub owner: &'a str,
    pub options: BatchOptions,
    pub request: &'a FrozenRequest,
}

/// Result of beginning an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum BeginResult {
    /// Committed; a charge is `sending` now. Charges and look-ups are numbered together, from 1 per job.
    Attempt(u32),
    Stale,
}

/// The result of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptEnd {
    pub number: u32,
    /// Stable code for the `outcome` column: accepted, declined, throttled, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    pub counts: bool,
}

/// The result of one look-up. It does not count as an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupEnd {
    pub number: u32,
    /// Stable code for the `outcome` column: accepted, not_found, unknown, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    /// The frozen request may be sent once more.
    pub grants_resend: bool,
}

/// The state of a job after a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Due again after the wait; the lease is released.
    Waiting {
        wait: Duration,
        reason: Wait,
    },
    /// Like `Waiting`, with an unknown outcome.
    Unknown {
        wait: Duration,
        reason: Wait,
    },
    Final {
        state: FinalState,
        reason: String,
        reference: Option<String>,
    },
}

impl JobState {
    /// How long the job waits; `None` when it is final.
    pub fn wait(&self) -> Option<Duration> {
        match self {
            Self::Waiting { wait, .. } | Self::Unknown { wait, .. } => Some(*wait),
            Self::Final { .. } => None,
        }
    }
}

/// An event of the outbox, to be published at least once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutcomeEvent {
    pub sequence: i64,
    pub id: String,
    pub provider: ProviderName,
    pub state: FinalState,
    pub provider_reference: Option<String>,
    pub reason: Option<String>,
    pub attempts: u32,
    /// Milliseconds since the Unix epoch, the database's clock.
    pub at_ms: i64,
}

/// Number of jobs of one provider in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCount {
    pub provider: String,
    pub state: String,
    pub jobs: i64,
}

/// Requests that may still count at a quota's provider, by the database's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUses {
    /// Time since the end of each ended request, with its cost; youngest first. Requests that ended close together are
    /// one entry with the age of the youngest: an age is never more than the true one.
    pub ended: Vec<(Duration, CostByKind)>,
    /// Cost of requests that may be in flight now: no end is recorded, or no response arrived and the provider may
    /// count late.
    pub open: CostByKind,
}

/// The limiter leader of a quota, as its leader row says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLeader {
    /// `redis:` and the run id of the one writable primary, or the id of the one process with an embedded limiter; or
    /// `share`: each worker grants its own share.
    pub holder: String,
    /// Increases by one with each change. Limiter state from another term is discarded.
    pub term: i64,
    /// Time since the holder changed, by the database's clock. Other workers see a change once it is committed.
    pub age: Duration,
    /// The database's clock when this was read.
    pub now: Micros,
    /// The last clock attestation of a worker in this term, and its age.
    pub attestation: Option<(ClockAttestation, Duration)>,
}

#[async_trait]
pub trait Ledger: Send + Sync {
    /// Records the job if it is new, and claims it for `owner` if no other worker holds its lease.
    async fn claim(&self, job: &Job, hash: ContentHash, owner: &str, lease: Duration) -> Result<Claim, LedgerError> {
        let claimant = Claimant { owner, delivered: DeliveredCopy::ALWAYS_CURRENT };
        self.claim_batched(job, hash, claimant, BatchOptions::immediate(lease)).await
    }

    /// Claims like [`Ledger::claim`]; the write may wait for others to be committed with.
    async fn claim_batched(
        &self,
        job: &Job,
        hash: ContentHash,
        claimant: Claimant<'_>,
        options: BatchOptions,
    ) -> Result<Claim, LedgerError>;

    /// Records a new job and begins its first attempt in one commit, as `sending`, before the first byte is sent.
    /// [`FencedWrite::Stale`]: the id or the key exists; nothing was written. [`Ledger::claim`] tells what exists.
    async fn record_and_begin(&self, attempt: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError>;

    /// Prolongs the leases of active jobs. Returns the leases that are lost, and those whose row is being written at
    /// this moment: most often that write finishes the job.
    async fn renew(&self, leases: &[LeaseToken], lease: Duration) -> Result<Vec<LeaseToken>, LedgerError>;

    /// Commits `sending` with the request, before the first byte is sent. A later attempt must bring the frozen request
    /// of the first.
    async fn begin_attempt(&self, lease: &LeaseToken, request: &FrozenRequest) -> Result<BeginResult, LedgerError> {
        self.begin_attempt_batched(lease, request, Duration::ZERO).await
    }

    /// Begins like [`Ledger::begin_attempt`]; the write may wait this long for others to be committed with.
    async fn begin_attempt_batched(
        &self,
        lease: &LeaseToken,
        request: &FrozenRequest,
        max_batch_delay: Duration,
    ) -> Result<BeginResult, LedgerError>;

    /// Commits the result of an attempt and the job's next state, with an outcome event if that is final. If another
    /// payment of the provider succeeded by the same charge, the job becomes `review` and names that payment.
    async fn finish_attempt(
        &self,
        lease: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
    ) -> Result<FencedWrite, LedgerError> {
        Ok(self.finish_attempt_batched(lease, end, next, BatchOptions::immediate(Duration::ZERO)).await?.0)
    }

    /// Finishes like [`Ledger::finish_attempt`], and leases the event for the writer, which publishes it. The write may
    /// wait for others to be committed with. Returns the return plan of a waiting job.
    async fn finish_attempt_batched(
        &self,
        lease: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
        options: BatchOptions,
    ) -> Result<(FencedWrite, Option<OutcomeEvent>, Option<ReturnPlan>), LedgerError>;

    /// Commits that a look-up of an `unknown` job begins, before the first byte is sent. The job stays `unknown`.
    async fn begin_lookup(&self, lease: &LeaseToken) -> Result<BeginResult, LedgerError>;

    /// Commits the result of a look-up and the job's next state, like [`Ledger::finish_attempt`]. Returns the final
    /// state, if one was written (`review` for another payment's charge), and the return plan of a waiting job.
    async fn finish_lookup(
        &self,
        lease: &LeaseToken,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>, Option<ReturnPlan>), LedgerError>;

    /// The outcome of a request, as its row says: `None` while it is open, and when no request has this number.
    async fn request_outcome(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError>;

    /// Commits a state change without an attempt: delayed, expired, or moved to review.
    async fn transition(&self, lease: &LeaseToken, next: &JobState) -> Result<FencedWrite, LedgerError> {
        Ok(self.transition_with_copy(lease, next).await?.0)
    }

    /// Changes the state like [`Ledger::transition`]; returns the return plan of a waiting job.
    async fn transition_with_copy(
        &self,
        lease: &LeaseToken,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError>;

    /// Releases the lease of a job that came before it is due: its reason and `wake_at` stay.
    async fn release_waiting(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        Ok(self.release_waiting_with_copy(lease, Duration::ZERO).await?.0)
    }

    /// Releases the lease; the job is looked at again after `wait` at the latest. Returns its return plan.
    async fn release_waiting_with_copy(
        &self,
        lease: &LeaseToken,
        wait: Duration,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError>;

    /// Releases the lease; the job stays as it is and is due at once.
    async fn release(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError>;

    async fn reject(&self, message: &RejectedMessage) -> Result<(), LedgerError>;

    /// Leases the oldest unpublished events that were never rejected: no other worker gets them while the lease lasts.
    async fn lease_events(&self, at_most: u32, lease: Duration) -> Result<Vec<OutcomeEvent>, LedgerError> {
        self.lease_selected_events(EventSelection::NeverRejected, at_most, lease).await
    }

    async fn lease_selected_events(
        &self,
        which: EventSelection,
        at_most: u32,
        lease: Duration,
    ) -> Result<Vec<OutcomeEvent>, LedgerError>;

    /// Prolongs the leases of events whose confirms are late.
    async fn renew_event_leases(&self, sequences: &[i64], lease: Duration) -> Result<(), LedgerError>;

    /// Records that a queue rejected these events. The retry delay grows to ten minutes at most.
    async fn mark_events_rejected(&self, sequences: &[i64]) -> Result<(), LedgerError>;

    async fn unpublished_events(&self) -> Result<UnpublishedEvents, LedgerError>;

    async fn mark_events_published(&self, sequences: &[i64]) -> Result<(), LedgerError>;

    /// Recent requests of a quota: those that ended lately, and those that may not have ended. Includes all providers
    /// that share the quota or did so lately, deleted ones too. At most 1,000 entries; those older than `count_within`
    /// are one entry.
    ///
    /// Reads at least as far back as booking horizon, longest hold and longest padded window together. A request that
    /// began earlier and has no end counts as over. A database whose version was raised lately
    /// ([`settings::Settings::raise_version`]) misses requests, so it returns an error. Takes some seconds for a
    /// million requests.
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError>;

    /// Recent requests of accounts or references, one result for each; those without requests are left out. At most 256
    /// entries for each. The cost depends on their own requests alone.
    async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<BTreeMap<String, RecentUses>, LedgerError>;

    /// The limiter leaders of these quotas; a quota that never had a leader has no entry. Cheap enough for polling.
    async fn stored_leaders(&self, quotas: &[ProviderName])
    -> Result<HashMap<ProviderName, StoredLeader>, LedgerError>;

    /// Makes `to` the leader if `from` is it now, or if there is none. The term rises, and the age restarts at zero.
    /// Returns the leader row afterwards.
    async fn take_leadership(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<StoredLeader, LedgerError>;

    /// Stores each clock attestation, unless the quota's row has another term, or one of a later clock step.
    async fn record_clock_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), LedgerError>;

    async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError>;

    /// Asks the database for a sign of life; returns its version.
    async fn ping(&self) -> Result<String, LedgerError>;
}
