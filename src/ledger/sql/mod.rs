//! The ledger and the settings in SQL, written once for both databases.
//!
//! [`engine`] is the interface to a driver, and [`dialect`] has what the databases write differently. One file for each
//! task; each keeps its statements beside the code that reads their rows. See
//! `docs/decisions/0024-one-sql-for-two-databases.md`.

use crate::ledger::copies::RejectedMessage;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::copies::{Claimant, ReturnPlan};
use super::outcomes::{EventSelection, UnpublishedEvents};
use super::{
    AttemptEnd, BatchOptions, BeginResult, Claim, FencedWrite, JobState, LeaseToken, Ledger, LedgerError, LookupEnd,
    NewJobAttempt, OutcomeEvent, RecentUses, StateCount, StoredLeader,
};
use crate::domain::clock_attestation::QuotaAttestation;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, SubjectQuery};
use crate::provider::FrozenRequest;

mod apply;
mod attempt;
mod audit;
mod audit_context;
mod backlog;
mod batcher;
mod claim;
mod columns;
pub(super) mod connect_options;
pub(super) mod connection_limits;
pub(super) mod connections;
mod copies;
mod dialect;
pub(super) mod engine;
pub(super) mod error;
mod fleet;
mod hints;
mod leader;
mod lease;
mod lookup;
mod new_job;
mod operator;
mod outbox;
pub(super) mod postgres;
mod recent;
mod reports;
mod row;
mod server_settings;
pub(super) mod session;
mod settings;
pub(super) mod slots;
pub(super) mod sqlite;
mod upkeep;
mod wait;

use engine::Engine;
pub use operator::SqlOperator;
pub use settings::SqlSettings;

/// The ledger over any engine.
pub struct SqlLedger {
    engine: Arc<dyn Engine>,
    claim: claim::ClaimStatements,
    new_job: new_job::NewJobStatements,
    attempt: attempt::AttemptStatements,
    lookup: lookup::LookupStatements,
    lease: lease::LeaseStatements,
    outbox: outbox::OutboxStatements,
    recent: recent::RecentUseStatements,
    leaders: leader::LeaderStatements,
    fleet: fleet::FleetStatements,
    reports: reports::ReportStatements,
    upkeep: upkeep::UpkeepStatements,
    backlog: backlog::BacklogStatements,
}

impl SqlLedger {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Self {
        let dialect = engine.dialect();
        Self {
            engine,
            claim: claim::ClaimStatements::new(dialect),
            new_job: new_job::NewJobStatements::new(dialect),
            attempt: attempt::AttemptStatements::new(dialect),
            lookup: lookup::LookupStatements::new(dialect),
            lease: lease::LeaseStatements::new(dialect),
            outbox: outbox::OutboxStatements::new(dialect),
            recent: recent::RecentUseStatements::new(dialect),
            leaders: leader::LeaderStatements::new(dialect),
            fleet: fleet::FleetStatements::new(dialect),
            reports: reports::ReportStatements::new(dialect),
            upkeep: upkeep::UpkeepStatements::new(dialect),
            backlog: backlog::BacklogStatements::new(dialect),
        }
    }
}

#[async_trait]
impl Ledger for SqlLedger {
    async fn claim_batched(
        &self,
        job: &Job,
        hash: ContentHash,
        claimant: Claimant<'_>,
        options: BatchOptions,
    ) -> Result<Claim, LedgerError> {
        let request = claim::ClaimRequest { job, hash, claimant, options };
        self.claim.claim(&self.engine, request).await
    }

    async fn record_and_begin(&self, attempt: NewJobAttempt<'_>) -> Result<FencedWrite, LedgerError> {
        self.new_job.write(&self.engine, attempt).await
    }

    async fn renew(&self, leases: &[LeaseToken], lease: Duration) -> Result<Vec<LeaseToken>, LedgerError> {
        self.lease.renew(&*self.engine, leases, lease).await
    }

    async fn begin_attempt_batched(
        &self,
        lease: &LeaseToken,
        request: &FrozenRequest,
        max_batch_delay: Duration,
    ) -> Result<BeginResult, LedgerError> {
        self.attempt.begin(&self.engine, lease, request, max_batch_delay).await
    }

    async fn finish_attempt_batched(
        &self,
        lease: &LeaseToken,
        end: &AttemptEnd,
        next: &JobState,
        options: BatchOptions,
    ) -> Result<(FencedWrite, Option<OutcomeEvent>, Option<ReturnPlan>), LedgerError> {
        self.attempt.finish(&self.engine, lease, end, next, options).await
    }

    async fn begin_lookup(&self, lease: &LeaseToken) -> Result<BeginResult, LedgerError> {
        self.lookup.begin(&*self.engine, lease).await
    }

    async fn finish_lookup(
        &self,
        lease: &LeaseToken,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>, Option<ReturnPlan>), LedgerError> {
        self.lookup.finish(&*self.engine, lease, end, next).await
    }

    async fn transition_with_copy(
        &self,
        lease: &LeaseToken,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError> {
        self.lease.transition(&self.engine, lease, next).await
    }

    async fn release(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        self.lease.release(&self.engine, lease).await
    }

    async fn release_waiting_with_copy(
        &self,
        lease: &LeaseToken,
        wait: Duration,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError> {
        self.lease.wait_on(&self.engine, lease, wait).await
    }

    async fn reject(&self, message: &RejectedMessage) -> Result<(), LedgerError> {
        self.outbox.reject(&*self.engine, message).await
    }

    async fn lease_selected_events(
        &self,
        which: EventSelection,
        at_most: u32,
        lease: Duration,
    ) -> Result<Vec<OutcomeEvent>, LedgerError> {
        self.outbox.take(&*self.engine, which, at_most, lease).await
    }

    async fn renew_event_leases(&self, sequences: &[i64], lease: Duration) -> Result<(), LedgerError> {
        self.outbox.renewed(&*self.engine, sequences, lease).await
    }

    async fn mark_events_rejected(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.outbox.rejected(&*self.engine, sequences).await
    }

    async fn unpublished_events(&self) -> Result<UnpublishedEvents, LedgerError> {
        self.outbox.waiting(&*self.engine).await
    }

    async fn mark_events_published(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.outbox.published(&*self.engine, sequences).await
    }

    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError> {
        self.recent.uses(&*self.engine, quota, lookback).await
    }

    async fn recent_subject_uses(
        &self,
        quota: &ProviderName,
        asked: &SubjectQuery,
    ) -> Result<BTreeMap<String, RecentUses>, LedgerError> {
        self.recent.uses_of(&*self.engine, quota, asked).await
    }

    async fn stored_leaders(
        &self,
        quotas: &[ProviderName],
    ) -> Result<HashMap<ProviderName, StoredLeader>, LedgerError> {
        self.leaders.stored_leaders(&*self.engine, quotas).await
    }

    async fn take_leadership(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<StoredLeader, LedgerError> {
        self.leaders.take(&*self.engine, quota, from, to).await
    }

    async fn record_clock_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), LedgerError> {
        self.leaders.attest(&*self.engine, attestations).await
    }

    async fn request_outcome(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError> {
        self.reports.outcome_of(&*self.engine, job, number).await
    }

    async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError> {
        self.reports.state_counts(&*self.engine).await
    }

    async fn ping(&self) -> Result<String, LedgerError> {
        self.reports.ping(&*self.engine).await
    }
}

/// Longest stored reason, detail or reference, in characters.
const TEXT_CHARS_MAX: usize = 1_000;

/// Text from outside, made storable: PostgreSQL cannot store U+0000, and a thousand characters are enough.
fn storable(text: &str) -> String {
    text.chars().filter(|c| *c != '\0').take(TEXT_CHARS_MAX).collect()
}

fn fenced_write(found: bool) -> FencedWrite {
    if found { FencedWrite::Applied } else { FencedWrite::Stale }
}
