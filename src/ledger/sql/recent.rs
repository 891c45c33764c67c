//! What was used of a quota lately: for a limiter that lost its account and rebuilds it.
//!
//! Look-ups count like charges, one permit each. Refuses to flatter: ages are rounded down, a request whose answer never came counts as on the wire, and providers
//! that have left the quota or are gone are remembered by the audit.

use std::sync::Arc;
use std::time::Duration;

use super::dialect::Dialect;
use super::engine::{Engine, Sql, Value};
use crate::domain::decision::{BATCH_MAX, ByKind};
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_up;
use crate::ledger::{LedgerError, RecentUses};

/// Into how many entries `within` is cut at most. Its ends add two more, and the limiter takes no more in one call.
const ENTRIES: u64 = BATCH_MAX as u64 - 2;

pub struct Statements {
    uses: Sql,
    restored: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            // $1 quota, $2 minus `within` in ms, $3 bucket in ms. A provider that left the quota keeps using it until the
            // workers have noticed and its last request has ended: an hour is far more than both.
            uses: dialect.sql(
                "WITH sharing AS ( \
                     SELECT name FROM providers WHERE COALESCE(quota, name) = $1 \
                     UNION SELECT old_row ->> 'name' FROM settings_audit \
                     WHERE at > {after:($2 - 3600000)} AND table_name = 'providers' \
                         AND COALESCE(old_row ->> 'quota', old_row ->> 'name') = $1), \
                 used AS ( \
                     SELECT job_id, kind, CASE WHEN outcome = 'unknown' AND status IS NULL AND began_at > {after:$2} \
                         THEN NULL ELSE {aged:ended_at} END AS age_ms \
                     FROM sharing {join} attempts ON attempts.provider = sharing.name \
                     WHERE ended_at > {after:$2} AND outcome <> 'not_sent' \
                     UNION ALL \
                     SELECT job_id, kind, NULL FROM sharing {join} attempts ON attempts.provider = sharing.name \
                     WHERE ended_at IS NULL AND began_at > {after:$2}) \
                 SELECT age_ms / $3 * $3 AS least_age_ms, \
                     CAST(sum(CASE WHEN kind = 'lookup' THEN 0 ELSE cost END) AS bigint) AS charges, \
                     CAST(sum(CASE WHEN kind = 'lookup' THEN 1 ELSE 0 END) AS bigint) AS lookups \
                 FROM used {join} jobs ON jobs.id = used.job_id GROUP BY age_ms / $3 ORDER BY age_ms / $3",
            ),
            restored: dialect.sql(
                "SELECT 1 AS one FROM settings_audit WHERE at > {after:$1} AND table_name = 'settings_version' LIMIT 1",
            ),
        }
    }

    pub async fn uses(
        &self,
        engine: &dyn Engine,
        quota: &ProviderName,
        within: Duration,
    ) -> Result<RecentUses, LedgerError> {
        let within_ms = millis_up(within);
        let bucket_ms = within_ms.div_ceil(ENTRIES).max(1);
        // Instants are cut to milliseconds in one of the databases: one more, so that none falls out too early.
        let since_ms = i64::try_from(within_ms).unwrap_or(i64::MAX).saturating_add(1);
        let bucket = Value::Int(i64::try_from(bucket_ms).ok());
        let args: [Value; 3] = [quota.as_str().into(), (-since_ms).into(), bucket];
        let mut uses = RecentUses::default();
        for row in engine.query(&self.uses, Arc::from(args)).await? {
            let cost = |of: &str| Ok::<_, LedgerError>(u32::try_from(row.int(of)?).unwrap_or(u32::MAX));
            let of_kinds = ByKind { charges: cost("charges")?, lookups: cost("lookups")? };
            match row.opt_ms("least_age_ms")? {
                Some(age) => uses.ended.push((age, of_kinds)),
                None => uses.open = of_kinds,
            }
        }
        if !engine.query(&self.restored, Arc::from([(-since_ms).into()])).await?.is_empty() {
            return Err(LedgerError::Refused(
                "this database was restored from a backup lately: it does not know what was sent since the backup"
                    .to_owned(),
            ));
        }
        Ok(uses)
    }
}
