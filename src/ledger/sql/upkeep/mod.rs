//! The sweeper's SQL: republishing, retention, reconciliation, and the totals of finished jobs, one file each.
//!
//! Each statement finds its rows by a partial index of `migrations/*/0002_ledger.sql`. It repeats the index's
//! expression and condition exactly, because SQLite uses such an index for nothing else. See
//! `docs/decisions/0028-query-plans-are-pinned.md`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::SqlLedger;
use super::dialect::Dialect;
use super::engine::{Engine, Sql};
use crate::domain::disposition::RetryPolicy;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::upkeep::{
    CheckScope, JobToRepublish, LedgerReconciliation, MessageState, OverduePolicy, ScrubScope, Upkeep, WakeFilter,
};
use crate::ledger::{FencedWrite, LeaseToken, LedgerError};

mod finished_totals;
mod reconciliation;
pub(in crate::ledger::sql) mod republish;
mod retention;

pub(in crate::ledger::sql) use retention::LIMIT_WINDOW_MAX;

/// The states in which a job is not final.
pub(in crate::ledger::sql) const OPEN: &str = "state IN ('waiting', 'sending', 'unknown')";

/// What every list and every sweep reads of a row.
pub(in crate::ledger::sql) const READABLE: &str = "{readable:wake_at} AND {readable:created_at} AND {readable:updated_at} \
     AND (not_before IS NULL OR {readable:not_before}) AND (expires_at IS NULL OR {readable:expires_at}) AND attempts >= 0";

pub struct UpkeepStatements {
    republish: republish::RepublishStatements,
    ending: retention::RetentionStatements,
    reconciliation: reconciliation::ReconciliationStatements,
    finished_totals: finished_totals::FinishedTotalsStatements,
    duty: Sql,
}

impl UpkeepStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            republish: republish::RepublishStatements::new(dialect),
            ending: retention::RetentionStatements::new(dialect),
            reconciliation: reconciliation::ReconciliationStatements::new(dialect),
            finished_totals: finished_totals::FinishedTotalsStatements::new(dialect),
            duty: dialect.render(
                "INSERT INTO upkeep_turns (duty, taken_until) VALUES ($1, {after:$2}) \
                 ON CONFLICT (duty) DO UPDATE SET taken_until = excluded.taken_until \
                     WHERE upkeep_turns.taken_until <= {now} \
                 RETURNING duty",
            ),
        }
    }

    async fn lease_duty(&self, engine: &dyn Engine, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        Ok(!engine.query(&self.duty, Arc::from([duty.into(), lasts.into()])).await?.is_empty())
    }
}

#[async_trait]
impl Upkeep for SqlLedger {
    async fn lease_duty(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        self.upkeep.lease_duty(&*self.engine, duty, lasts).await
    }

    async fn lanes_with_open_jobs(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        self.reports.open_lanes(&*self.engine).await
    }

    async fn take_overdue(
        &self,
        lane: &ProviderName,
        which: &OverduePolicy,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        self.upkeep.republish.take_overdue(&*self.engine, lane, which).await
    }

    async fn keep_unqueued(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        self.upkeep.republish.keep_unqueued(&*self.engine, lease).await
    }

    async fn take_unqueued(
        &self,
        lane: &ProviderName,
        ahead: Duration,
        again_after: Duration,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        self.upkeep.republish.take_unqueued(&*self.engine, lane, ahead, again_after, at_most).await
    }

    async fn due_lookups(
        &self,
        lane: &ProviderName,
        policy: &RetryPolicy,
        at_most: u32,
    ) -> Result<Vec<JobToRepublish>, LedgerError> {
        self.upkeep.republish.due_lookups(&*self.engine, lane, policy, at_most).await
    }

    async fn wake_waiting(&self, lane: &ProviderName, which: &WakeFilter) -> Result<u32, LedgerError> {
        self.upkeep.republish.wake_waiting(&*self.engine, lane, which).await
    }

    async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.expire(&*self.engine, reason, at_most).await
    }

    async fn move_to_review(&self, id: &JobId, reason: &str) -> Result<FencedWrite, LedgerError> {
        self.upkeep.ending.set_aside(&*self.engine, id, reason).await
    }

    async fn message_state(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<MessageState, LedgerError> {
        self.upkeep.republish.standing(&*self.engine, job, hash, copy).await
    }

    async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.scrub(&*self.engine, which, older_than, at_most).await
    }

    async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.forget_references(&*self.engine, at_most).await
    }

    async fn update_finished_totals(&self) -> Result<(), LedgerError> {
        self.upkeep.finished_totals.update_totals(&*self.engine).await
    }

    async fn reconcile(
        &self,
        overdue_after: Duration,
        scope: CheckScope,
    ) -> Result<Vec<LedgerReconciliation>, LedgerError> {
        self.upkeep.reconciliation.reconcile(&*self.engine, overdue_after, scope).await
    }
}
