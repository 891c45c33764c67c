//! Queries of the ledger for past uses that the limiter did not count.
//!
//! They concern new limits, accounts and references. One query runs at a time, and only for jobs that wait now, so its
//! cost depends on current use. It runs once the limiter's clock shows that no earlier permit can start any more. Its
//! result is for the state that needed it. See `docs/decisions/0012-history-of-uncounted-usage.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, pending};

use super::GateContext;
use super::history_stock::{HistoryAnswer, HistoryRequest};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{Subject, SubjectHistory, UsageHistory};
use crate::limiter::{RecentAttempts, SubjectUses};

type HistoryResult = Result<HistoryAnswer, String>;

#[derive(Default)]
pub(super) struct HistoryLoader {
    query: Option<BoxFuture<'static, HistoryResult>>,
}

impl fmt::Debug for HistoryLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HistoryLoader").field("is_querying", &self.query.is_some()).finish()
    }
}

impl HistoryLoader {
    /// Queries the ledger, unless a query runs already.
    pub fn start_query(&mut self, request: HistoryRequest, parts: &GateContext) {
        if self.query.is_none() {
            let recent = Arc::clone(&parts.recent);
            self.query = Some(Box::pin(async move { run(&request, &*recent).await }));
        }
    }

    /// The query's result, if there is one now.
    pub fn poll_result(&mut self) -> Option<HistoryResult> {
        let answer = self.query.as_mut()?.now_or_never()?;
        self.query = None;
        Some(answer)
    }

    /// Waits for the query's result, for ever if no query runs.
    pub async fn wait_for_result(&mut self) -> HistoryResult {
        let Some(query) = &mut self.query else { return pending().await };
        let answer = query.await;
        self.query = None;
        answer
    }

    /// Drops the query, because other settings may need another history.
    pub fn clear(&mut self) {
        self.query = None;
    }
}

async fn run(request: &HistoryRequest, recent: &dyn RecentAttempts) -> HistoryResult {
    let mut answer = HistoryAnswer { state_epoch: request.state_epoch, provider: None, subjects: Vec::new() };
    if request.needs.provider {
        let lookback = request.spec.lookback();
        let (ended, in_flight) = recent.recent_uses(&request.spec.quota, lookback).await?;
        let (as_of, within) = (request.as_of, lookback.count_within);
        answer.provider = Some(UsageHistory { as_of, within, ended, in_flight });
    }
    for scope in [Scope::Account, Scope::Reference] {
        answer.subjects.extend(query_scope(request, recent, scope).await?);
    }
    Ok(answer)
}

async fn query_scope(
    request: &HistoryRequest,
    recent: &dyn RecentAttempts,
    scope: Scope,
) -> Result<Vec<SubjectHistory>, String> {
    let Some(query) = request.subject_query(scope) else { return Ok(Vec::new()) };
    let uses = recent.recent_subject_uses(&request.spec.quota, &query).await?;
    let mut by_name: BTreeMap<String, SubjectUses> = uses.into_iter().map(|uses| (uses.name.clone(), uses)).collect();
    let history = |(subject, name): &(Subject, String)| {
        // A subject without an entry in the ledger was not used.
        let SubjectUses { ended, in_flight, .. } = by_name.remove(name).unwrap_or_default();
        let history = UsageHistory { as_of: request.as_of, within: query.within, ended, in_flight };
        SubjectHistory { subject: subject.clone(), history }
    };
    Ok(request.named(scope).values().map(history).collect())
}
