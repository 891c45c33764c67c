//! The verdict on a cell: what its provider, its broker and its ledger say, compared.
//!
//! Each oracle counts its findings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

use super::cell::Cell;

/// Accounts that have less than a third of an equal share of the first five eighths of all payments that were sent.
const UNFAIR: &str = "WITH sent AS (SELECT account, count(*) OVER () AS jobs, \
         row_number() OVER (ORDER BY first_sent_at, seq) AS place FROM jobs WHERE first_sent_at IS NOT NULL) \
     SELECT count(*) FROM (SELECT account FROM sent GROUP BY account, jobs \
         HAVING count(*) FILTER (WHERE place * 8 <= jobs * 5) * 3 * (SELECT count(DISTINCT account) FROM sent) \
             < jobs * 5 / 8) AS late";

/// Findings of all oracles; a sound run has only zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Published payments that are in no ledger row and no queue.
    pub lost: u64,
    pub double: u64,
    pub breach: u64,
    /// Payments that were requested under more than one key.
    pub several_keys: u64,
    /// Charges that differ from their message.
    pub wrong: u64,
    /// Payments whose ledger row, outcome event and provider records disagree.
    pub contradicted: u64,
    pub unsettled: u64,
    /// Accounts that had far less than an equal share while all of them waited.
    pub unfair: u64,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            ("lost", self.lost),
            ("double", self.double),
            ("breach", self.breach),
            ("several keys", self.several_keys),
            ("wrong", self.wrong),
            ("contradicted", self.contradicted),
            ("unsettled", self.unsettled),
            ("unfair", self.unfair),
        ];
        let seen: Vec<String> =
            counts.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")).collect();
        f.write_str(if seen.is_empty() { "nothing" } else { "" })?;
        f.write_str(&seen.join(", "))
    }
}

impl Cell {
    /// Compares the provider's, the broker's and the ledger's records of all published payments.
    pub async fn verdict(&self) -> Verdict {
        let report = self.fake.report();
        let rows: Vec<(String, String)> =
            sqlx::query_as("SELECT id, state FROM jobs").fetch_all(&self.ledger).await.unwrap();
        let rows: BTreeMap<String, String> = rows.into_iter().collect();
        let waiting = u64::from(self.broker.ready(&self.queue(&self.name)).await.unwrap_or(0));
        let missing = self.published.iter().filter(|id| !rows.contains_key(*id)).count() as u64;
        let effects = self.fake.effects();
        let charged: BTreeSet<&str> =
            effects.iter().filter(|effect| effect.count > 0).map(|effect| effect.id.as_str()).collect();
        let amount = |id: &str| id.rsplit('-').next().and_then(|number| number.parse::<i64>().ok()).map(|n| n + 100);
        let wrong = effects.iter().filter(|effect| {
            !self.published.contains(&effect.id)
                || Some(effect.amount) != amount(&effect.id)
                || effect.currency != "EUR"
        });
        let ended = |state: &str| !matches!(state, "waiting" | "sending" | "unknown");
        let contradicts = |(id, state): &(&String, &String)| match state.as_str() {
            "succeeded" => !charged.contains(id.as_str()),
            // An operator resolves it, so it may be charged or not.
            "review" => false,
            _ => charged.contains(id.as_str()),
        };
        let text = |event: &Value, field: &str| event[field].as_str().unwrap().to_owned();
        let events = self.broker.drain(&self.outcomes).await;
        let told: BTreeSet<(String, String)> =
            events.iter().map(|event| (text(event, "id"), text(event, "state"))).collect();
        let untold =
            rows.iter().filter(|(id, state)| ended(state) && !told.contains(&((*id).clone(), (*state).clone())));
        let foreign = told.iter().filter(|(id, state)| rows.get(id) != Some(state)).count();
        Verdict {
            lost: missing.saturating_sub(waiting),
            double: report.doubles,
            breach: report.limits.iter().map(|limit| limit.breaches).sum(),
            several_keys: report.several_keys,
            wrong: wrong.count() as u64,
            contradicted: (rows.iter().filter(contradicts).count() + untold.count() + foreign) as u64,
            unsettled: rows.values().filter(|state| !ended(state)).count() as u64 + missing.min(waiting),
            unfair: self.count(UNFAIR).await,
        }
    }
}
