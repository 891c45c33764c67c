//! Counts and rates of one provider: waiting, active and in-flight jobs, and requests per second.
//!
//! Jobs are counted by one snapshot of ledger and queue ([`super::backlog`]), rates by the workers' reports.

use std::borrow::Cow;
use std::time::Duration;

use super::ProviderReconciliation;
use super::backlog::{Backlog, backlog};
use super::overview::OverviewInput;
use super::workers::lane_reports;
use crate::domain::clear_time::MissingInput;
use crate::domain::provider::Provider;

/// Time over which `sent_10s` counts.
pub(super) const RATE_WINDOW: Duration = Duration::from_secs(10);

/// All counts of one provider.
pub(super) struct ProviderCounts<'a> {
    pub input: &'a OverviewInput,
    /// `None`: the ledger could not be counted.
    pub reconciliation: Option<Cow<'a, ProviderReconciliation>>,
    pub backlog: Backlog,
    /// Requests in flight by the workers' reports, which are up to two seconds old.
    reported_in_flight: u64,
    sent_10s: u64,
    pub lanes: u32,
}

impl<'a> ProviderCounts<'a> {
    pub fn new(input: &'a OverviewInput, name: &str) -> Self {
        // A provider without a job has counts of zero.
        let of_provider = |accounts: &'a super::overview::ReconciliationByProvider| {
            accounts.get(name).map_or_else(|| Cow::Owned(ProviderReconciliation::default()), Cow::Borrowed)
        };
        let reconciliation = input.reconciliation.as_ref().map(of_provider);
        let live = || lane_reports(&input.workers, name).filter(|(worker, _)| worker.is_live()).map(|(_, lane)| lane);
        let unrecorded = input.unrecorded.get(name).copied();
        Self {
            input,
            backlog: backlog(reconciliation.as_deref(), input.depths.get(name).copied(), unrecorded),
            reconciliation,
            reported_in_flight: live().map(|lane| lane.in_flight).sum(),
            sent_10s: live().map(|lane| lane.sent_10s).sum(),
            lanes: u32::try_from(live().count()).unwrap_or(u32::MAX),
        }
    }

    /// The source that is missing for the number of waiting jobs.
    pub fn missing(&self) -> Option<MissingInput> {
        match (&self.reconciliation, self.backlog.queued) {
            (None, _) => Some(MissingInput::Ledger),
            (Some(_), None) => Some(MissingInput::Queue),
            (Some(_), Some(_)) => None,
        }
    }

    pub fn waiting(&self) -> u64 {
        self.backlog.waiting
    }

    /// Whether all waiting jobs are delayed, or their accounts are blocked by rules.
    pub fn only_delayed_or_blocked(&self) -> bool {
        let Some(account) = &self.reconciliation else { return false };
        let jobs = account.delayed + account.account_blocked;
        jobs > 0 && jobs == self.waiting()
    }

    /// `None`: the reports could not be read.
    pub fn rate_per_s(&self) -> Option<f64> {
        self.input.database_problem.is_none().then(|| self.sent_per_s())
    }

    #[allow(clippy::cast_precision_loss, reason = "counts of requests are far below 2^53")]
    fn sent_per_s(&self) -> f64 {
        self.sent_10s as f64 / RATE_WINDOW.as_secs_f64()
    }

    /// Requests begun in so long, at the rate of the last ten seconds.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "neither negative nor above the range of counts"
    )]
    pub fn sent_within(&self, time: Duration) -> u64 {
        (self.sent_per_s() * time.as_secs_f64()) as u64
    }

    /// Mean duration of a request, by Little's law: requests in flight divided by the request rate. The mean of ten
    /// seconds is too long for a lane that has just started. So it is bounded by the duration at full use of a limit:
    /// of L slots that return after a window W and the hold h, L h / (W + h) are in flight.
    #[allow(clippy::cast_precision_loss, reason = "counts of requests are far below 2^53")]
    pub fn hold(&self, provider: &Provider) -> Duration {
        if self.sent_10s == 0 {
            return Duration::ZERO;
        }
        let in_flight = self.reported_in_flight as f64;
        let windows =
            provider.limits.iter().filter(|limit| limit.applies_to_every_charge() && !limit.rate.is_at_once());
        let at_full_use = windows.filter_map(|limit| {
            let slots = f64::from(limit.rate.max_requests());
            (slots > in_flight).then(|| limit.rate.window().as_secs_f64() * in_flight / (slots - in_flight))
        });
        let seconds = at_full_use.fold(in_flight / self.sent_per_s(), f64::min);
        Duration::try_from_secs_f64(seconds).unwrap_or_default().min(provider.hold_max())
    }

    /// `None`: the ledger could not be counted.
    pub fn in_state(&self, state: &str) -> Option<u64> {
        self.reconciliation.as_ref().map(|account| account.in_state(state))
    }
}
