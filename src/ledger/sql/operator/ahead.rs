//! Cancelling a payment before its message comes: a row that says no more than that, so that the message is done with.
//!
//! Refuses to guess the content: the row has the hash that no message has ([`ContentHash::UNSEEN`]), amount 1 and currency
//! XXX. A payment that is recorded already is cancelled like any other.

use std::sync::Arc;

use super::verdict;
use crate::domain::job::{ContentHash, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::operator::{By, Refusal, Verdict};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Engine, Sql, Step, Value};

pub struct Statements {
    record: Sql,
    provider: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            record: dialect.sql(
                "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, \
                     priority, state, wake_at, fence, created_at, updated_at) \
                 VALUES ($1, $2, $1, $3, $4, 1, 'XXX', 1, 0, 'waiting', {now}, 0, {now}, {now}) \
                 ON CONFLICT DO NOTHING RETURNING id",
            ),
            provider: dialect.sql("SELECT provider FROM jobs WHERE id = $1"),
        }
    }

    pub async fn cancel(
        &self,
        verdicts: &verdict::Statements,
        engine: &dyn Engine,
        id: &JobId,
        provider: &ProviderName,
        by: &By,
    ) -> Result<Result<(), Refusal>, LedgerError> {
        let hash = ContentHash::UNSEEN.0.as_slice();
        let args: [Value; 4] = [id.as_str().into(), provider.as_str().into(), false.into(), hash.into()];
        let record = Step { sql: self.record.clone(), args: Arc::from(args), must_affect: true };
        let mut steps = vec![record];
        steps.extend(verdicts.steps_ahead(id, by));
        if engine.atomically(steps).await?.is_some() {
            return Ok(Ok(()));
        }
        let rows = engine.query(&self.provider, super::list::of(id)).await?;
        let Some(row) = rows.first() else { return Ok(Err(Refusal::KeyTaken)) };
        let recorded = row.text("provider")?;
        if recorded != provider.as_str() {
            return Ok(Err(Refusal::OtherProvider { provider: recorded }));
        }
        verdicts.pass(engine, id, &Verdict::Cancel, None, by).await
    }
}
