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

use super::GateParts;
use crate::domain::decision::{ByKind, PastUse, Rebuild};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// Between two questions to a ledger that could not answer, and how long those are sent away who will not wait for one that
/// is looking.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks at whether others may still be granted permits elsewhere; and how long the gate waits at a time for
/// the ledger, which may have to go through a month.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

type Answer = Result<(Vec<PastUse>, ByKind), String>;

/// Until when nothing can be granted.
pub(super) enum Warming {
    Waits {
        until: Instant,
    },
    /// The ledger has been waited for, and goes on: the gate comes back at once, whatever it tells those who wait.
    Looks {
        until: Instant,
    },
}

/// A cold state, and what the ledger told about its past.
pub(super) struct Cold {
    born: Micros,
    since: Instant,
    /// The question, as long as the ledger has not answered.
    asked: Option<BoxFuture<'static, Answer>>,
    pub rebuild: Option<Rebuild>,
}

impl fmt::Debug for Cold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cold").field("born", &self.born).field("rebuild", &self.rebuild).finish_non_exhaustive()
    }
}

impl Cold {
    pub fn new(born: Micros) -> Self {
        Self { born, since: Instant::now(), asked: None, rebuild: None }
    }

    /// The same one as before, or a new one if the state was lost again.
    pub fn known_or_new(known: Option<Self>, born: Micros) -> Self {
        known.filter(|cold| cold.born == born).unwrap_or_else(|| Self::new(born))
    }

    /// Asks the ledger when it is time.
    pub async fn warm_up(&mut self, spec: &QuotaSpec, parts: &GateParts, at_latest: Instant) -> Warming {
        let in_hands_until = self.since + BOOKING_HORIZON + spec.send_budget;
        if Instant::now() < in_hands_until {
            return Warming::Waits { until: in_hands_until.min(at_latest) };
        }
        if !parts.limiter.may_rebuild(&spec.quota).await {
            return Warming::Waits { until: (Instant::now() + LOOK_AGAIN).min(at_latest) };
        }
        let asked = self.asked.get_or_insert_with(|| {
            let (recent, quota, lookback) = (Arc::clone(&parts.recent), spec.quota.clone(), spec.lookback());
            Box::pin(async move { recent.recent_uses(&quota, lookback).await })
        });
        let Ok(answer) = timeout(LOOK_AGAIN, asked).await else {
            return Warming::Looks { until: (Instant::now() + ASK_AGAIN).min(at_latest) };
        };
        self.asked = None;
        match answer {
            Ok((ended, open)) => {
                self.rebuild = Some(Rebuild { born: self.born, ended, open });
                Warming::Waits { until: Instant::now() }
            }
            Err(cause) => {
                tracing::warn!(quota = %spec.quota, cause, "limiter is cold and the ledger cannot tell what was used");
                Warming::Waits { until: (Instant::now() + ASK_AGAIN).min(at_latest) }
            }
        }
    }
}
