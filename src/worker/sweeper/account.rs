//! The account that must add up, looked at now and then and said loudly when it does not.
//!
//! Refuses to mend: what does not add up is a fault of the program or of somebody's SQL, and a person must see it.

use std::time::Duration;

use super::Trouble;
use crate::ledger::upkeep::{Account, Checked};
use crate::worker::Worker;
use crate::worker::settings_watch::Known;

/// How often, in the whole cluster.
const EVERY: Duration = Duration::from_secs(60);
/// Settled jobs are held against their events and attempts for so long after they settled: ten looks at each.
pub const CHECKED: Checked = Checked::Since(Duration::from_secs(10 * 60));
/// A job is astray when it has been due for so long without a lease: longer than the longest grace, so that at least one
/// copy has been published meanwhile, and an hour for that copy to be taken.
pub const ASTRAY_AFTER: Duration = Duration::from_secs(2 * 60 * 60);

pub async fn look(worker: &Worker, known: &Known) -> Result<(), Trouble> {
    let upkeep = &worker.engines.upkeep;
    if !upkeep.take_turn("account", EVERY).await? {
        return Ok(());
    }
    // An account is right without it, and only takes longer.
    if let Err(error) = upkeep.sum_up_settled().await {
        tracing::warn!(%error, "jobs that have settled are not summed up yet");
    }
    for account in upkeep.conservation(ASTRAY_AFTER, CHECKED).await? {
        for fault in account.faults() {
            tracing::error!(provider = account.provider, fault, "the ledger does not add up");
        }
        if let Some(why) = astray(&account, known) {
            tracing::error!(provider = account.provider, jobs = account.astray, why, "jobs are astray");
        }
    }
    Ok(())
}

/// Why jobs that nobody takes are worth an alarm; `None` when a person has stopped their lane.
fn astray(account: &Account, known: &Known) -> Option<&'static str> {
    if account.astray == 0 {
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

    fn account() -> Account {
        let states = [("waiting", 4), ("sending", 2), ("unknown", 1), ("succeeded", 9), ("review", 1)];
        Account {
            provider: "acme".to_owned(),
            recorded: 17,
            states: states.map(|(state, jobs)| (state.to_owned(), jobs)).to_vec(),
            in_hand: 3,
            parked: 2,
            due: 2,
            ..Account::default()
        }
    }

    #[test]
    fn each_way_not_to_add_up_is_told() {
        assert_eq!(account().faults(), Vec::<String>::new());
        type Alter = fn(&mut Account);
        let altered: [(Alter, &str); 4] = [
            (|account| account.due -= 1, "7 jobs open, 6"),
            (|account| account.parked += 1, "7 jobs open, 8"),
            (|account| account.without_event = 1, "1 settled job without an event"),
            (|account| account.without_cause = 2, "2 jobs succeeded without"),
        ];
        for (alter, words) in altered {
            let mut account = account();
            alter(&mut account);
            let faults = account.faults();
            assert!(faults.len() == 1 && faults[0].starts_with(words), "{words}: {faults:?}");
        }
    }

    #[test]
    fn jobs_of_a_provider_that_is_gone_are_astray() {
        let known = Known::default();
        assert_eq!(astray(&account(), &known), None);
        assert!(astray(&Account { astray: 1, ..account() }, &known).is_some());
    }
}
