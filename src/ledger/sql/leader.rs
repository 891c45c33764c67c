//! The limiter leader's row for each quota: all workers read it, and a compare-and-set changes it.
//!
//! `limiter::leader_election` decides who the leader should be. See `docs/decisions/0014-leader-row-in-sql.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::dialect::Dialect;
use super::engine::{Args, Sql};
use super::row::{SqlRow, corrupt};
use crate::domain::clock_comparison::{ClockAttestation, ClockOffset, LeaderRow, QuotaAttestation};
use crate::domain::provider::ProviderName;
use crate::domain::time::Micros;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

const COLUMNS: &str = "quota, holder, term, {aged:since} AS age_ms, {now_ms} AS now_ms, \
     clock_ahead_least_us, clock_ahead_most_us, clock_since_us, {since:clock_said_at} AS clock_age_ms";

pub struct LeaderStatements {
    stored: Sql,
    take: Sql,
    attest: Sql,
}

impl LeaderStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            stored: dialect.render(&format!("SELECT {COLUMNS} FROM limiter_authority WHERE quota IN ({{texts:$1}})")),
            // A term is never used twice, even if the row was deleted: the clock is above every count of changes.
            take: dialect.render(&format!(
                "INSERT INTO limiter_authority (quota, holder, term, since) \
                 VALUES ($1, $3, {{now_ms}}, {{now}}) \
                 ON CONFLICT (quota) DO UPDATE SET holder = excluded.holder, since = excluded.since, \
                     clock_ahead_least_us = NULL, clock_ahead_most_us = NULL, clock_since_us = NULL, \
                     clock_said_at = NULL, \
                     term = CASE WHEN excluded.term > limiter_authority.term THEN excluded.term \
                                 ELSE limiter_authority.term + 1 END \
                 WHERE limiter_authority.holder = $2 RETURNING {COLUMNS}"
            )),
            // A row that another process writes now is left to the next poll, so that no two wait for each other.
            attest: dialect.render(
                "UPDATE limiter_authority SET clock_ahead_least_us = attested.least_us, \
                     clock_ahead_most_us = attested.most_us, clock_since_us = attested.since_us, clock_said_at = {now} \
                 FROM {attested:$1} \
                 WHERE limiter_authority.quota IN (\
                         SELECT free.quota FROM limiter_authority AS free WHERE free.quota IN (SELECT quota FROM {attested:$1}) {unlocked}) \
                     AND limiter_authority.quota = attested.quota AND limiter_authority.term = attested.term \
                     AND COALESCE(clock_since_us, 0) <= attested.since_us",
            ),
        }
    }
}

impl Database {
    /// The limiter leaders of these quotas; a quota that never had a leader has no entry. Cheap enough for polling.
    pub async fn stored_leaders(
        &self,
        quotas: &[ProviderName],
    ) -> Result<HashMap<ProviderName, LeaderRow>, LedgerError> {
        if quotas.is_empty() {
            return Ok(HashMap::new());
        }
        let names: Vec<&str> = quotas.iter().map(ProviderName::as_str).collect();
        let args: Args = Arc::from([serde_json::Value::from(names).to_string().into()]);
        let rows = self.engine.query_urgent(&self.sql.leaders.stored, args).await?;
        let entry = |row: &SqlRow| {
            let quota =
                ProviderName::new(&row.text("quota")?).map_err(|_| corrupt("quota", "is not a provider name"))?;
            Ok((quota, stored_leader(row)?))
        };
        rows.iter().map(entry).collect()
    }

    /// Makes `to` the leader if `from` is it now, or if there is none. The term rises, and the age restarts at zero.
    /// Returns the leader row afterwards.
    pub async fn take_leadership(
        &self,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<LeaderRow, LedgerError> {
        let args: Args = Arc::from([quota.as_str().into(), from.into(), to.into()]);
        if let Some(row) = self.engine.query(&self.sql.leaders.take, args).await?.first() {
            return stored_leader(row);
        }
        // Another worker was faster. The row exists, because only an operator deletes it.
        let mut held = self.stored_leaders(std::slice::from_ref(quota)).await?;
        held.remove(quota)
            .ok_or_else(|| LedgerError::Unavailable("the limiter's leader row was deleted: retrying".to_owned()))
    }

    /// Stores each clock attestation, unless the quota's row has another term, or one of a later clock step.
    pub async fn record_clock_attestations(&self, attestations: &[QuotaAttestation]) -> Result<(), LedgerError> {
        if attestations.is_empty() {
            return Ok(());
        }
        let row = |said: &QuotaAttestation| {
            let ClockAttestation { offset, since } = said.attestation;
            json!({ "quota": said.quota.as_str(), "term": said.term, "least_us": offset.least_us,
                    "most_us": offset.most_us, "since_us": i64::try_from(since.0).unwrap_or(i64::MAX) })
        };
        let rows: Vec<serde_json::Value> = attestations.iter().map(row).collect();
        let args: Args = Arc::from([json!(rows).to_string().into()]);
        self.engine.query(&self.sql.leaders.attest, args).await.map(drop)
    }
}

fn stored_leader(row: &SqlRow) -> Result<LeaderRow, LedgerError> {
    let micros = |us: i64, column| u64::try_from(us).map(Micros).map_err(|_| corrupt(column, "is negative"));
    let now = micros(row.int("now_ms")?.saturating_mul(1_000), "now_ms")?;
    let attestation = match row.opt_int("clock_since_us")? {
        None => None,
        Some(since_us) => {
            let ahead =
                ClockOffset { least_us: row.int("clock_ahead_least_us")?, most_us: row.int("clock_ahead_most_us")? };
            // If the clock went back, the age is unknown: too old for any use.
            let age_ms = u64::try_from(row.int("clock_age_ms")?).unwrap_or(u64::MAX);
            Some((
                ClockAttestation { offset: ahead, since: micros(since_us, "clock_since_us")? },
                Duration::from_millis(age_ms),
            ))
        }
    };
    Ok(LeaderRow { holder: row.text("holder")?, term: row.int("term")?, age: row.ms("age_ms")?, now, attestation })
}
