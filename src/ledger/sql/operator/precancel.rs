//! The cancellation of a payment before its message comes: a row for its id, so that the message is acknowledged.
//!
//! The content is unknown, so the row has the hash that no message has ([`ContentHash::UNSEEN`]), amount 1 and currency
//! XXX. A payment that is recorded already is cancelled like any other.

use std::sync::Arc;

use super::resolution;
use crate::domain::job::{ContentHash, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Sql, Step, Value};
use crate::ledger::sql::storable;

pub struct PrecancelStatements {
    record: PrecancelSql,
    provider: Sql,
}

/// The statements, by database.
enum PrecancelSql {
    /// By a function of the owner's; the row is `cancelled` at once.
    Function(Sql),
    /// As a waiting job, which the next step cancels.
    Statement(Sql),
}

impl PrecancelStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            record: match dialect {
                Dialect::Postgres => {
                    PrecancelSql::Function(dialect.render("SELECT jobs_cancel_ahead($1, $2, $3) AS id"))
                }
                Dialect::Sqlite => PrecancelSql::Statement(dialect.render(
                    "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, \
                         priority, state, wake_at, fence, created_at, updated_at) \
                     VALUES ($1, $2, $1, 0, $3, 1, 'XXX', 1, 0, 'waiting', {now}, 0, {now}, {now}) \
                     ON CONFLICT DO NOTHING RETURNING id",
                )),
            },
            provider: dialect.render("SELECT provider FROM jobs WHERE id = $1"),
        }
    }
}

impl Database {
    /// Cancels a payment of this provider, whether its message has come or not. Without a message, a row is inserted
    /// for the id. Every later message with this id, whatever its content, is acknowledged and nothing is sent.
    pub async fn precancel(
        &self,
        id: &JobId,
        provider: &ProviderName,
        by: &Actor,
    ) -> Result<Result<(), ResolutionRefusal>, LedgerError> {
        let step = |sql: &Sql, third: Value| {
            let args: [Value; 3] = [id.as_str().into(), provider.as_str().into(), third];
            Step { sql: sql.clone(), args: Arc::from(args), must_affect: true }
        };
        let resolutions = &self.sql.operator.resolution;
        let steps = match &self.sql.operator.precancel.record {
            PrecancelSql::Function(sql) => {
                let cancelled = step(sql, storable(&resolution::precancel_reason(by)).into());
                resolutions.audited(id, vec![cancelled], by)
            }
            PrecancelSql::Statement(sql) => {
                let recorded = step(sql, ContentHash::UNSEEN.0.as_slice().into());
                std::iter::once(recorded).chain(resolutions.precancel_steps(id, by)).collect()
            }
        };
        if self.engine.atomically(steps).await?.is_some() {
            return Ok(Ok(()));
        }
        let rows = self.engine.query(&self.sql.operator.precancel.provider, super::list::id_args(id)).await?;
        let Some(row) = rows.first() else { return Ok(Err(ResolutionRefusal::KeyTaken)) };
        let recorded = row.text("provider")?;
        if recorded != provider.as_str() {
            return Ok(Err(ResolutionRefusal::OtherProvider { provider: recorded }));
        }
        self.resolve_job(id, &JobResolution::Cancel, None, by).await
    }
}
