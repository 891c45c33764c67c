//! The rebuild of a limiter state that was lost, from the ledger.
//!
//! First the booking horizon and the send budget must pass. Until then permits of the lost state may still start, and
//! the ledger contains only requests that have begun. Another limiter leader must not grant any more either. While the
//! ledger does not answer, the state stays cold. See `docs/decisions/0011-cold-start-and-rebuild.md`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::GateContext;
use crate::domain::permit_protocol::{CostByKind, PastUse, RebuildData};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// Wait between two queries of a ledger that failed, and the retry delay of refused jobs while a query runs.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Time between two checks whether another leader may still grant, and how long the gate waits at a time for the
/// ledger, which may have to read a month.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

type RecentUsesResult = Result<(Vec<PastUse>, CostByKind), String>;

/// The next step, and until when nothing can be granted.
pub(super) enum RebuildStep {
    Wait {
        until: Instant,
    },
    /// The ledger's query is still running: the gate polls it again at once, and refuses jobs until then.
    Querying {
        until: Instant,
    },
}

/// A cold state, and the ledger's data about its past.
pub(super) struct Rebuild {
    state_epoch: Micros,
    since: Instant,
    /// The running query.
    query: Option<BoxFuture<'static, RecentUsesResult>>,
    pub data: Option<RebuildData>,
}

impl fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rebuild")
            .field("state_epoch", &self.state_epoch)
            .field("data", &self.data)
            .finish_non_exhaustive()
    }
}

impl Rebuild {
    pub fn new(state_epoch: Micros) -> Self {
        Self { state_epoch, since: Instant::now(), query: None, data: None }
    }

    /// The rebuild that is in progress, or a new one if the state was lost again.
    pub fn resume_or_new(known: Option<Self>, born: Micros) -> Self {
        known.filter(|rebuild| rebuild.state_epoch == born).unwrap_or_else(|| Self::new(born))
    }

    /// Takes the next step: waits, or queries the ledger.
    pub async fn advance(&mut self, spec: &QuotaSpec, parts: &GateContext, at_latest: Instant) -> RebuildStep {
        let last_start = self.since + BOOKING_HORIZON + spec.send_budget;
        if Instant::now() < last_start {
            return RebuildStep::Wait { until: last_start.min(at_latest) };
        }
        if !parts.limiter.may_rebuild(&spec.quota).await {
            return RebuildStep::Wait { until: (Instant::now() + CHECK_INTERVAL).min(at_latest) };
        }
        let query = self.query.get_or_insert_with(|| {
            let (recent, quota, lookback) = (Arc::clone(&parts.recent), spec.quota.clone(), spec.lookback());
            Box::pin(async move { recent.recent_uses(&quota, lookback).await })
        });
        let Ok(answer) = timeout(CHECK_INTERVAL, query).await else {
            return RebuildStep::Querying { until: (Instant::now() + LEDGER_RETRY).min(at_latest) };
        };
        self.query = None;
        match answer {
            Ok((ended, in_flight)) => {
                self.data = Some(RebuildData { state_epoch: self.state_epoch, ended, in_flight });
                RebuildStep::Wait { until: Instant::now() }
            }
            Err(cause) => {
                let quota = &spec.quota;
                tracing::warn!(%quota, cause, "no permits: the ledger cannot be read to rebuild the limiter; retrying");
                RebuildStep::Wait { until: (Instant::now() + LEDGER_RETRY).min(at_latest) }
            }
        }
    }
}
