//! The erasure of an account's personal data from its finished payments, in batches.
//!
//! Unfinished payments stay as they are, and so do those whose outcome event is not published. Id, idempotency key and
//! hash stay: the same message is recognised forever. Requests keep the account for as long as a limit may count them.

use std::sync::Arc;

use super::list::opt_at;
use crate::domain::job::Identifier;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, DatabaseTime, ErasureCounts, ErasureResult};
use crate::ledger::sql::audit_context::{AuditContext, actor_args};
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Sql, Step, Value};
use crate::ledger::sql::reports::LANES;
use crate::ledger::sql::row::{SqlRow, corrupt};
use crate::ledger::sql::upkeep::{LIMIT_WINDOW_MAX, OPEN};

/// The states that `jobs_erase()` of PostgreSQL erases. A payment in review has not finished.
const FINISHED: &str = "state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')";
const UNPUBLISHED: &str =
    "EXISTS (SELECT 1 FROM outcome_events AS event WHERE event.job_id = jobs.id AND event.published_at IS NULL)";
/// The same, asked of each payment: for `EXISTS` PostgreSQL may read all events that are unpublished, of all accounts.
const UNPUBLISHED_OF_EACH: &str = "(SELECT count(*) FROM outcome_events AS event \
     WHERE event.job_id = jobs.id AND event.published_at IS NULL) > 0";
/// As many payments, and as many requests, are counted. An account may have half of a large ledger.
const COUNTED_MAX: u64 = 100_000;

pub struct ErasureStatements {
    counts: Sql,
    erasure: ErasureSql,
    signature: AuditContext,
}

/// The statements, by database.
enum ErasureSql {
    /// By a function of the owner's: its caller needs no right to the tables.
    Function(Sql),
    /// A database file has no roles.
    Statements { choose: Sql, jobs: Sql, events: Sql, details: Sql, audits: Sql, requests: Sql, truncate_log: Sql },
}

impl ErasureSql {
    fn new(dialect: Dialect) -> Self {
        if dialect == Dialect::Postgres {
            return Self::Function(dialect.render("SELECT erased_jobs, erased_requests FROM jobs_erase($1, $2)"));
        }
        let reason = "reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END";
        let chosen = "IN ({texts:$1})";
        let done = "EXISTS (SELECT 1 FROM jobs WHERE jobs.id = job_id AND jobs.account IS NULL)";
        Self::Statements {
            choose: dialect.render(&format!(
                "SELECT id FROM jobs WHERE account = $1 AND {FINISHED} AND NOT {UNPUBLISHED} ORDER BY id LIMIT $2"
            )),
            // The totals of finished jobs do not include the last minutes yet, and find those jobs by `scrubbed_at`.
            jobs: dialect.render(&format!(
                "UPDATE jobs SET account = NULL, reference = NULL, provider_reference = NULL, payload = NULL, {reason}, \
                     wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, wait_since = NULL, wait_until = NULL, \
                     wait_request = NULL, \
                     frozen_url = CASE WHEN frozen_url IS NOT NULL THEN '' END, \
                     frozen_body = CASE WHEN frozen_body IS NOT NULL THEN x'' END, frozen_account = NULL, \
                     scrubbed_at = COALESCE(scrubbed_at, CASE \
                         WHEN state = 'dead' OR updated_at < (SELECT counted_before FROM finished_mark) \
                         THEN {{now}} END) \
                 WHERE id {chosen} AND account = $2 AND {FINISHED} AND NOT {UNPUBLISHED} RETURNING id"
            )),
            events: dialect.render(&format!(
                "UPDATE outcome_events SET provider_reference = NULL, {reason} WHERE job_id {chosen} AND {done}"
            )),
            details: dialect.render(&format!("UPDATE attempts SET detail = '' WHERE job_id {chosen} AND {done}")),
            audits: dialect.render(&format!(
                "UPDATE job_audit SET os_user = $2, because = $3, program = COALESCE($4, program) \
                 WHERE job_id {chosen} AND erased AND os_user IS NULL"
            )),
            requests: dialect.render(&format!(
                "{LANES} UPDATE attempts SET account = NULL, reference = NULL WHERE (job_id, number) IN (\
                     SELECT attempts.job_id, attempts.number \
                     FROM lanes {{join}} attempts ON attempts.provider = lanes.provider AND attempts.account = $1 \
                     JOIN jobs ON jobs.id = attempts.job_id AND jobs.account IS NULL \
                     WHERE attempts.began_at <= {{after:(0 - $3)}} LIMIT $2) RETURNING job_id"
            )),
            truncate_log: dialect.render("PRAGMA wal_checkpoint(TRUNCATE)"),
        }
    }
}

impl ErasureStatements {
    pub fn new(dialect: Dialect) -> Self {
        let of = |which: &str| format!("count(CASE WHEN {which} THEN 1 END)");
        let most = COUNTED_MAX + 1;
        let counting = "attempts.provider = lanes.provider AND attempts.account = $1 AND began_at > {after:(0 - $2)}";
        // The account as a range: for one value PostgreSQL would also read by id, and pass over all other accounts' jobs.
        let counts = format!(
            "{LANES}, own AS ( \
                 SELECT state, {FINISHED} AND {UNPUBLISHED_OF_EACH} AS unpublished FROM jobs \
                 WHERE account >= $1 AND account <= $1 ORDER BY account, id LIMIT {most}), \
             counted AS (SELECT 1 AS one FROM lanes {{join}} attempts ON {counting} LIMIT {most}), \
             latest AS (SELECT max(at) AS at FROM ( \
                 SELECT (SELECT max(began_at) FROM attempts WHERE {counting}) AS at FROM lanes) AS lately) \
             SELECT {} AS finished, {} AS open, {} AS review, {} AS unpublished, count(*) AS payments, \
                 (SELECT count(*) FROM counted) AS requests, (SELECT {{ms:at}} FROM latest) AS latest_ms, \
                 (SELECT count(*) FROM account_overrides WHERE account = $1) AS rules FROM own",
            of(&format!("{FINISHED} AND NOT unpublished")),
            of(OPEN),
            of("state = 'review'"),
            of("unpublished"),
        );
        Self {
            counts: dialect.render(&counts),
            erasure: ErasureSql::new(dialect),
            signature: AuditContext::new(dialect),
        }
    }
}

impl Database {
    /// Counts what the ledger holds of an account.
    pub async fn erasure_counts(&self, account: &Identifier) -> Result<ErasureCounts, LedgerError> {
        let args: Args = Arc::from([account.as_str().into(), LIMIT_WINDOW_MAX.into()]);
        let rows = self.engine.query_by_index(&self.sql.operator.erase.counts, args).await?;
        let row = rows.first().ok_or_else(|| corrupt("finished", "is missing"))?;
        let latest = opt_at(row, "latest_ms")?;
        let counted_ms = i64::try_from(LIMIT_WINDOW_MAX.as_millis()).unwrap_or(i64::MAX);
        let requests = count(row, "requests")?;
        Ok(ErasureCounts {
            at_least: count(row, "payments")?.max(requests) > COUNTED_MAX,
            finished: count(row, "finished")?,
            open: count(row, "open")?,
            review: count(row, "review")?,
            unpublished: count(row, "unpublished")?,
            requests,
            requests_until: latest.map(|DatabaseTime(ms)| DatabaseTime(ms.saturating_add(counted_ms))),
            rules: count(row, "rules")?,
        })
    }

    /// Erases account, references, payload, request and texts of at most this many finished payments of the account.
    /// Each is audited. Id, idempotency key, hash and amount stay.
    pub async fn erase_account(
        &self,
        account: &Identifier,
        at_most: u32,
        by: &Actor,
    ) -> Result<ErasureResult, LedgerError> {
        let of_account: Args = Arc::from([account.as_str().into(), at_most.into()]);
        match &self.sql.operator.erase.erasure {
            ErasureSql::Function(sql) => {
                let call = Step { sql: sql.clone(), args: of_account, must_affect: true };
                let rows = self.engine.atomically(self.sql.operator.erase.signature.with_actor(vec![call], by)).await?;
                let row = rows.as_ref().and_then(|rows| rows.last()?.first());
                let row = row.ok_or_else(|| corrupt("erased_jobs", "is missing"))?;
                Ok(ErasureResult { jobs: count(row, "erased_jobs")?, requests: count(row, "erased_requests")? })
            }
            ErasureSql::Statements { choose, jobs, events, details, audits, requests, truncate_log } => {
                let chosen = self.engine.query(choose, of_account).await?;
                let ids = chosen.iter().map(|row| row.text("id")).collect::<Result<Vec<_>, _>>()?;
                let list: Value = serde_json::Value::from(ids).to_string().into();
                let mut signed = vec![list.clone()];
                signed.extend(actor_args(by));
                let step =
                    |sql: &Sql, args: Vec<Value>| Step { sql: sql.clone(), args: args.into(), must_affect: false };
                let steps = vec![
                    step(jobs, vec![list.clone(), account.as_str().into()]),
                    step(events, vec![list.clone()]),
                    step(details, vec![list]),
                    step(audits, signed),
                    step(requests, vec![account.as_str().into(), at_most.into(), LIMIT_WINDOW_MAX.into()]),
                ];
                let rows = self.engine.atomically(steps).await?.unwrap_or_default();
                let many = |at: usize| rows.get(at).map_or(0, |rows| rows.len() as u64);
                let erased = ErasureResult { jobs: many(0), requests: many(4) };
                if erased == ErasureResult::default() {
                    // The log beside the file has what was overwritten there.
                    self.engine.query(truncate_log, Arc::from([])).await?;
                }
                Ok(erased)
            }
        }
    }
}

fn count(row: &SqlRow, column: &str) -> Result<u64, LedgerError> {
    u64::try_from(row.int(column)?).map_err(|_| corrupt(column, "is negative"))
}
