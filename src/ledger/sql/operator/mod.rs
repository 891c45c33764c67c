//! The operators' queries and decisions in SQL, over any engine.
//!
//! Workers do not call them. Queries use existing indexes, and only the one job of a decision is locked.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use super::engine::Engine;
use super::{recent, reports};
use crate::domain::job::{Identifier, JobId};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{Lookback, SubjectQuery};
use crate::ledger::operator::{
    Actor, DatabaseTime, ErasureCounts, ErasureResult, JobDetails, JobFilter, JobPage, JobResolution, Operator,
    PastArrival, ReloadedJob, ResolutionRefusal,
};
use crate::ledger::queue_position::LedgerQueuePosition;
use crate::ledger::{LedgerError, RecentUses, StateCount};

mod details;
mod erase;
mod history;
mod list;
mod precancel;
mod queue_position;
mod reload;
mod resolution;

/// The operators' interface over any engine.
pub struct SqlOperator {
    engine: Arc<dyn Engine>,
    precancel: precancel::PrecancelStatements,
    erase: erase::ErasureStatements,
    history: history::ArrivalStatements,
    list: list::JobListStatements,
    details: details::JobDetailStatements,
    queue_position: queue_position::QueuePositionStatements,
    recall: reload::ReloadStatements,
    resolution: resolution::ResolutionStatements,
    reports: reports::ReportStatements,
    recent: recent::RecentUseStatements,
}

impl SqlOperator {
    pub(in crate::ledger) fn new(engine: Arc<dyn Engine>) -> Self {
        let dialect = engine.dialect();
        Self {
            engine,
            precancel: precancel::PrecancelStatements::new(dialect),
            erase: erase::ErasureStatements::new(dialect),
            history: history::ArrivalStatements::new(dialect),
            list: list::JobListStatements::new(dialect),
            details: details::JobDetailStatements::new(dialect),
            queue_position: queue_position::QueuePositionStatements::new(dialect),
            recall: reload::ReloadStatements::new(dialect),
            resolution: resolution::ResolutionStatements::new(dialect),
            reports: reports::ReportStatements::new(dialect),
            recent: recent::RecentUseStatements::new(dialect),
        }
    }
}

#[async_trait]
impl Operator for SqlOperator {
    async fn show(&self, id: &JobId) -> Result<Option<JobDetails>, LedgerError> {
        self.details.job_details(&*self.engine, id).await
    }

    async fn queue_position(&self, id: &JobId, sharing: &[ProviderName]) -> Result<LedgerQueuePosition, LedgerError> {
        self.queue_position.queue_position(&*self.engine, id, sharing).await
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

    async fn list(&self, filter: &JobFilter, after: Option<&JobId>, at_most: u32) -> Result<JobPage, LedgerError> {
        self.list.page(&*self.engine, filter, after, at_most).await
    }

    async fn arrivals(
        &self,
        provider: &ProviderName,
        from: DatabaseTime,
        to: DatabaseTime,
        at_most: usize,
    ) -> Result<Vec<PastArrival>, LedgerError> {
        self.history.page_of(&*self.engine, provider, (from, to), at_most).await
    }

    async fn job_counts(&self, state: &str) -> Result<Vec<StateCount>, LedgerError> {
        self.reports.counts_of(&*self.engine, state).await
    }

    async fn reload(
        &self,
        id: &JobId,
        resolution: &JobResolution,
    ) -> Result<Result<ReloadedJob, ResolutionRefusal>, LedgerError> {
        match self.resolution.look(&*self.engine, id, resolution).await? {
            Ok(_) => self.recall.job(&*self.engine, id).await,
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    async fn resolve(
        &self,
        id: &JobId,
        resolution: &JobResolution,
        seen_fence: Option<i64>,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError> {
        self.resolution.resolve(&*self.engine, id, resolution, seen_fence, by).await
    }

    async fn erasure_counts(&self, account: &Identifier) -> Result<ErasureCounts, LedgerError> {
        self.erase.erasure_counts(&*self.engine, account).await
    }

    async fn erase(&self, account: &Identifier, at_most: u32, by: &Actor) -> Result<ErasureResult, LedgerError> {
        self.erase.erase(&*self.engine, account, at_most, by).await
    }

    async fn precancel(
        &self,
        id: &JobId,
        provider: &ProviderName,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError> {
        self.precancel.cancel(&self.resolution, &*self.engine, id, provider, by).await
    }
}
