//! What people ask of the ledger and tell it, over any engine.
//!
//! Refuses to be on a worker's path: its questions take what indexes there are, and lock nothing but the one job that a
//! verdict is passed on.

use std::sync::Arc;

use async_trait::async_trait;

use super::engine::Engine;
use super::{recent, reports};
use crate::domain::job::{JobId, Token};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::Lookback;
use crate::ledger::operator::{
    At, By, Erasable, Erased, Filter, JobPage, JobStory, Operator, PastArrival, Recalled, Refusal, Verdict,
};
use crate::ledger::surroundings::Surroundings;
use crate::ledger::{LedgerError, RecentUses, StateCount};

mod ahead;
mod erase;
mod history;
mod list;
mod recall;
mod story;
mod surroundings;
mod verdict;

/// The operators' face over any engine.
pub struct SqlOperator {
    engine: Arc<dyn Engine>,
    ahead: ahead::Statements,
    erase: erase::Statements,
    history: history::Statements,
    list: list::Statements,
    story: story::Statements,
    surroundings: surroundings::Statements,
    recall: recall::Statements,
    verdict: verdict::Statements,
    reports: reports::Statements,
    recent: recent::Statements,
}

impl SqlOperator {
    pub(in crate::ledger) fn new(engine: Arc<dyn Engine>) -> Self {
        let dialect = engine.dialect();
        Self {
            engine,
            ahead: ahead::Statements::new(dialect),
            erase: erase::Statements::new(dialect),
            history: history::Statements::new(dialect),
            list: list::Statements::new(dialect),
            story: story::Statements::new(dialect),
            surroundings: surroundings::Statements::new(dialect),
            recall: recall::Statements::new(dialect),
            verdict: verdict::Statements::new(dialect),
            reports: reports::Statements::new(dialect),
            recent: recent::Statements::new(dialect),
        }
    }
}

#[async_trait]
impl Operator for SqlOperator {
    async fn show(&self, id: &JobId) -> Result<Option<JobStory>, LedgerError> {
        self.story.of(&*self.engine, id).await
    }

    async fn surroundings(&self, id: &JobId, sharing: &[ProviderName]) -> Result<Surroundings, LedgerError> {
        self.surroundings.of(&*self.engine, id, sharing).await
    }

    async fn recent_uses(&self, quota: &ProviderName, lookback: Lookback) -> Result<RecentUses, LedgerError> {
        self.recent.uses(&*self.engine, quota, lookback).await
    }

    async fn list(&self, filter: &Filter, after: Option<&JobId>, at_most: u32) -> Result<JobPage, LedgerError> {
        self.list.page(&*self.engine, filter, after, at_most).await
    }

    async fn arrivals(
        &self,
        provider: &ProviderName,
        from: At,
        to: At,
        at_most: usize,
    ) -> Result<Vec<PastArrival>, LedgerError> {
        self.history.of(&*self.engine, provider, (from, to), at_most).await
    }

    async fn counts(&self, state: &str) -> Result<Vec<StateCount>, LedgerError> {
        self.reports.counts_of(&*self.engine, state).await
    }

    async fn recall(&self, id: &JobId, verdict: &Verdict) -> Result<Result<Recalled, Refusal>, LedgerError> {
        match self.verdict.look(&*self.engine, id, verdict).await? {
            Ok(_) => self.recall.job(&*self.engine, id).await,
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    async fn decide(
        &self,
        id: &JobId,
        verdict: &Verdict,
        seen_fence: Option<i64>,
        by: &By,
    ) -> Result<Result<(), Refusal>, LedgerError> {
        self.verdict.pass(&*self.engine, id, verdict, seen_fence, by).await
    }

    async fn erasable(&self, account: &Token) -> Result<Erasable, LedgerError> {
        self.erase.erasable(&*self.engine, account).await
    }

    async fn erase(&self, account: &Token, at_most: u32, by: &By) -> Result<Erased, LedgerError> {
        self.erase.erase(&*self.engine, account, at_most, by).await
    }

    async fn cancel_ahead(
        &self,
        id: &JobId,
        provider: &ProviderName,
        by: &By,
    ) -> Result<Result<(), Refusal>, LedgerError> {
        self.ahead.cancel(&self.verdict, &*self.engine, id, provider, by).await
    }
}
