//! A job in the form of its message, read back from its row.
//!
//! The recorded hash is returned with it: the publisher compares it with the rebuilt message.

use super::list::id_args;
use crate::domain::job::{ContentHash, Identifier, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{JobResolution, ReloadedJob, ResolutionRefusal};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::Sql;
use crate::ledger::sql::row::{SqlRow, corrupt};

pub struct ReloadStatements {
    job: Sql,
}

impl ReloadStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            job: dialect.render(
                "SELECT id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, \
                     cost, priority, {ms:not_before} AS not_before_ms, {ms:expires_at} AS expires_at_ms, payload, \
                     fence, copy \
                 FROM jobs WHERE id = $1",
            ),
        }
    }
}

impl Database {
    /// The data for sending a job again, if this decision could be applied now.
    pub async fn reload_job(
        &self,
        id: &JobId,
        resolution: &JobResolution,
    ) -> Result<Result<ReloadedJob, ResolutionRefusal>, LedgerError> {
        let sql = &self.sql.operator;
        if let Err(refusal) = sql.resolution.look(&*self.engine, id, resolution).await? {
            return Ok(Err(refusal));
        }
        let rows = self.engine.query(&sql.reload.job, id_args(id)).await?;
        rows.first().map_or(Ok(Err(ResolutionRefusal::NoSuchJob)), |row| reloaded(row).map(Ok))
    }
}

fn reloaded(row: &SqlRow) -> Result<ReloadedJob, LedgerError> {
    let token =
        |column: &str, text: String| Identifier::new(text).map_err(|problem| corrupt(column, &problem.to_string()));
    let key = row.text("idempotency_key")?;
    let hash = row.bytes("content_hash")?;
    let job = Job {
        id: token("id", row.text("id")?)?,
        provider: ProviderName::new(row.text("provider")?)
            .map_err(|problem| corrupt("provider", &problem.to_string()))?,
        amount: row.int("amount")?,
        currency: row.text("currency")?,
        account: row.opt_text("account")?.map(|account| token("account", account)).transpose()?,
        reference: row.opt_text("reference")?,
        idempotency_key: row.bool("key_given")?.then(|| token("idempotency_key", key)).transpose()?,
        cost: u16::try_from(row.int("cost")?).map_err(|_| corrupt("cost", "is out of range"))?,
        priority: u8::try_from(row.int("priority")?).map_err(|_| corrupt("priority", "is out of range"))?,
        not_before: row.opt_instant("not_before_ms")?,
        expires_at: row.opt_instant("expires_at_ms")?,
        payload: row.opt_text("payload")?,
    };
    let hash = <[u8; 32]>::try_from(hash).map_err(|_| corrupt("content_hash", "is not 32 bytes"))?;
    Ok(ReloadedJob { job, hash: ContentHash(hash), fence: row.int("fence")?, copy: row.int("copy")? })
}
