//! The jobs of a provider, counted: the ledger's reconciliation, the backlog, jobs in flight, and requests per second.
//!
//! A waiting payment is counted once, from one snapshot of the ledger and of the lane's queue. The ledger counts
//! recorded jobs, and the queue counts the payments that no worker has recorded yet.
//!
//! A worker records a consumed message within half a second; until then it is in neither count. As no payment vanishes,
//! what was counted before is counted until then ([`PaymentCount`]). A source that did not answer never counts as zero:
//! the figure is then a lower bound. Rates come from the workers' reports.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use super::OverviewInput;
use super::workers::lane_reports;
use crate::domain::clear_time::MissingInput;
use crate::domain::limit::Rule;
use crate::domain::provider::Provider;
use crate::ledger::upkeep::ProviderReconciliation;

/// The reconciliations by their provider.
pub fn by_provider(
    accounts: impl IntoIterator<Item = ProviderReconciliation>,
) -> BTreeMap<String, ProviderReconciliation> {
    accounts.into_iter().map(|account| (account.provider.clone(), account)).collect()
}

/// Longest time that a payment is held by a worker alone; a snapshot may be two seconds younger.
const UNRECORDED_MAX: Duration = Duration::from_secs(4);

/// Count of one provider's payments over all snapshots until now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaymentCount {
    /// Payments that two snapshots have found, recorded or not.
    payments: u64,
    /// Payments by the last snapshot alone. A message that is requeued during the snapshot is counted twice.
    found: u64,
    pub unrecorded: u64,
    /// Time for which fewer were found than before.
    missing_for: Option<Duration>,
}

impl PaymentCount {
    /// The count after one more snapshot, taken this long after the one before.
    pub fn updated(before: Option<Self>, account: &ProviderReconciliation, ready: u64, since: Duration) -> Self {
        let unrecorded = ready;
        let found = account.recorded + unrecorded;
        let Some(before) = before else { return Self { payments: found, found, unrecorded, missing_for: None } };
        let short = before.payments.saturating_sub(found);
        let short_for = before.missing_for.map_or(Duration::ZERO, |short_for| short_for + since);
        if short > 0 && short_for < UNRECORDED_MAX {
            let unrecorded = unrecorded + short;
            return Self { payments: before.payments, found, unrecorded, missing_for: Some(short_for) };
        }
        let confirmed = if short > 0 { found } else { before.payments.max(found.min(before.found)) };
        Self { payments: confirmed, found, unrecorded, missing_for: None }
    }
}

/// Waiting payments of one provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Payments without a request in flight.
    pub waiting: u64,
    /// A source is missing: `waiting` counts what the others know.
    pub is_lower_bound: bool,
    /// Messages in the lane's queue. `None`: the queue did not answer.
    pub queued: Option<u64>,
    /// Payments of `queued` that no worker has recorded. `None`: ledger or queue did not answer.
    pub unrecorded: Option<u64>,
}

/// `ready`: messages in the lane's queue; `unrecorded`: from [`PaymentCount`], where it is known.
pub fn backlog(account: Option<&ProviderReconciliation>, ready: Option<u64>, unrecorded: Option<u64>) -> Backlog {
    let both = account.zip(ready);
    let unrecorded = both.map(|(_, ready)| unrecorded.unwrap_or(ready));
    let recorded = account.map_or(0, ProviderReconciliation::waiting);
    Backlog {
        waiting: recorded + if account.is_some() { unrecorded.unwrap_or(0) } else { ready.unwrap_or(0) },
        is_lower_bound: both.is_none(),
        queued: ready.map(|ready| unrecorded.unwrap_or(ready)),
        unrecorded,
    }
}

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
    /// Mean hold of each lane that reports one, with its requests of the last ten seconds.
    holds: Vec<(u64, u64)>,
    pub lanes: u32,
}

impl<'a> ProviderCounts<'a> {
    pub fn new(input: &'a OverviewInput, name: &str) -> Self {
        // A provider without a job has counts of zero.
        let of_provider = |accounts: &'a BTreeMap<String, ProviderReconciliation>| {
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
            holds: live().filter_map(|lane| Some((lane.mean_hold_us?, lane.sent_10s))).collect(),
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

    /// Jobs with a request in flight, by the ledger.
    pub fn in_flight(&self) -> u64 {
        self.reconciliation.as_ref().map_or(0, |account| account.in_flight)
    }

    /// Whether a rule of the row blocks accounts, and all waiting jobs are of such flows, or delayed.
    pub fn is_blocked(&self, provider: &Provider) -> bool {
        let blocks = provider.account_rules.iter().any(|rule| rule.rule == Rule::Blocked);
        let Some(account) = self.reconciliation.as_ref().filter(|_| blocks) else { return false };
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

    /// Requests begun within this time, at the rate of the last ten seconds.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "neither negative nor above the range of counts"
    )]
    pub fn sent_within(&self, time: Duration) -> u64 {
        (self.sent_per_s() * time.as_secs_f64()) as u64
    }

    /// Mean duration of a request, as the lanes report it, weighted by their rates.
    pub fn hold(&self, provider: &Provider) -> Duration {
        // A lane that sends nothing now counts as much as one request.
        let weights: u64 = self.holds.iter().map(|(_, sent)| sent.max(&1)).sum();
        let total_us: u128 = self.holds.iter().map(|(us, sent)| u128::from(*us) * u128::from(*sent.max(&1))).sum();
        match total_us.checked_div(u128::from(weights)) {
            Some(mean_us) => Duration::from_micros(u64::try_from(mean_us).unwrap_or(u64::MAX)).min(provider.hold_max()),
            None => self.hold_by_rate(provider),
        }
    }

    /// Mean duration of a request of workers that do not report it, by Little's law: requests in flight divided by the request rate. The mean of ten
    /// seconds is too long for a lane that has just started. So it is bounded by the duration at full use of a limit:
    /// of L slots that return after a window W and the hold h, L h / (W + h) are in flight.
    #[allow(clippy::cast_precision_loss, reason = "counts of requests are far below 2^53")]
    fn hold_by_rate(&self, provider: &Provider) -> Duration {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn account(delayed: u64, due: u64) -> ProviderReconciliation {
        ProviderReconciliation { recorded: delayed + due, delayed, due, ..ProviderReconciliation::default() }
    }

    fn leased(active: u64, account: ProviderReconciliation) -> ProviderReconciliation {
        ProviderReconciliation { active, recorded: account.recorded + active, ..account }
    }

    fn in_backlog(backlog: u64, account: ProviderReconciliation) -> ProviderReconciliation {
        ProviderReconciliation { backlog, recorded: account.recorded + backlog, ..account }
    }

    /// Twenty payments are recorded and thirty are not. Wherever they are, fifty wait.
    #[test]
    fn waiting_count_ignores_where_payments_wait() {
        let mut seen = None;
        for (what, ledger, ready, new) in [
            ("all recorded ones sleep", account(20, 0), 30, 30),
            ("twelve of them are due", account(8, 12), 30, 30),
            ("they have returned to the backlog", in_backlog(12, account(8, 0)), 30, 30),
            ("five are claimed", leased(5, in_backlog(7, account(8, 0))), 30, 30),
            ("two new ones are taken and not recorded yet", account(13, 7), 28, 30),
            ("they are recorded", in_backlog(2, account(13, 7)), 28, 28),
        ] {
            let now = PaymentCount::updated(seen, &ledger, ready, SECOND * 2);
            let found = backlog(Some(&ledger), Some(ready), Some(now.unrecorded));
            assert_eq!((found.waiting, found.is_lower_bound, found.unrecorded), (50, false, Some(new)), "{what}");
            assert_eq!(found.queued, Some(new), "{what}");
            seen = Some(now);
        }
        let sending = ProviderReconciliation { in_flight: 2, ..leased(5, account(0, 17)) };
        assert_eq!(backlog(Some(&sending), Some(28), None).waiting, 48, "two requests are in flight");
    }

    /// Two messages are consumed and requeued between the count of the ledger and that of the queue. They are counted
    /// twice for one snapshot, and not for longer.
    #[test]
    fn double_count_lasts_one_snapshot() {
        let ledger = account(20, 0);
        let mut seen = None;
        let counts: Vec<u64> = [30, 32, 30, 30, 35, 35, 30]
            .map(|ready| {
                let now = PaymentCount::updated(seen, &ledger, ready, SECOND * 2);
                seen = Some(now);
                now.unrecorded
            })
            .to_vec();
        // Five new ones arrive; of those, the missing ones are with a worker once.
        assert_eq!(counts, [30, 32, 30, 30, 35, 35, 35]);
    }

    #[test]
    fn unrecorded_count_follows_queue_changes() {
        let ledger = account(10, 0);
        let before = PaymentCount::updated(None, &ledger, 30, SECOND);
        assert_eq!(before.unrecorded, 30);
        for (ready, unrecorded) in [(35, 35), (33, 33), (27, 30)] {
            assert_eq!(
                PaymentCount::updated(Some(before), &ledger, ready, SECOND).unrecorded,
                unrecorded,
                "{ready} ready"
            );
        }
        // Messages that were no payments, or that an operator has purged: no worker records them.
        let mut seen = before;
        let followed: Vec<u64> = (0..4)
            .map(|_| {
                seen = PaymentCount::updated(Some(seen), &ledger, 20, SECOND * 2);
                seen.unrecorded
            })
            .collect();
        assert_eq!(followed, [30, 30, 20, 20]);
    }

    #[test]
    fn missing_source_gives_a_lower_bound() {
        let ledger = account(3, 4);
        for (account, ready, waiting, queued) in [
            (Some(&ledger), Some(7), 14, Some(7)),
            (Some(&ledger), None, 7, None),
            (None, Some(11), 11, Some(11)),
            (None, None, 0, None),
        ] {
            let found = backlog(account, ready, None);
            assert_eq!((found.waiting, found.queued), (waiting, queued));
            assert_eq!(found.is_lower_bound, account.is_none() || ready.is_none());
        }
    }

    /// During an update `status` reads the overview of a worker that does not know this field yet.
    #[test]
    fn older_workers_account_can_be_read() {
        let account = ProviderReconciliation { unreadable: 3, ..ProviderReconciliation::default() };
        let mut shown = serde_json::to_value(account).unwrap();
        assert!(shown.as_object_mut().unwrap().remove("unreadable").is_some());
        assert_eq!(serde_json::from_value::<ProviderReconciliation>(shown).unwrap(), ProviderReconciliation::default());
    }
}
