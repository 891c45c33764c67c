//! A limiter without its past: when the ledger may be asked for it, and what it says.
//!
//! First the booking horizon and the send budget must pass: until then permits of the lost state may be in hands, and only
//! what has been begun is in the ledger. Nor may anybody else be granted permits by another holder any more. Refuses to
//! vouch for what the ledger cannot say.

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

/// Between two questions to a ledger that could not answer, and how long those are sent away who will not wait for one that
/// is looking.
const LEDGER_RETRY: Duration = Duration::from_secs(1);
/// Between two looks at whether others may still be granted permits elsewhere; and how long the gate waits at a time for
/// the ledger, which may have to go through a month.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

type RecentUsesResult = Result<(Vec<PastUse>, CostByKind), String>;

/// Until when nothing can be granted.
pub(super) enum RebuildStep {
    Wait {
        until: Instant,
    },
    /// The ledger has been waited for, and goes on: the gate comes back at once, whatever it tells those who wait.
    Querying {
        until: Instant,
    },
}

/// A cold state, and what the ledger told about its past.
pub(super) struct Rebuild {
    state_epoch: Micros,
    since: Instant,
    /// The question, as long as the ledger has not answered.
    query: Option<BoxFuture<'static, RecentUsesResult>>,
    pub data: Option<RebuildData>,
}

impl fmt::Debug for Rebuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cold").field("born", &self.state_epoch).field("rebuild", &self.data).finish_non_exhaustive()
    }
}

impl Rebuild {
    pub fn new(state_epoch: Micros) -> Self {
        Self { state_epoch, since: Instant::now(), query: None, data: None }
    }

    /// The same one as before, or a new one if the state was lost again.
    pub fn resume_or_new(known: Option<Self>, born: Micros) -> Self {
        known.filter(|cold| cold.state_epoch == born).unwrap_or_else(|| Self::new(born))
    }

    /// Asks the ledger when it is time.
    pub async fn advance(&mut self, spec: &QuotaSpec, parts: &GateContext, at_latest: Instant) -> RebuildStep {
        let in_hands_until = self.since + BOOKING_HORIZON + spec.send_budget;
        if Instant::now() < in_hands_until {
            return RebuildStep::Wait { until: in_hands_until.min(at_latest) };
        }
        if !parts.limiter.may_rebuild(&spec.quota).await {
            return RebuildStep::Wait { until: (Instant::now() + CHECK_INTERVAL).min(at_latest) };
        }
        let asked = self.query.get_or_insert_with(|| {
            let (recent, quota, lookback) = (Arc::clone(&parts.recent), spec.quota.clone(), spec.lookback());
            Box::pin(async move { recent.recent_uses(&quota, lookback).await })
        });
        let Ok(answer) = timeout(CHECK_INTERVAL, asked).await else {
            return RebuildStep::Querying { until: (Instant::now() + LEDGER_RETRY).min(at_latest) };
        };
        self.query = None;
        match answer {
            Ok((ended, open)) => {
                self.data = Some(RebuildData { state_epoch: self.state_epoch, ended, in_flight: open });
                RebuildStep::Wait { until: Instant::now() }
            }
            Err(cause) => {
                tracing::warn!(quota = %spec.quota, cause, "limiter is cold and the ledger cannot tell what was used");
                RebuildStep::Wait { until: (Instant::now() + LEDGER_RETRY).min(at_latest) }
            }
        }
    }
}
