//! The periodic reconciliation: checks that all jobs are accounted for, and logs an error if they are not.
//!
//! It repairs nothing. A discrepancy is a fault of the program or of manual SQL, and an operator must see it. See
//! `docs/decisions/0005-reconcile-all-jobs.md`.

use std::time::Duration;

use super::SweepError;
use crate::ledger::upkeep::{CheckScope, ProviderReconciliation};
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// Time between two checks, in the whole cluster.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which finished jobs are compared with their events and attempts: ten checks of each.
pub const CHECKED_JOBS: CheckScope = CheckScope::Since(Duration::from_secs(10 * 60));
/// A job is overdue when it has been due for this long without a lease. That is longer than the longest grace, so at
/// least one copy has been published, and it had an hour to be consumed.
pub const OVERDUE_ALARM_AFTER: Duration = Duration::from_secs(2 * 60 * 60);

pub async fn check(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let ledger = &worker.backends.ledger;
    if !ledger.lease_duty("account", CHECK_INTERVAL).await? {
        return Ok(());
    }
    // The reconciliation is right without it, and only takes longer.
    if let Err(error) = ledger.update_finished_totals().await {
        tracing::warn!(%error, "failed to update the totals of finished jobs; reconciliation continues without them");
    }
    for account in ledger.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await? {
        for fault in &account.faults {
            tracing::error!(provider = account.provider, fault, "jobs are not accounted for");
        }
        if let Some(why) = overdue_alarm(&account, known) {
            tracing::error!(provider = account.provider, jobs = account.overdue, why, "jobs are overdue");
        }
    }
    Ok(())
}

/// Why overdue jobs need an alarm; `None` when an operator has stopped their lane.
fn overdue_alarm(account: &ProviderReconciliation, known: &LoadedSettings) -> Option<&'static str> {
    if account.overdue == 0 {
        return None;
    }
    let row = known.providers.get(account.provider.as_str());
    match row {
        None => Some("their provider has no valid row: no worker takes them"),
        Some(row) if row.enabled && !row.paused => Some("due for two hours, and no worker takes them"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> ProviderReconciliation {
        let states = [("waiting", 4), ("sending", 2), ("unknown", 1), ("succeeded", 9), ("review", 1)];
        ProviderReconciliation {
            provider: "acme".to_owned(),
            recorded: 17,
            states: states.map(|(state, jobs)| (state.to_owned(), jobs)).into(),
            active: 3,
            delayed: 2,
            due: 2,
            ..ProviderReconciliation::default()
        }
    }

    #[test]
    fn each_reconciliation_fault_is_reported() {
        assert_eq!(account().discrepancies(), Vec::<String>::new());
        type Alter = fn(&mut ProviderReconciliation);
        let altered: [(Alter, &str); 4] = [
            (|account| account.due -= 1, "7 jobs open, 6"),
            (|account| account.delayed += 1, "7 jobs open, 8"),
            (|account| account.without_event = 1, "1 finished job without an event"),
            (|account| account.without_accepted_attempt = 2, "2 jobs succeeded without"),
        ];
        for (alter, words) in altered {
            let mut account = account();
            alter(&mut account);
            let faults = account.discrepancies();
            assert!(faults.len() == 1 && faults[0].starts_with(words), "{words}: {faults:?}");
        }
    }

    #[test]
    fn overdue_jobs_of_a_removed_provider_alarm() {
        let known = LoadedSettings::default();
        assert_eq!(overdue_alarm(&account(), &known), None);
        assert!(overdue_alarm(&ProviderReconciliation { overdue: 1, ..account() }, &known).is_some());
    }
}
