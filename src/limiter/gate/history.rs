//! The gate's queries of the ledger: past uses that the limiter did not count, and those of a state that was lost.
//!
//! Past uses are those of new limits, accounts and references. They are queried only for jobs that wait now, so the cost
//! depends on current use. The query runs once the limiter's clock shows that no earlier permit can start any more. Its
//! result is for the state that needed it. See `docs/decisions/0012-history-of-uncounted-usage.md`.
//!
//! A lost state is rebuilt once none of its permits can start any more ([`super::core`]). Another limiter leader must not
//! grant any more either. See `docs/decisions/0011-cold-start-and-rebuild.md`.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::GateContext;
use super::core::{ColdQuery, RebuildStep};
use super::history_stock::HistoryRequest;
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{CostByKind, CounterSeeds, PastUse, RebuildData};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use crate::limiter::RecentAttempts;

/// Wait between two queries of a ledger that failed, and the retry delay of refused jobs while a query runs.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Time between two checks whether another leader may still grant, and how long the gate waits at a time for the
/// ledger, which may have to read a month.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// A running query for past uses.
pub(super) type HistoryQuery = BoxFuture<'static, Result<CounterSeeds, String>>;
type RecentUsesResult = Result<(Vec<PastUse>, CostByKind), String>;

pub(super) fn query_history(request: HistoryRequest, recent: Arc<dyn RecentAttempts>) -> HistoryQuery {
    Box::pin(async move { run(&request, &*recent).await })
}

async fn run(request: &HistoryRequest, recent: &dyn RecentAttempts) -> Result<CounterSeeds, String> {
    let mut answer = CounterSeeds { state_epoch: request.state_epoch, provider: None, subjects: Vec::new() };
    if request.needs.provider {
        let (ended, in_flight) = recent.recent_uses(&request.spec.quota, request.spec.lookback()).await?;
        answer.provider = Some(request.provider_history(ended, in_flight));
    }
    for query in [Scope::Account, Scope::Reference].into_iter().filter_map(|scope| request.subject_query(scope)) {
        let uses = recent.recent_subject_uses(&request.spec.quota, &query).await?;
        answer.subjects.extend(request.subject_histories(&query, uses));
    }
    Ok(answer)
}

/// The ledger's query for one cold state.
pub(super) struct Rebuild {
    state_epoch: Micros,
    /// The running query.
    query: Option<BoxFuture<'static, RecentUsesResult>>,
}

impl Rebuild {
    /// The rebuild that is in progress, or a new one if the state was lost again.
    pub fn resume_or_new(known: Option<Self>, state_epoch: Micros) -> Self {
        known.filter(|rebuild| rebuild.state_epoch == state_epoch).unwrap_or(Self { state_epoch, query: None })
    }

    /// Takes the next step: waits, or queries the ledger.
    pub async fn advance(&mut self, spec: &QuotaSpec, parts: &GateContext, cold: ColdQuery) -> RebuildStep {
        if !parts.limiter.may_rebuild(&spec.quota).await {
            return RebuildStep::Wait { until: (Instant::now() + CHECK_INTERVAL).min(cold.at_latest) };
        }
        let query = self.query.get_or_insert_with(|| {
            let (recent, quota, lookback) = (Arc::clone(&parts.recent), spec.quota.clone(), spec.lookback());
            Box::pin(async move { recent.recent_uses(&quota, lookback).await })
        });
        let Ok(answer) = timeout(CHECK_INTERVAL, query).await else {
            return RebuildStep::Querying { until: (Instant::now() + LEDGER_RETRY).min(cold.at_latest) };
        };
        self.query = None;
        match answer {
            Ok((ended, in_flight)) => {
                let data = RebuildData { state_epoch: self.state_epoch, ended, in_flight };
                RebuildStep::Loaded { data, at: Instant::now() }
            }
            Err(cause) => {
                let quota = &spec.quota;
                tracing::warn!(%quota, cause, "no permits: the ledger cannot be read to rebuild the limiter; retrying");
                RebuildStep::Wait { until: (Instant::now() + LEDGER_RETRY).min(cold.at_latest) }
            }
        }
    }
}
