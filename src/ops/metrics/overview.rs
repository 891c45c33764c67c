//! The metrics of the overview: the backlog, its age and clear time, and the jobs of the ledger by state.
//!
//! They equal `status` and the page: all use the same snapshot. An unknown value has no sample, never a zero. Every
//! worker reports the same values for all workers, so queries take the maximum; a sum would count twice.

use std::collections::BTreeSet;
use std::fmt;

use super::write::{Labels, MetricsWriter, float, seconds};
use crate::fleet::clears::ClearTimeOverview;
use crate::fleet::{OverviewInput, ProviderOverview, ProviderReconciliation};
use crate::ledger::operator::STATES;
use crate::ops::overview::{OverviewSnapshot, unix_ms};

pub(super) fn write(writer: &mut MetricsWriter<'_>, snapshot: &OverviewSnapshot) -> Result<(), fmt::Error> {
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
        "clear_time_seconds",
        "Estimated time until the backlog is processed, by the limits; the least time where limits count each \
         account separately; absent without an estimate.",
        each(|_, provider| clears_s(&provider.clears)),
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
    ledger(writer, input, overview.providers.iter().map(|provider| provider.name.as_str()).collect())
}

fn clears_s(clears: &ClearTimeOverview) -> Option<f64> {
    match clears {
        ClearTimeOverview::ClearsIn { ms } | ClearTimeOverview::DependsOnAccounts { at_least_ms: ms, .. } => {
            Some(seconds(*ms))
        }
        ClearTimeOverview::Never { .. }
        | ClearTimeOverview::NotWhilePaused
        | ClearTimeOverview::NotWhileDisabled
        | ClearTimeOverview::NotWhileBreakerOpen
        | ClearTimeOverview::Unknown { .. } => None,
    }
}

fn oldest_s(input: &OverviewInput, provider: &ProviderOverview) -> Option<f64> {
    let since_ms = input.oldest_ms.as_ref()?.get(&provider.name);
    let age_ms = since_ms.map_or(0, |since_ms| (input.at_ms - since_ms).max(0));
    Some(seconds(u64::try_from(age_ms).unwrap_or(0)))
}

fn ledger(writer: &mut MetricsWriter<'_>, input: &OverviewInput, names: BTreeSet<&str>) -> Result<(), fmt::Error> {
    // Providers without a job yet have zeros.
    let of = |name: &&str| ProviderReconciliation { provider: (*name).to_owned(), ..ProviderReconciliation::default() };
    let accounts: Vec<ProviderReconciliation> = input.reconciliation.as_ref().map_or_else(Vec::new, |accounts| {
        names.iter().map(|name| accounts.get(*name).cloned().unwrap_or_else(|| of(name))).collect()
    });
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
