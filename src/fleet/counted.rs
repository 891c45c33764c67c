//! What waits, is in hand and is on the wire of one provider, put together from the ledger, the queue and the workers.
//!
//! Refuses to count twice: a job whose message is in the queue stands in the ledger, too.

use std::time::Duration;

use super::Conserved;
use super::lately::lanes;
use super::overview::Evidence;
use crate::domain::clear_time::Missing;
use crate::domain::provider::Provider;

/// Time over which `sent_10s` counts.
const RATE_WINDOW_S: f64 = 10.0;

/// Everything of one provider that is counted by whoever asks.
pub(super) struct Counted<'a> {
    pub evidence: &'a Evidence,
    pub account: Option<&'a Conserved>,
    pub queued: Option<u64>,
    pub in_hand: u64,
    pub in_flight: u64,
    sent_10s: u64,
    pub lanes: u32,
}

impl<'a> Counted<'a> {
    pub fn of(evidence: &'a Evidence, name: &str) -> Self {
        let account = evidence.accounts.as_ref().and_then(|accounts| accounts.get(name));
        let live = || lanes(&evidence.workers, name).filter(|(worker, _)| worker.is_live()).map(|(_, lane)| lane);
        let told = live().next().is_some();
        Self {
            evidence,
            account,
            queued: evidence.depths.get(name).copied(),
            // Without a worker to ask, leases that still run tell.
            in_hand: if told { live().map(|lane| lane.in_hand).sum() } else { account.map_or(0, |it| it.in_hand) },
            in_flight: live().map(|lane| lane.in_flight).sum(),
            sent_10s: live().map(|lane| lane.sent_10s).sum(),
            lanes: u32::try_from(live().count()).unwrap_or(u32::MAX),
        }
    }

    /// What did not say how many jobs wait.
    pub fn missing(&self) -> Option<Missing> {
        let queue = self.queued.is_none() && self.evidence.away.iter().any(|away| away.starts_with("queue"));
        match self.evidence.accounts {
            None => Some(Missing::Ledger),
            Some(_) => queue.then_some(Missing::Queue),
        }
    }

    /// A due job's message is in the queue, and the queue may hold more that the ledger has not seen.
    pub fn waiting(&self) -> u64 {
        let (parked, due) = self.account.map_or((0, 0), |account| (account.parked, account.due));
        parked + due.max(self.queued.unwrap_or(0)) + self.in_hand.saturating_sub(self.in_flight)
    }

    /// Nothing but parked jobs waits.
    pub fn only_parked(&self) -> bool {
        self.account.is_some_and(|account| account.parked > 0 && account.parked == self.waiting())
    }

    #[allow(clippy::cast_precision_loss, reason = "counts of requests are far below 2^53")]
    pub fn rate_per_s(&self) -> f64 {
        self.sent_10s as f64 / RATE_WINDOW_S
    }

    /// How long a request is on its way, by Little's law: what is in flight over what is begun.
    #[allow(clippy::cast_precision_loss, reason = "counts of requests are far below 2^53")]
    pub fn hold(&self, provider: &Provider) -> Duration {
        if self.sent_10s == 0 {
            return Duration::ZERO;
        }
        let seconds = self.in_flight as f64 / self.rate_per_s();
        Duration::try_from_secs_f64(seconds).unwrap_or_default().min(provider.hold_max())
    }

    pub fn in_state(&self, state: &str) -> u64 {
        self.account.map_or(0, |account| account.in_state(state))
    }
}
