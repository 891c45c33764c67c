//! The account that must add up, looked at now and then and said loudly when it does not.
//!
//! Refuses to mend: what does not add up is a fault of the program or of somebody's SQL, and a person must see it.

use std::time::Duration;

use super::SweepError;
use crate::ledger::upkeep::{CheckScope, LedgerReconciliation};
use crate::worker::WorkerContext;
use crate::worker::settings_sync::LoadedSettings;

/// How often, in the whole cluster.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Settled jobs are held against their events and attempts for so long after they settled: ten looks at each.
pub const CHECKED_JOBS: CheckScope = CheckScope::Since(Duration::from_secs(10 * 60));
/// A job is astray when it has been due for so long without a lease: longer than the longest grace, so that at least one
/// copy has been published meanwhile, and an hour for that copy to be taken.
pub const OVERDUE_ALARM_AFTER: Duration = Duration::from_secs(2 * 60 * 60);

pub async fn check(worker: &WorkerContext, known: &LoadedSettings) -> Result<(), SweepError> {
    let upkeep = &worker.backends.upkeep;
    if !upkeep.lease_duty("account", CHECK_INTERVAL).await? {
        return Ok(());
    }
    // An account is right without it, and only takes longer.
    if let Err(error) = upkeep.update_finished_totals().await {
        tracing::warn!(%error, "jobs that have settled are not summed up yet");
    }
    for account in upkeep.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await? {
        for fault in account.discrepancies() {
            tracing::error!(provider = account.provider, fault, "the ledger does not add up");
        }
        if let Some(why) = overdue_alarm(&account, known) {
            tracing::error!(provider = account.provider, jobs = account.overdue, why, "jobs are astray");
        }
    }
    Ok(())
}

/// Why jobs that nobody takes are worth an alarm; `None` when a person has stopped their lane.
fn overdue_alarm(account: &LedgerReconciliation, known: &LoadedSettings) -> Option<&'static str> {
    if account.overdue == 0 {
        return None;
    }
    let row = known.providers.get(account.provider.as_str());
    match row {
        None => Some("their provider has no row that can be used: nobody will ever take them"),
        Some(row) if row.enabled && !row.paused => Some("due for two hours, and no worker takes them"),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> LedgerReconciliation {
        let states = [("waiting", 4), ("sending", 2), ("unknown", 1), ("succeeded", 9), ("review", 1)];
        LedgerReconciliation {
            provider: "acme".to_owned(),
            recorded: 17,
            states: states.map(|(state, jobs)| (state.to_owned(), jobs)).to_vec(),
            active: 3,
            delayed: 2,
            due: 2,
            ..LedgerReconciliation::default()
        }
    }

    #[test]
    fn each_reconciliation_fault_is_reported() {
        assert_eq!(account().discrepancies(), Vec::<String>::new());
        type Alter = fn(&mut LedgerReconciliation);
        let altered: [(Alter, &str); 4] = [
            (|account| account.due -= 1, "7 jobs open, 6"),
            (|account| account.delayed += 1, "7 jobs open, 8"),
            (|account| account.without_event = 1, "1 settled job without an event"),
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
        assert!(overdue_alarm(&LedgerReconciliation { overdue: 1, ..account() }, &known).is_some());
    }
}
