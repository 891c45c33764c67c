//! The account of all jobs, in one statement, so that everything in it is of one instant.
//!
//! Refuses to trust one count: open jobs are counted by state and by whereabouts, and settled ones are held against their
//! events and attempts. The count by state reads an index from end to end, up to a second per million jobs on a busy
//! machine; everything else is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Engine, Sql};
use super::super::row::{Row, corrupt};
use super::OPEN;
use crate::ledger::LedgerError;
use crate::ledger::upkeep::{Account, Checked};

const FREE: &str = "(lease_until IS NULL OR lease_until <= {now})";
/// Conditions of the indexes `jobs_settled_by_update` and `jobs_in_review_by_update`, and of all settled jobs.
const SETTLED_UNSCRUBBED: &str =
    "scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')";
const IN_REVIEW: &str = "state = 'review'";
const SETTLED: &str = "state NOT IN ('waiting', 'sending', 'unknown')";

/// What is to wait for its time waits from then on.
const SINCE: &str = "CASE WHEN not_before > created_at THEN not_before ELSE created_at END";

const NO_EVENT: &str = "NOT EXISTS (SELECT 1 FROM outcome_events WHERE outcome_events.job_id = jobs.id \
     AND outcome_events.state = jobs.state)";
/// `accepted` is the reason that an answer leaves; what a look-up or a person found says so in other words.
const NO_CAUSE: &str = "state = 'succeeded' AND (reason IS NULL OR reason = 'accepted') \
     AND NOT EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.outcome = 'accepted')";

pub struct Statements(Dialect);

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self(dialect)
    }

    fn checking(&self, settled: &[String]) -> Sql {
        let open = |place: &str, which: &str| part(place, &format!("{OPEN} AND {which}"));
        let places = [
            // First, because PostgreSQL takes the types of the columns from here.
            format!(
                "SELECT min(provider) AS provider, 'open' AS place, NULL AS state, \
                 count(CASE WHEN expires_at <= {{now}} THEN 1 END) AS jobs, {{aged:min({SINCE})}} AS oldest_ms \
                 FROM jobs WHERE {OPEN} GROUP BY provider || ''"
            ),
            "SELECT provider, 'state' AS place, state, count(*) AS jobs, NULL AS oldest_ms FROM jobs \
             GROUP BY provider, state"
                .to_owned(),
            open("in_hand", "lease_until > {now}"),
            // Its span is that to the last wake.
            open("parked", &format!("{FREE} AND wake_at > {{now}}"))
                .replace("NULL AS oldest_ms", "{until:max(wake_at)} AS oldest_ms"),
            open("due", &format!("{FREE} AND wake_at <= {{now}}")),
            open("astray", "wake_at <= {after:(0 - $1)} AND (lease_until IS NULL OR lease_until <= {after:(0 - $1)})"),
        ];
        let checks = settled.iter().flat_map(|which| {
            [("without_event", NO_EVENT), ("without_cause", NO_CAUSE)]
                .map(|(place, fault)| part(place, &format!("{which} AND {fault}")))
        });
        let parts: Vec<String> = places.into_iter().chain(checks).collect();
        self.0.sql(&parts.join(" UNION ALL "))
    }

    pub async fn take(
        &self,
        engine: &dyn Engine,
        astray_after: Duration,
        checked: Checked,
    ) -> Result<Vec<Account>, LedgerError> {
        let sql = match checked {
            // Not as an argument: PostgreSQL comes to plan for any argument, and for any span it reads everything.
            Checked::Since(since) => {
                let lately = format!("updated_at >= {{after:(0 - {})}}", since.as_millis());
                self.checking(&[SETTLED_UNSCRUBBED, IN_REVIEW].map(|which| format!("{which} AND {lately}")))
            }
            Checked::All => self.checking(&[SETTLED.to_owned()]),
        };
        let args: Args = Arc::from([astray_after.into()]);
        let mut accounts: BTreeMap<String, Account> = BTreeMap::new();
        for row in engine.query(&sql, args).await? {
            let provider = row.text("provider")?;
            let account =
                accounts.entry(provider.clone()).or_insert_with(|| Account { provider, ..Account::default() });
            enter(account, &row)?;
        }
        Ok(accounts.into_values().collect())
    }
}

/// Grouped by an expression, because SQLite would rather read all jobs in the order of an index on the column.
fn part(place: &str, which: &str) -> String {
    format!(
        "SELECT min(provider) AS provider, '{place}' AS place, NULL AS state, count(*) AS jobs, NULL AS oldest_ms \
         FROM jobs WHERE {which} GROUP BY provider || ''"
    )
}

fn enter(account: &mut Account, row: &Row) -> Result<(), LedgerError> {
    let jobs = u64::try_from(row.int("jobs")?).map_err(|_| corrupt("jobs", "is negative"))?;
    match row.text("place")?.as_str() {
        "state" => {
            account.recorded += jobs;
            account.states.push((row.text("state")?, jobs));
        }
        "open" => {
            account.past_deadline = jobs;
            account.oldest_open = row.opt_ms("oldest_ms")?;
        }
        "in_hand" => account.in_hand = jobs,
        "parked" => (account.parked, account.parked_for) = (jobs, row.opt_ms("oldest_ms")?),
        "due" => account.due = jobs,
        "astray" => account.astray = jobs,
        // Settled and in review are counted apart.
        "without_event" => account.without_event += jobs,
        "without_cause" => account.without_cause += jobs,
        other => return Err(corrupt("place", &format!("holds {other}"))),
    }
    Ok(())
}
