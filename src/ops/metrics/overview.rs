//! The metrics of the overview: the backlog, its age and clear time, the jobs of the ledger by state, and the limits.
//!
//! They equal `status` and the page: all use the same snapshot. An unknown value has no sample, never a zero. Every
//! worker reports the same values for all workers, so queries take the maximum; a sum would count twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::{Labels, MetricsWriter, float, seconds};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::LimitSpec;
use crate::fleet::{OverviewInput, ProviderOverview};
use crate::ledger::operator::STATES;
use crate::ledger::upkeep::ProviderReconciliation;
use crate::limiter::LimitStatus;
use crate::ops::overview::{OverviewSnapshot, unix_ms};
use crate::worker::quotas::{QuotaRows, quota_specs};
use crate::worker::settings_sync::LoadedSettings;

pub fn write(writer: &mut MetricsWriter<'_>, snapshot: &OverviewSnapshot) -> Result<(), fmt::Error> {
    let OverviewSnapshot { input, overview } = snapshot;
    let each = |of: fn(&OverviewInput, &ProviderOverview) -> Option<f64>| {
        let sample =
            move |provider: &ProviderOverview| Some((vec![("provider", provider.name.clone())], of(input, provider)?));
        overview.providers.iter().filter_map(sample).collect::<Vec<(Labels, f64)>>()
    };
    writer.gauge(
        "waiting_jobs",
        "Payments that wait, in the queue or recorded, of all workers; absent while ledger or queue is unavailable.",
        each(|_, provider| (!provider.waiting_is_at_least).then(|| float(provider.waiting))),
    )?;
    writer.gauge(
        "clear_seconds",
        "Estimated time until the backlog is processed, by the limits; where limits count each account separately, by \
         the rate of the last minutes, or else the least time; absent without an estimate.",
        each(|_, provider| provider.clears.ms().map(seconds)),
    )?;
    writer.gauge(
        "cutoff_seconds",
        "Time until the next cut-off of the provider; absent without one.",
        each(|_, provider| provider.cutoff.as_ref().map(|cutoff| seconds(cutoff.in_ms))),
    )?;
    writer.gauge(
        "cutoff_missed_payments",
        "Waiting payments that miss the next cut-off if everything stays as it is; absent without a cut-off or an \
         estimate.",
        each(|_, provider| Some(float(provider.cutoff.as_ref()?.forecast.missed()?))),
    )?;
    writer.gauge(
        "oldest_waiting_job_age_seconds",
        "Age of the payment that has waited longest; 0 if none waits. RabbitMQ does not report the age of its \
         messages, so they count from the time at which a worker takes them.",
        each(oldest_s),
    )?;
    writer.gauge(
        "queue_ready_messages",
        "Messages in the provider's queue that no worker has taken; absent while the broker does not report them.",
        each(|input, provider| input.depths.get(&provider.name).map(|ready| float(*ready))),
    )?;
    writer.gauge(
        "held_messages",
        "Messages of a newer format that wait in the ledger for a newer worker; absent while it is unavailable.",
        each(|input, provider| Some(float(input.held.as_ref()?.get(&provider.name).copied().unwrap_or(0)))),
    )?;
    ledger(writer, input, overview.providers.iter().map(|provider| provider.name.as_str()).collect())
}

fn oldest_s(input: &OverviewInput, provider: &ProviderOverview) -> Option<f64> {
    let since_ms = input.oldest_ms.as_ref()?.get(&provider.name);
    let age_ms = since_ms.map_or(0, |since_ms| (input.at_ms - since_ms).max(0));
    Some(seconds(u64::try_from(age_ms).unwrap_or(0)))
}

fn ledger(writer: &mut MetricsWriter<'_>, input: &OverviewInput, names: BTreeSet<&str>) -> Result<(), fmt::Error> {
    // A provider without a job has no samples: there may be hundreds of them.
    let of_lane = |account: &&ProviderReconciliation| names.contains(account.provider.as_str());
    let accounts: Vec<&ProviderReconciliation> =
        input.reconciliation.iter().flat_map(BTreeMap::values).filter(of_lane).collect();
    let each = |of: fn(&ProviderReconciliation) -> u64| {
        accounts.iter().map(move |account| (vec![("provider", account.provider.clone())], float(of(account))))
    };
    let states = accounts.iter().flat_map(|account| {
        STATES.map(|state| {
            let labels = vec![("provider", account.provider.clone()), ("state", state.to_owned())];
            (labels, float(account.in_state(state)))
        })
    });
    writer.gauge("ledger_jobs", "Jobs in the ledger, of all workers, by state.", states)?;
    writer.gauge(
        "reviews_waiting",
        "Jobs in manual review: an operator must decide.",
        each(|account| account.in_state("review")),
    )?;
    let age_s = |age: Option<Duration>| age.unwrap_or_default().as_secs_f64();
    writer.gauge(
        "oldest_unknown_job_age_seconds",
        "Time since the first request of the oldest open job of unknown outcome; 0 if there is none.",
        accounts.iter().map(|account| (vec![("provider", account.provider.clone())], age_s(account.oldest_unknown))),
    )?;
    let retentions = input.providers.iter().filter_map(|(name, row)| Some((name, row.idempotency_retention?)));
    writer.gauge(
        "key_retention_seconds",
        "How long the provider remembers idempotency keys, by its row; absent if it does not deduplicate.",
        retentions.map(|(name, retention)| (vec![("provider", name.to_string())], retention.as_secs_f64())),
    )?;
    writer.gauge(
        "jobs_past_deadline",
        "Open jobs whose expires_at has passed.",
        each(|account| account.past_deadline),
    )?;
    writer.gauge(
        "overdue_jobs",
        "Overdue jobs: due for two hours and not taken by any worker.",
        each(|account| account.overdue),
    )?;
    writer.gauge(
        "reconciliation_faults",
        "Faults in the reconciliation of the provider's jobs. Must stay at zero.",
        each(|account| u64::try_from(account.faults.len()).unwrap_or(u64::MAX)),
    )?;
    let counted = input.counted_at_ms.filter(|_| input.reconciliation.is_some());
    let age_ms = counted.map(|counted_ms| u64::try_from(unix_ms() - counted_ms).unwrap_or(0));
    writer.gauge(
        "ledger_counts_age_seconds",
        "Age of the ledger's counts in this scrape; absent while the jobs cannot be counted.",
        age_ms.map(|age_ms| (Labels::new(), seconds(age_ms))),
    )
}

/// One limit of a quota, for each provider of that quota.
struct LimitMetrics {
    provider: String,
    limit: LimitSpec,
    /// `None` if it counts accounts or references separately, or the store did not respond.
    used: Option<LimitStatus>,
}

fn limit_metrics(known: &LoadedSettings, used: &BTreeMap<ProviderName, Vec<LimitStatus>>) -> Vec<LimitMetrics> {
    let mut seen = Vec::new();
    for QuotaRows { quota, rows, spec } in quota_specs(known) {
        let Some(spec) = spec else { continue };
        let used = used.get(quota).map(Vec::as_slice).unwrap_or_default();
        for row in rows {
            // Numbers of account rules belong to no limit of the row.
            let limits = spec.limits.iter().filter(|limit| !limit.is_of_rules());
            seen.extend(limits.map(|limit| LimitMetrics {
                provider: row.name.to_string(),
                limit: limit.clone(),
                used: used.iter().find(|used| used.name == limit.name).cloned(),
            }));
        }
    }
    seen
}

/// Writes the capacity and the usage of each limit.
pub fn write_limits(
    writer: &mut MetricsWriter<'_>,
    known: &LoadedSettings,
    used: &BTreeMap<ProviderName, Vec<LimitStatus>>,
) -> Result<(), fmt::Error> {
    let limits = limit_metrics(known, used);
    // Without scope, kind of calls and shadow mode, the tightest limit could be one that applies to no charge.
    let each = |value: fn(&LimitSpec, Option<&LimitStatus>) -> Option<f64>| {
        let sample = move |LimitMetrics { provider, limit, used }: &LimitMetrics| {
            let labels = vec![
                ("provider", provider.clone()),
                ("limit", limit.name.clone()),
                ("scope", limit.scope.name().to_owned()),
                ("applies_to", limit.applies_to.name().to_owned()),
                ("shadow", limit.shadow.to_string()),
            ];
            Some((labels, value(limit, used.as_ref())?))
        };
        limits.iter().filter_map(sample).collect::<Vec<(Labels, f64)>>()
    };
    writer.gauge(
        "limit_requests",
        "Requests that the limit allows in its window or in flight, without the reserved share.",
        each(|limit, _| Some(f64::from(limit.max_requests))),
    )?;
    writer.gauge(
        "limit_window_seconds",
        "Length of the limit's window; absent for a limit of requests in flight.",
        each(|limit, _| (!limit.window.is_zero()).then_some(limit.window.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_capacity_requests",
        "Requests that may count against the limit at once: its maximum, or the size of its bucket.",
        each(|limit, _| Some(f64::from(limit.cost_max()))),
    )?;
    writer.gauge(
        "limit_in_use",
        "Requests of all workers that count against the limit now; absent for limits by account or reference, and \
         while the limiter's store is unavailable.",
        each(|_, used| Some(float(used?.used))),
    )?;
    writer.gauge(
        "limit_retry_after_seconds",
        "Time until the limit lets the next request start, 0 if one may start now; absent for limits by account or reference, \
         for a limit that allows nothing, and while the limiter's store is unavailable.",
        each(|_, used| Some(used?.retry_after?.as_secs_f64())),
    )?;
    writer.gauge(
        "limit_reset_after_seconds",
        "Time until all of the limit is free again if nothing more is sent; absent for limits by account or reference, \
         and while the limiter's store is unavailable.",
        each(|limit, used| Some(used.filter(|_| !limit.window.is_zero())?.reset_after.as_secs_f64())),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::peek::tests::test_settings;

    #[test]
    fn limits_are_known_without_their_usage() {
        let limits = limit_metrics(&test_settings(), &BTreeMap::new());
        let limits: Vec<_> =
            limits.iter().map(|seen| (seen.provider.as_str(), seen.limit.name.as_str(), seen.used.is_some())).collect();
        assert_eq!(limits, [("plain", "all", false), ("scoped", "all", false), ("scoped", "each", false)]);
    }
}
