//! Where the jobs of the ledger are, as its account says.
//!
//! Refuses to count on every scrape: the account reads all open jobs, so it is taken at most every 15 seconds, less often
//! where it takes long, and a scrape does not wait for one that is slow: the next finds it done.

use std::collections::BTreeSet;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::write::{Writer, float};
use crate::ledger::LedgerError;
use crate::ledger::upkeep::{Account, Upkeep};
use crate::worker::settings_watch::Known;
use crate::worker::sweeper::{ASTRAY_AFTER, CHECKED};

/// Shortest time between two accounts.
const FRESH: Duration = Duration::from_secs(15);
/// An account takes at most this part of the database's time.
const SHARE: u32 = 10;
/// A scrape waits so long for an account that is being taken.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Figures older than this are not shown.
const SHOWN_MAX: Duration = Duration::from_secs(300);
/// All states of the ledger.
const STATES: [&str; 9] =
    ["waiting", "sending", "unknown", "succeeded", "declined", "dead", "expired", "review", "cancelled"];

type Taking = Pin<Box<dyn Future<Output = Result<Vec<Account>, LedgerError>> + Send>>;

pub(super) struct Ledger {
    upkeep: Arc<dyn Upkeep>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// With the time at which it began.
    taking: Option<(Instant, Taking)>,
    last: Option<Arc<LedgerSeen>>,
    not_before: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct LedgerSeen {
    at: Instant,
    accounts: Vec<Account>,
}

impl Ledger {
    pub fn new(upkeep: Arc<dyn Upkeep>) -> Self {
        Self { upkeep, state: Mutex::default() }
    }

    /// The last account, or a new one if it is time and it does not take long.
    pub async fn look(&self) -> Option<Arc<LedgerSeen>> {
        let mut state = self.state.lock().await;
        let due = state.not_before.is_none_or(|not_before| not_before <= Instant::now());
        if state.taking.is_none() && due {
            let upkeep = Arc::clone(&self.upkeep);
            let taking = Box::pin(async move { upkeep.conservation(ASTRAY_AFTER, CHECKED).await });
            state.taking = Some((Instant::now(), taking));
        }
        if let Some((began, taking)) = &mut state.taking
            && let Ok(taken) = timeout(WAIT_MAX, taking).await
        {
            let (began, now) = (*began, Instant::now());
            state.taking = None;
            state.not_before = Some(now + FRESH.max((now - began) * SHARE));
            match taken {
                Ok(accounts) => state.last = Some(Arc::new(LedgerSeen { at: began, accounts })),
                Err(error) => tracing::warn!(%error, "no account of the ledger for metrics"),
            }
        }
        state.last.clone().filter(|seen| seen.at.elapsed() < SHOWN_MAX)
    }
}

pub(super) fn write(writer: &mut Writer<'_>, known: &Known, seen: &LedgerSeen) -> Result<(), fmt::Error> {
    // Providers without a job yet have an account of zeros.
    let counted: BTreeSet<&str> = seen.accounts.iter().map(|account| account.provider.as_str()).collect();
    let without = known.providers.keys().filter(|name| !counted.contains(name.as_str()));
    let zeros: Vec<Account> =
        without.map(|name| Account { provider: name.to_string(), ..Account::default() }).collect();
    let accounts: Vec<&Account> = seen.accounts.iter().chain(&zeros).collect();
    let each = |of: fn(&Account) -> f64| {
        accounts.iter().map(move |account| (vec![("provider", account.provider.clone())], of(account)))
    };
    let states = accounts.iter().flat_map(|account| {
        STATES.map(|state| {
            let labels = vec![("provider", account.provider.clone()), ("state", state.to_owned())];
            (labels, float(jobs(account, state)))
        })
    });
    writer.gauge("ledger_jobs", "Jobs in the ledger, of all workers, by state.", states)?;
    writer.gauge(
        "oldest_waiting_job_age_seconds",
        "How long the open job that has waited longest has done so, since it was recorded or might begin; 0 if none.",
        each(|account| account.oldest_open.unwrap_or_default().as_secs_f64()),
    )?;
    writer.gauge(
        "reviews_waiting",
        "Jobs whose outcome a person must decide.",
        each(|account| float(jobs(account, "review"))),
    )?;
    writer.gauge(
        "jobs_past_deadline",
        "Open jobs whose expires_at has passed.",
        each(|account| float(account.past_deadline)),
    )?;
    writer.gauge(
        "jobs_astray",
        "Jobs that have been due for two hours and that no worker takes.",
        each(|account| float(account.astray)),
    )?;
    writer.gauge(
        "conservation_faults",
        "Ways in which the account of the provider's jobs does not add up. Must stay at zero.",
        each(|account| float(u64::try_from(account.faults().len()).unwrap_or(u64::MAX))),
    )?;
    writer.gauge(
        "ledger_account_age_seconds",
        "How old the figures of the ledger in this scrape are.",
        [(Vec::new(), seen.at.elapsed().as_secs_f64())],
    )
}

fn jobs(account: &Account, state: &str) -> u64 {
    account.states.iter().find(|(name, _)| name == state).map_or(0, |(_, jobs)| *jobs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::database::Database;

    #[tokio::test]
    async fn an_account_is_shown_again_for_a_while() {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let ledger = Ledger::new(database.upkeep());
        let (first, second) = (ledger.look().await.unwrap(), ledger.look().await.unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        // Gone for good: what was known stays for a while, and the scrape goes on.
        database.close().await;
        ledger.state.lock().await.not_before = None;
        assert!(Arc::ptr_eq(&first, &ledger.look().await.unwrap()));
    }
}
