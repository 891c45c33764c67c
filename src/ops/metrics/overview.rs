//! The figures of the overview: what waits and for how long, and where the jobs of the ledger are.
//!
//! They are those of `status` and of the page, made from the same snapshot. What could not be asked has no sample: never a
//! zero. Every worker tells the same of all workers, so the largest counts and a sum would count twice.

use std::collections::BTreeSet;
use std::fmt;

use super::write::{Labels, MetricsWriter, float, seconds};
use crate::fleet::clears::ClearTimeOverview;
use crate::fleet::{OverviewInput, ProviderOverview, ProviderReconciliation};
use crate::ops::overview::{OverviewSnapshot, unix_ms};

/// All states of the ledger.
const STATES: [&str; 9] =
    ["waiting", "sending", "unknown", "succeeded", "declined", "dead", "expired", "review", "cancelled"];

pub(super) fn write(writer: &mut MetricsWriter<'_>, picture: &OverviewSnapshot) -> Result<(), fmt::Error> {
    let OverviewSnapshot { input: evidence, overview } = picture;
    let each = |of: fn(&OverviewInput, &ProviderOverview) -> Option<f64>| {
        let sample = move |provider: &ProviderOverview| {
            Some((vec![("provider", provider.name.clone())], of(evidence, provider)?))
        };
        overview.providers.iter().filter_map(sample).collect::<Vec<(Labels, f64)>>()
    };
    writer.gauge(
        "waiting_jobs",
        "Payments that wait, in the queue or recorded, of all workers; absent while ledger or queue does not answer.",
        each(|_, provider| (!provider.waiting_is_at_least).then(|| float(provider.waiting))),
    )?;
    writer.gauge(
        "estimated_drain_seconds",
        "Until what waits is cleared, by what the limits allow; at least so long where limits count each account on its own; \
         absent while there is no such time.",
        each(|_, provider| clears_s(&provider.clears)),
    )?;
    writer.gauge(
        "oldest_waiting_job_age_seconds",
        "How long the payment that has waited longest has done so; 0 if none waits. RabbitMQ does not tell the age of its \
         messages, so those count from when a worker takes them.",
        each(oldest_s),
    )?;
    writer.gauge(
        "queue_ready_messages",
        "Messages in the provider's queue that no worker has taken; absent while the broker does not say.",
        each(|evidence, provider| evidence.depths.get(&provider.name).map(|ready| float(*ready))),
    )?;
    ledger(writer, evidence, overview.providers.iter().map(|provider| provider.name.as_str()).collect())
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

fn oldest_s(evidence: &OverviewInput, provider: &ProviderOverview) -> Option<f64> {
    let since_ms = evidence.oldest_ms.as_ref()?.get(&provider.name);
    let age_ms = since_ms.map_or(0, |since_ms| (evidence.at_ms - since_ms).max(0));
    Some(seconds(u64::try_from(age_ms).unwrap_or(0)))
}

fn ledger(writer: &mut MetricsWriter<'_>, evidence: &OverviewInput, names: BTreeSet<&str>) -> Result<(), fmt::Error> {
    // Providers without a job yet have an account of zeros.
    let of = |name: &&str| ProviderReconciliation { provider: (*name).to_owned(), ..ProviderReconciliation::default() };
    let accounts: Vec<ProviderReconciliation> = evidence.reconciliation.as_ref().map_or_else(Vec::new, |accounts| {
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
        "Jobs whose outcome a person must decide.",
        each(|account| account.in_state("review")),
    )?;
    writer.gauge(
        "jobs_past_deadline",
        "Open jobs whose expires_at has passed.",
        each(|account| account.past_deadline),
    )?;
    writer.gauge(
        "jobs_astray",
        "Jobs that have been due for two hours and that no worker takes.",
        each(|account| account.astray),
    )?;
    writer.gauge(
        "conservation_faults",
        "Ways in which the account of the provider's jobs does not add up. Must stay at zero.",
        each(|account| u64::try_from(account.faults.len()).unwrap_or(u64::MAX)),
    )?;
    let counted = evidence.counted_at_ms.filter(|_| evidence.reconciliation.is_some());
    let age_ms = counted.map(|counted_ms| u64::try_from(unix_ms() - counted_ms).unwrap_or(0));
    writer.gauge(
        "ledger_account_age_seconds",
        "How old the figures of the ledger in this scrape are; absent while it cannot be counted.",
        age_ms.map(|age_ms| (Labels::new(), seconds(age_ms))),
    )
}
