//! The ledger and the settings in SQL, written once for both databases.
//!
//! Refuses to know a driver: [`engine`] is the seam, [`dialect`] what the two write differently. One file per duty; each
//! keeps its statements beside the code that reads their rows.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::copies::{Claimant, ComesBack};
use super::outcomes::{Events, Unpublished};
use super::{
    AttemptEnd, Authority, Begun, Claim, First, Hold, JobState, Ledger, LedgerError, LookupEnd, OutcomeEvent,
    RecentUses, RejectedMessage, StateCount, Timing, Written,
};
use crate::domain::clock_witness::Word;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, SubjectsAsked};
use crate::provider::FrozenRequest;

mod apply;
mod attempt;
mod audit;
mod authority;
mod claim;
mod columns;
mod connect_options;
pub(super) mod connection_limits;
pub(super) mod connections;
mod copies;
mod dialect;
pub(super) mod engine;
mod first;
mod fleet;
mod group;
mod hints;
mod hold;
mod lookup;
pub(super) mod meaning;
mod operator;
mod outbox;
pub(super) mod postgres;
mod recent;
mod reports;
mod row;
mod server_settings;
pub(super) mod session;
mod settings;
mod signature;
pub(super) mod slots;
pub(super) mod sqlite;
mod upkeep;

use engine::Engine;
pub use operator::SqlOperator;
pub use settings::SqlSettings;

/// The ledger over any engine.
pub struct SqlLedger {
    engine: Arc<dyn Engine>,
    claim: claim::Statements,
    first: first::Statements,
    attempt: attempt::Statements,
    lookup: lookup::Statements,
    hold: hold::Statements,
    outbox: outbox::Statements,
    recent: recent::Statements,
    authority: authority::Statements,
    fleet: fleet::Statements,
    reports: reports::Statements,
    upkeep: upkeep::Statements,
}

impl SqlLedger {
    pub(super) fn new(engine: Arc<dyn Engine>) -> Self {
        let dialect = engine.dialect();
        Self {
            engine,
            claim: claim::Statements::new(dialect),
            first: first::Statements::new(dialect),
            attempt: attempt::Statements::new(dialect),
            lookup: lookup::Statements::new(dialect),
            hold: hold::Statements::new(dialect),
            outbox: outbox::Statements::new(dialect),
            recent: recent::Statements::new(dialect),
            authority: authority::Statements::new(dialect),
            fleet: fleet::Statements::new(dialect),
            reports: reports::Statements::new(dialect),
            upkeep: upkeep::Statements::new(dialect),
        }
    }
}

#[async_trait]
impl Ledger for SqlLedger {
    async fn claim_in_company(
        &self,
        job: &Job,
        hash: ContentHash,
        claimant: Claimant<'_>,
        timing: Timing,
    ) -> Result<Claim, LedgerError> {
        let request = claim::Request { job, hash, claimant, timing };
        self.claim.claim(&self.engine, request).await
    }

    async fn record_and_begin(&self, first: First<'_>) -> Result<Written, LedgerError> {
        self.first.write(&self.engine, first).await
    }

    async fn renew(&self, holds: &[Hold], lease: Duration) -> Result<Vec<Hold>, LedgerError> {
        self.hold.renew(&*self.engine, holds, lease).await
    }

    async fn begin_in_company(
        &self,
        hold: &Hold,
        request: &FrozenRequest,
        may_wait: Duration,
    ) -> Result<Begun, LedgerError> {
        self.attempt.begin(&self.engine, hold, request, may_wait).await
    }

    async fn finish_and_take(
        &self,
        hold: &Hold,
        end: &AttemptEnd,
        next: &JobState,
        timing: Timing,
    ) -> Result<(Written, Option<OutcomeEvent>, Option<ComesBack>), LedgerError> {
        self.attempt.finish(&self.engine, hold, end, next, timing).await
    }

    async fn begin_lookup(&self, hold: &Hold) -> Result<Begun, LedgerError> {
        self.lookup.begin(&*self.engine, hold).await
    }

    async fn finish_lookup(
        &self,
        hold: &Hold,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(Written, Option<FinalState>, Option<ComesBack>), LedgerError> {
        self.lookup.finish(&*self.engine, hold, end, next).await
    }

    async fn delay(&self, hold: &Hold, next: &JobState) -> Result<(Written, Option<ComesBack>), LedgerError> {
        self.hold.put_down(&self.engine, hold, next).await
    }

    async fn release(&self, hold: &Hold) -> Result<Written, LedgerError> {
        self.hold.release(&self.engine, hold).await
    }

    async fn delay_further(&self, hold: &Hold, wait: Duration) -> Result<(Written, Option<ComesBack>), LedgerError> {
        self.hold.wait_on(&self.engine, hold, wait).await
    }

    async fn reject(&self, message: &RejectedMessage) -> Result<(), LedgerError> {
        self.outbox.reject(&*self.engine, message).await
    }

    async fn take_outcomes_of(
        &self,
        which: Events,
        at_most: u32,
        lease: Duration,
    ) -> Result<Vec<OutcomeEvent>, LedgerError> {
        self.outbox.take(&*self.engine, which, at_most, lease).await
    }

    async fn renew_outcomes(&self, sequences: &[i64], lease: Duration) -> Result<(), LedgerError> {
        self.outbox.renewed(&*self.engine, sequences, lease).await
    }

    async fn outcomes_rejected(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.outbox.rejected(&*self.engine, sequences).await
    }

    async fn unpublished_outcomes(&self) -> Result<Unpublished, LedgerError> {
        self.outbox.waiting(&*self.engine).await
    }

    async fn outcomes_published(&self, sequences: &[i64]) -> Result<(), LedgerError> {
        self.outbox.published(&*self.engine, sequences).await
    }

    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError> {
        self.recent.uses(&*self.engine, quota, lookback).await
    }

    async fn recent_uses_of(
        &self,
        quota: &ProviderName,
        asked: &SubjectsAsked,
    ) -> Result<BTreeMap<String, RecentUses>, LedgerError> {
        self.recent.uses_of(&*self.engine, quota, asked).await
    }

    async fn authority(&self, quotas: &[ProviderName]) -> Result<HashMap<ProviderName, Authority>, LedgerError> {
        self.authority.of(&*self.engine, quotas).await
    }

    async fn take_authority(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<Authority, LedgerError> {
        self.authority.take(&*self.engine, quota, from, to).await
    }

    async fn note_clock(&self, quota: &ProviderName, term: i64, word: &Word) -> Result<(), LedgerError> {
        self.authority.note_clock(&*self.engine, quota, term, word).await
    }

    async fn outcome_of(&self, job: &JobId, number: u32) -> Result<Option<String>, LedgerError> {
        self.reports.outcome_of(&*self.engine, job, number).await
    }

    async fn state_counts(&self) -> Result<Vec<StateCount>, LedgerError> {
        self.reports.state_counts(&*self.engine).await
    }

    async fn ping(&self) -> Result<String, LedgerError> {
        self.reports.ping(&*self.engine).await
    }
}

/// Longest reason, detail or reference that is kept, in characters.
const TEXT_CHARS_MAX: usize = 1_000;

/// Text that came from outside, made storable: PostgreSQL cannot hold U+0000, and nobody needs a page of it.
fn storable(text: &str) -> String {
    text.chars().filter(|c| *c != '\0').take(TEXT_CHARS_MAX).collect()
}

fn written(found: bool) -> Written {
    if found { Written::Kept } else { Written::Lost }
}
