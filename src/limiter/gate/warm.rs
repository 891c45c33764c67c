//! A limiter without its past: when the ledger may be asked for it, and what it says.
//!
//! First the booking horizon and the send budget must pass: until then permits of the lost state may be in hands, and only
//! what has been begun is in the ledger. Nor may anybody else be granted permits by another holder any more. Refuses to
//! vouch for what the ledger cannot say.

use std::time::Duration;

use tokio::time::Instant;

use super::GateParts;
use crate::domain::decision::Rebuild;
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// Between two questions to a ledger that could not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks at whether others may still be granted permits elsewhere.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A cold state, and what the ledger told about its past.
#[derive(Debug)]
pub(super) struct Cold {
    born: Micros,
    since: Instant,
    pub rebuild: Option<Rebuild>,
}

impl Cold {
    pub fn new(born: Micros) -> Self {
        Self { born, since: Instant::now(), rebuild: None }
    }

    /// The same one as before, or a new one if the state was lost again.
    pub fn known_or_new(known: Option<Self>, born: Micros) -> Self {
        known.filter(|cold| cold.born == born).unwrap_or_else(|| Self::new(born))
    }

    /// Asks the ledger when it is time; says when to ask the limiter again.
    pub async fn warm_up(&mut self, spec: &QuotaSpec, parts: &GateParts, at_latest: Instant) -> Instant {
        let in_hands_until = self.since + BOOKING_HORIZON + spec.send_budget;
        if Instant::now() < in_hands_until {
            return in_hands_until.min(at_latest);
        }
        if !parts.limiter.may_rebuild(&spec.quota).await {
            return (Instant::now() + LOOK_AGAIN).min(at_latest);
        }
        match parts.recent.recent_uses(&spec.quota, Duration::from_micros(spec.cold_us())).await {
            Ok((ended, open)) => {
                self.rebuild = Some(Rebuild { born: self.born, ended, open });
                Instant::now()
            }
            Err(cause) => {
                tracing::warn!(quota = %spec.quota, cause, "limiter is cold and the ledger cannot tell what was used");
                (Instant::now() + ASK_AGAIN).min(at_latest)
            }
        }
    }
}
