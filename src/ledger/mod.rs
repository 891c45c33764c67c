//! The face of the ledger: what became of every payment, who holds it now, and the limits that operators set.
//!
//! Refuses to decide: `domain::disposition` does, this writes it down. Times are the database's own. Every write on a
//! job in hand names its [`Hold`]; a hold whose fence has been passed on writes nothing and is told so.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;

use self::copies::{Claimant, DeliveredCopy, RejectedMessage, ReturnPlan};
use self::outcomes::{EventSelection, UnpublishedEvents};
use crate::domain::clock_attestation::ClockAttestation;
use crate::domain::disposition::Resend;
use crate::domain::job::{ContentHash, InvalidMessage, Job, JobId};
use crate::domain::outcome::FinalState;
use crate::domain::permit_protocol::CostByKind;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, SubjectQuery};
use crate::domain::time::Micros;
use crate::provider::FrozenRequest;

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
    /// The database cannot be reached, or did not answer in time. Whether a write happened is unknown.
    #[error("database away: {0}")]
    Unavailable(String),
    #[error("the database is not at this program's schema: run `sluicegate migrate`")]
    NotMigrated,
    /// A statement failed for a reason that trying again will not mend.
    #[error("database refuses: {0}")]
    Refused(String),
    /// A row holds what it never should.
    #[error("unreadable row: {0}")]
    Corrupt(String),
}

/// The right to write on one job: granted by a claim, void once the fence has moved on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub id: JobId,
    pub fence: i64,
}

/// Whether a write on a hold counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum FencedWrite {
    Applied,
    /// Somebody else holds the job now: stop, send nothing, do not acknowledge.
    Stale,
}

/// A job in hand, with what the ledger knows of its past.
#[derive(Clone, Debug, PartialEq)]
pub struct Claimed {
    pub lease: LeaseToken,
    pub attempts: u32,
    /// Holders lost in a row, the last of them included, none of whom began a request.
    pub lost_holders: u32,
    /// An earlier attempt may have charged (state was `sending` or `unknown`).
    pub maybe_charged: bool,
    /// Time until the job may be worked on (a wait not yet over, `not_before`); zero when it is due.
    pub wait: Duration,
    /// Since the job could first be worked on: since it was recorded, or since its `not_before`.
    pub age: Duration,
    /// Until `expires_at`, by the database's clock; zero when it has passed.
    pub expires_in: Option<Duration>,
    /// Number of the last request that was begun, charge or look-up; 0 for none.
    pub last_attempt: u32,
    /// Look-ups begun so far.
    pub lookups: u32,
    pub resend: Resend,
    /// Since the last charge whose outcome is unknown, or that was on the wire when its worker was lost, was begun.
    pub unknown_age: Option<Duration>,
    /// What the first attempt froze, and how long ago the first request that may have left was begun; zero when every
    /// request so far surely stayed unsent.
    pub frozen_request: Option<(FrozenRequest, Duration)>,
    /// Number of the newest copy of its message.
    pub copy: i64,
}

impl Claimed {
    /// A job that has just been recorded, and is due.
    #[must_use]
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
    /// Final already: acknowledge, nothing else.
    Finished,
    /// A newer copy of its message was published: acknowledge, nothing else.
    Superseded,
    /// Another worker holds it, for at most this long unless it renews.
    Leased {
        lease_left: Duration,
    },
    /// Same id with other content, or an idempotency key that another payment of this provider uses.
    Conflict(InvalidMessage),
    /// Its row holds what it never should: a person must repair it. Which column, and why.
    Unreadable(String),
}

/// Of a write that takes something, and that others may be committed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// For how long it is taken.
    pub lease: Duration,
    /// How long the write may wait for the others.
    pub max_batch_delay: Duration,
}

impl BatchOptions {
    #[must_use]
    pub fn immediate(lease: Duration) -> Self {
        Self { lease, max_batch_delay: Duration::ZERO }
    }
}

/// A job that nobody has recorded, with the request of its first attempt.
#[derive(Clone, Copy, Debug)]
pub struct NewJobAttempt<'a> {
    pub job: &'a Job,
    pub hash: ContentHash,
    /// The caller's own fence, random: no other hold of this job has it.
    pub lease: &'a LeaseToken,
    pub owner: &'a str,
    pub options: BatchOptions,
    pub request: &'a FrozenRequest,
}

/// Result of beginning an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum BeginResult {
    /// Committed, a charge as `sending`; charges and look-ups are numbered together, from 1 per job.
    Attempt(u32),
    Stale,
}

/// What one attempt came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptEnd {
    pub number: u32,
    /// Stable word for the `outcome` column: accepted, declined, throttled, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    pub counts: bool,
}

/// What one look-up came to. It counts as no attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupEnd {
    pub number: u32,
    /// Stable word for the `outcome` column: accepted, not_found, unknown, …
    pub outcome: &'static str,
    pub status: Option<u16>,
    pub detail: String,
    /// The frozen request may be sent once more.
    pub grants_resend: bool,
}

/// Where the job stands after a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Due again after the wait; the hold is given up.
    Waiting {
        wait: Duration,
        reason: String,
    },
    /// The same, with an outcome that nobody knows.
    Unknown {
        wait: Duration,
        reason: String,
    },
    Final {
        state: FinalState,
        reason: String,
        reference: Option<String>,
    },
}

impl JobState {
    /// For how long it waits; `None` when it is final.
    #[must_use]
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

/// Numbers for status: jobs of one provider in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCount {
    pub provider: String,
    pub state: String,
    pub jobs: i64,
}

/// What may still count at a quota's provider, by the database's clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUses {
    /// Age of the end of each request that has ended, with its cost; youngest first. Requests that ended close together
    /// are one entry, with the age of the youngest: an age is never more than the true one.
    pub ended: Vec<(Duration, CostByKind)>,
    /// Cost of requests that may be on the wire now: no end is written down, or no answer came and the provider may
    /// count late.
    pub open: CostByKind,
}

/// Who grants permits for a quota, in the whole cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLeader {
    /// `redis:` and the run id of the one writable primary, or of the one process with an embedded limiter; or `share`:
    /// each worker grants its own share.
    pub holder: String,
    /// One higher with each change. A limiter's state that was warmed in another term is not to be trusted: somebody
    /// else granted in between.
    pub term: i64,
    /// Since the holder changed, by the database's clock. The change became visible to others somewhat later, when it
    /// was committed.
    pub age: Duration,
    /// The database's clock as this was read.
    pub now: Micros,
    /// What a worker said last, in this term, of the store's clock beside the database's, and how long ago.
    pub attestation: Option<(ClockAttestation, Duration)>,
}

#[async_trait]
pub trait Ledger: Send + Sync {
    /// Records the job if it is new, and claims it for `owner` if nobody else holds it.
    async fn claim(&self, job: &Job, hash: ContentHash, owner: &str, lease: Duration) -> Result<Claim, LedgerError> {
        let claimant = Claimant { owner, delivered: DeliveredCopy::ALWAYS_CURRENT };
        self.claim_batched(job, hash, claimant, BatchOptions::immediate(lease)).await
    }

    /// The same, and the write may wait for others to be committed with.
    async fn claim_batched(
        &self,
        job: &Job,
        hash: ContentHash,
        claimant: Claimant<'_>,
        timing: BatchOptions,
    ) -> Result<Claim, LedgerError>;

    /// Records a job that is new and begins its first attempt in one commit, as `sending`, before the first byte leaves.
    /// [`Written::Lost`]: its id or its key is known; nothing was written, and [`Ledger::claim`] says what is known.
    async fn record_and_begin(&self, first: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError>;

    /// Prolongs the leases of jobs in hand; returns those that are lost, and those whose row is being written at this
    /// moment, which most often settles them.
    async fn renew(&self, holds: &[LeaseToken], lease: Duration) -> Result<Vec<LeaseToken>, LedgerError>;

    /// Commits `sending` with the request, before the first byte leaves. A later attempt must bring the frozen request
    /// of the first.
    async fn begin_attempt(&self, hold: &LeaseToken, request: &FrozenRequest) -> Result<BeginResult, LedgerError> {
        self.begin_attempt_batched(hold, request, Duration::ZERO).await
    }

    /// The same, and the write may wait so long for others to be committed with.
    async fn begin_attempt_batched(
        &self,
        hold: &LeaseToken,
        request: &FrozenRequest,
        may_wait: Duration,
    ) -> Result<BeginResult, LedgerError>;

    /// Commits what an attempt came to and where the job stands now, with its outcome event if that is final. A job that
    /// would succeed by a charge that another payment of its provider succeeded by becomes `review` instead, naming it.
    async fn finish_attempt(
        &self,
        hold: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
    ) -> Result<FencedWrite, LedgerError> {
        Ok(self.finish_attempt_batched(hold, end, next, BatchOptions::immediate(Duration::ZERO)).await?.0)
    }

    /// The same, and takes the event at once, as [`Ledger::take_outcomes`] does: whoever has written it publishes it. The
    /// write may wait for others to be committed with. Of a job that waits, how it comes back.
    async fn finish_attempt_batched(
        &self,
        hold: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
        timing: BatchOptions,
    ) -> Result<(FencedWrite, Option<OutcomeEvent>, Option<ReturnPlan>), LedgerError>;

    /// Commits that a job of unknown outcome is asked about, before the first byte leaves. It stays `unknown` meanwhile.
    async fn begin_lookup(&self, hold: &LeaseToken) -> Result<BeginResult, LedgerError>;

    /// Commits what a look-up found and where the job stands now, like [`Ledger::finish_attempt`]. With the final state that
    /// was written, if one was: a charge that another payment has makes it `review`. Of a job that waits, how it comes back.
    async fn finish_lookup(
        &self,
        hold: &LeaseToken,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>, Option<ReturnPlan>), LedgerError>;

    /// What a request came to, as its row says: `None` while it is open, and when there is none of this number.
    async fn request_outcome(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError>;

    /// Commits where a job stands without an attempt: parked, expired, handed to a person.
    async fn transition(&self, hold: &LeaseToken, next: &JobState) -> Result<FencedWrite, LedgerError> {
        Ok(self.transition_with_copy(hold, next).await?.0)
    }

    /// The same; of a job that waits, how it comes back.
    async fn transition_with_copy(
        &self,
        hold: &LeaseToken,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError>;

    /// Gives the hold of a job up that came before its time: what it waits for stays, and until when.
    async fn release_waiting(&self, hold: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        Ok(self.release_waiting_with_copy(hold, Duration::ZERO).await?.0)
    }

    /// The same for a job that is to be looked at again after `wait` at the latest, and how it comes back.
    async fn release_waiting_with_copy(
        &self,
        hold: &LeaseToken,
        wait: Duration,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError>;

    /// Gives the hold up and leaves the job as it is, due at once.
    async fn release(&self, hold: &LeaseToken) -> Result<FencedWrite, LedgerError>;

    async fn reject(&self, message: &RejectedMessage) -> Result<(), LedgerError>;

    /// Takes the oldest unpublished events that were never rejected: nobody else is given them while the lease lasts.
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

    /// Notes that some queue has rejected these events: they are tried again later each time, after ten minutes at most.
    async fn mark_events_rejected(&self, sequences: &[i64]) -> Result<(), LedgerError>;

    async fn unpublished_events(&self) -> Result<UnpublishedEvents, LedgerError>;

    async fn mark_events_published(&self, sequences: &[i64]) -> Result<(), LedgerError>;

    /// What was used of a quota and ended lately, or may not have ended: over all providers that share the quota or did
    /// lately, deleted ones too. At most 1,000 entries, whatever was sent. All that is only noticed is one entry.
    ///
    /// What is counted reaches no less far back than booking horizon, longest hold and longest padded window together: a
    /// request that was begun longer ago and has no end is held to be over. A database whose version was raised lately
    /// ([`settings::Settings::raise_version`]) has forgotten requests, and refuses. Many requests take a while: some
    /// seconds a million.
    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError>;

    /// The same for accounts or references, each apart; of one that has none nothing is said. At most 256 entries for each.
    /// Costs what they have used, whatever others have.
    async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<BTreeMap<String, RecentUses>, LedgerError>;

    /// Who grants for these quotas; a quota without an entry has had no holder yet. Cheap, for polling.
    async fn stored_leaders(&self, quotas: &[ProviderName])
    -> Result<HashMap<ProviderName, StoredLeader>, LedgerError>;

    /// Makes `to` the holder if `from` is it now, or if nobody is; the term grows and the age starts anew. Returns what
    /// holds afterwards.
    async fn take_leadership(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<StoredLeader, LedgerError>;

    /// Notes a word on the store's clock in this term, unless somebody knows of a later step; says nothing about whether.
    async fn record_clock_attestation(
        &self,
        quota: &ProviderName,
        term: i64,
        word: &ClockAttestation,
    ) -> Result<(), LedgerError>;

    async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError>;

    /// Whether the database answers now; its version.
    async fn ping(&self) -> Result<String, LedgerError>;
}
