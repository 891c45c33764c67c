//! The reconciliation by provider, as the API and the overview show it: where every job is, and which are not accounted
//! for.
//!
//! The ledger counts ([`LedgerReconciliation`]); this module only converts.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ledger::upkeep::LedgerReconciliation;

/// The reconciliation of one provider; the fields are those of [`LedgerReconciliation`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct ProviderReconciliation {
    pub provider: String,
    pub recorded: u64,
    pub states: BTreeMap<String, u64>,
    pub active: u64,
    pub in_flight: u64,
    pub delayed: u64,
    #[serde(skip)]
    pub delayed_for_ms: Option<u64>,
    pub due: u64,
    /// Jobs that wait in the ledger alone, for a limit of their account or behind such jobs.
    #[serde(default)]
    pub backlog: u64,
    /// Jobs of the backlog whose account a rule blocks.
    #[serde(skip)]
    pub account_blocked: u64,
    #[serde(skip)]
    pub messages_least: u64,
    #[serde(skip)]
    pub messages_most: u64,
    pub overdue: u64,
    #[serde(skip)]
    pub past_deadline: u64,
    #[serde(skip)]
    pub oldest_open_ms: Option<u64>,
    pub without_event: u64,
    pub without_cause: u64,
    /// Jobs that are open, in `review` or `dead` with a field that cannot be read.
    #[serde(default)]
    pub unreadable: u64,
    /// Discrepancies as text; empty when all jobs are accounted for.
    pub faults: Vec<String>,
}

impl From<LedgerReconciliation> for ProviderReconciliation {
    fn from(account: LedgerReconciliation) -> Self {
        Self {
            faults: account.discrepancies(),
            provider: account.provider,
            recorded: account.recorded,
            states: account.states.into_iter().collect(),
            active: account.active,
            in_flight: account.in_flight,
            delayed: account.delayed,
            delayed_for_ms: account.delayed_for.map(ms),
            due: account.due,
            backlog: account.backlog,
            account_blocked: account.account_blocked,
            messages_least: account.messages_min,
            messages_most: account.messages_max,
            overdue: account.overdue,
            past_deadline: account.past_deadline,
            oldest_open_ms: account.oldest_open.map(ms),
            without_event: account.without_event,
            without_cause: account.without_accepted_attempt,
            unreadable: account.unreadable,
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The reconciliations by their provider.
pub fn by_provider(
    accounts: impl IntoIterator<Item = ProviderReconciliation>,
) -> BTreeMap<String, ProviderReconciliation> {
    accounts.into_iter().map(|account| (account.provider.clone(), account)).collect()
}

impl ProviderReconciliation {
    /// Jobs in one state.
    pub fn in_state(&self, state: &str) -> u64 {
        self.states.get(state).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// During an update `status` reads the overview of a worker that does not know this field yet.
    #[test]
    fn older_workers_account_can_be_read() {
        let account = ProviderReconciliation { unreadable: 3, ..ProviderReconciliation::default() };
        let mut shown = serde_json::to_value(account).unwrap();
        assert!(shown.as_object_mut().unwrap().remove("unreadable").is_some());
        assert_eq!(serde_json::from_value::<ProviderReconciliation>(shown).unwrap(), ProviderReconciliation::default());
    }
}
