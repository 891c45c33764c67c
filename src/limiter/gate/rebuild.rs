//! The query of the ledger that rebuilds a limiter state which was lost.
//!
//! It runs once no permit of the lost state can start any more ([`super::core`]). Another limiter leader must not grant
//! any more either. See `docs/decisions/0011-cold-start-and-rebuild.md`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::GateContext;
use super::core::{ColdQuery, RebuildStep};
use crate::domain::permit_protocol::{CostByKind, PastUse, RebuildData};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// Wait between two queries of a ledger that failed, and the retry delay of refused jobs while a query runs.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Time between two checks whether another leader may still grant, and how long the gate waits at a time for the
/// ledger, which may have to read a month.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

type RecentUsesResult = Result<(Vec<PastUse>, CostByKind), String>;

/// The ledger's query for one cold state.
pub(super) struct Rebuild {
    state_epoch: Micros,
    /// The running query.
    query: Option<BoxFuture<'static, RecentUsesResult>>,
}

impl fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rebuild").field("state_epoch", &self.state_epoch).finish_non_exhaustive()
    }
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
