//! Who grants permits for a quota: read by everybody, taken by compare and set.
//!
//! Refuses to judge who should: `limiter::authority` does.

use std::collections::HashMap;
use std::sync::Arc;

use super::dialect::Dialect;
use super::engine::{Args, Engine, Sql};
use super::row::{Row, corrupt};
use crate::domain::provider::ProviderName;
use crate::ledger::{Authority, LedgerError};

const COLUMNS: &str = "quota, holder, term, {aged:since} AS age_ms";

pub struct Statements {
    of: Sql,
    take: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            of: dialect.sql(&format!("SELECT {COLUMNS} FROM limiter_authority WHERE quota IN ({{texts:$1}})")),
            // A term is never used twice, even if somebody deleted the row: the clock is above every count of changes.
            take: dialect.sql(&format!(
                "INSERT INTO limiter_authority (quota, holder, term, since) \
                 VALUES ($1, $3, {{now_ms}}, {{now}}) \
                 ON CONFLICT (quota) DO UPDATE SET holder = excluded.holder, since = excluded.since, \
                     term = CASE WHEN excluded.term > limiter_authority.term THEN excluded.term \
                                 ELSE limiter_authority.term + 1 END \
                 WHERE limiter_authority.holder = $2 RETURNING {COLUMNS}"
            )),
        }
    }

    pub async fn of(
        &self,
        engine: &dyn Engine,
        quotas: &[ProviderName],
    ) -> Result<HashMap<ProviderName, Authority>, LedgerError> {
        if quotas.is_empty() {
            return Ok(HashMap::new());
        }
        let names: Vec<&str> = quotas.iter().map(ProviderName::as_str).collect();
        let args: Args = Arc::from([serde_json::Value::from(names).to_string().into()]);
        let rows = engine.query(&self.of, args).await?;
        let entry = |row: &Row| {
            let quota = ProviderName::new(&row.text("quota")?).map_err(|_| corrupt("quota", "is no provider name"))?;
            Ok((quota, authority(row)?))
        };
        rows.iter().map(entry).collect()
    }

    pub async fn take(
        &self,
        engine: &dyn Engine,
        quota: &ProviderName,
        from: Option<&str>,
        to: &str,
    ) -> Result<Authority, LedgerError> {
        let args: Args = Arc::from([quota.as_str().into(), from.into(), to.into()]);
        if let Some(row) = engine.query(&self.take, args).await?.first() {
            return authority(row);
        }
        // Somebody else was faster; the row is there, because nothing but an operator deletes it.
        let mut held = self.of(engine, std::slice::from_ref(quota)).await?;
        held.remove(quota).ok_or_else(|| LedgerError::Away("the limiter's authority was deleted meanwhile".to_owned()))
    }
}

fn authority(row: &Row) -> Result<Authority, LedgerError> {
    Ok(Authority { holder: row.text("holder")?, term: row.int("term")?, age: row.ms("age_ms")? })
}
