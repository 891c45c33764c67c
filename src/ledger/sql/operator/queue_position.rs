//! The queries for a payment's neighbours: jobs ahead of it, active jobs, and rejected messages with its id.
//!
//! Jobs ahead are those that are due earlier or more urgent; for a job of the backlog, those that are claimed before it.

use super::list::{at, id_args, opt_at};
use crate::domain::disposition::Resend;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::queue_position::{BacklogPosition, JobProgress, LedgerQueuePosition, Rejection};
use crate::ledger::sql::backlog::position::BacklogPositionStatements;
use crate::ledger::sql::claim::LOST_HOLDERS;
use crate::ledger::sql::dialect::Dialect;
use crate::ledger::sql::engine::{Args, Sql};
use crate::ledger::sql::row::{SqlRow, corrupt, read_or_log};

const OPEN: &str = "state IN ('waiting', 'sending', 'unknown')";

pub struct QueuePositionStatements {
    now: Sql,
    own: Sql,
    around: Sql,
    rejected: Sql,
    backlog: BacklogPositionStatements,
}

impl QueuePositionStatements {
    pub fn new(dialect: Dialect) -> Self {
        // $1 the job, $2 the providers of its quota as JSON.
        let others = format!(
            "FROM jobs AS me JOIN jobs AS other ON other.provider IN ({{texts:$2}}) AND other.{OPEN} \
             WHERE me.id = $1 AND other.id <> me.id AND other.state <> 'sending' AND NOT other.backlog \
                 AND ((other.priority > me.priority AND (other.wake_at <= me.wake_at OR other.wake_at <= {{now}})) \
                     OR (other.priority = me.priority AND (other.wake_at < me.wake_at \
                         OR (other.wake_at = me.wake_at AND other.id < me.id))))"
        );
        let around = format!(
            "SELECT (SELECT count(*) {others}) AS jobs_before, \
                 (SELECT CAST(COALESCE(sum(other.cost), 0) AS bigint) {others}) AS cost_before, \
                 (SELECT count(*) FROM jobs AS other JOIN jobs AS me ON other.provider = me.provider \
                     WHERE me.id = $1 AND other.{OPEN} AND other.wake_at <= {{now}} AND NOT other.backlog \
                         AND (other.lease_until IS NULL OR other.lease_until <= {{now}})) AS due, \
                 (SELECT count(*) FROM jobs WHERE provider IN ({{texts:$2}}) AND {OPEN} AND state <> 'sending' \
                     AND lease_until > {{now}} AND id <> $1) AS active, \
                 (SELECT count(*) FROM jobs AS other JOIN jobs AS me ON other.priority >= me.priority \
                     WHERE me.id = $1 AND other.id <> $1 AND other.provider IN ({{texts:$2}}) AND other.{OPEN} \
                         AND other.state <> 'sending' AND other.lease_until > {{now}}) AS active_before, \
                 (SELECT count(*) FROM jobs AS other JOIN jobs AS me ON other.account = me.account \
                     WHERE me.id = $1 AND other.id <> $1 AND other.provider IN ({{texts:$2}}) AND other.{OPEN} \
                         AND other.state <> 'sending' AND other.lease_until > {{now}}) AS active_of_account, \
                 (SELECT count(DISTINCT lease_owner) FROM jobs WHERE provider IN ({{texts:$2}}) AND {OPEN} \
                     AND lease_until > {{now}}) AS workers, \
                 (SELECT CAST(avg(took_ms) AS bigint) FROM ( \
                     SELECT {{ms:ended_at}} - {{ms:began_at}} AS took_ms FROM attempts \
                     WHERE provider = (SELECT provider FROM jobs WHERE id = $1) \
                         AND ended_at > {{after:(0 - 600000)}} AND outcome <> 'not_sent' \
                     ORDER BY ended_at DESC LIMIT 50) AS lately) AS hold_ms"
        );
        let own = format!(
            "SELECT lookups, resend, {LOST_HOLDERS} AS lost_holders, \
                 (SELECT {{ms:max(began_at)}} FROM attempts WHERE attempts.job_id = jobs.id \
                     AND kind = 'charge' AND (ended_at IS NULL OR outcome IN ('unknown', 'in_progress'))) \
                 AS unknown_since_ms \
             FROM jobs WHERE id = $1"
        );
        Self {
            now: dialect.render("SELECT {now_ms} AS now_ms"),
            own: dialect.render(&own),
            around: dialect.render(&around),
            rejected: dialect.render(
                "SELECT {ms:at} AS at_ms, lane, reason, detail FROM rejected_messages WHERE job_id = $1 \
                 ORDER BY id DESC LIMIT 5",
            ),
            backlog: BacklogPositionStatements::new(dialect),
        }
    }
}

impl Database {
    /// A job's neighbours in the queue, whether the ledger has the job or not. `sharing`: the providers of its quota.
    pub async fn queue_position(
        &self,
        id: &JobId,
        sharing: &[ProviderName],
    ) -> Result<LedgerQueuePosition, LedgerError> {
        let rejected = self.engine.query(&self.sql.operator.queue_position.rejected, id_args(id)).await?;
        let rejected = read_or_log(&rejected, "rejected_messages", "lane", rejection);
        let own = self.engine.query(&self.sql.operator.queue_position.own, id_args(id)).await?;
        let own = own.first().map(job_progress).transpose()?.unwrap_or_default();
        let names: Vec<&str> = sharing.iter().map(ProviderName::as_str).collect();
        let names = serde_json::Value::from(names).to_string();
        let args = Args::from([id.as_str().into(), names.into()]);
        let around = self.engine.query(&self.sql.operator.queue_position.around, args).await?;
        let around = around.first().ok_or_else(|| corrupt("jobs_before", "is missing"))?;
        let many = |column: &str| u64::try_from(around.int(column)?).map_err(|_| corrupt(column, "is negative"));
        let place = self.sql.operator.queue_position.backlog.place(&*self.engine, id).await?;
        let (jobs_ahead, cost_ahead) = match &place {
            Some(place) => {
                let jobs = place.claimed_before.saturating_add(many("active_before")?);
                (jobs, jobs)
            }
            None => (many("jobs_before")?, many("cost_before")?),
        };
        let active_of_account = many("active_of_account")?;
        let backlog = place.map(|place| BacklogPosition {
            before_in_flow: place.before_in_flow,
            account_ahead: place.urgent_of_account.saturating_add(active_of_account),
            flow: place.flow,
        });
        let (due, active) = (many("due")?, many("active")?);
        let (workers, hold) = (around.count("workers")?, around.opt_ms("hold_ms")?);
        // Last, so that nothing that was read is later than this.
        let now = self.engine.query(&self.sql.operator.queue_position.now, Args::from([])).await?;
        let now = now.first().map_or(Ok(DatabaseTime(0)), |row| at(row, "now_ms"))?;
        Ok(LedgerQueuePosition {
            now,
            rejected,
            progress: own,
            backlog,
            jobs_ahead,
            cost_ahead,
            due,
            active,
            workers,
            mean_request_time: hold,
        })
    }
}

fn job_progress(row: &SqlRow) -> Result<JobProgress, LedgerError> {
    let resend = Resend::from_name(row.opt_text("resend")?.as_deref());
    Ok(JobProgress {
        lookups: row.count("lookups")?,
        resend: resend.ok_or_else(|| corrupt("resend", "has no known value"))?,
        lost_holders: row.count("lost_holders")?,
        unknown_since: opt_at(row, "unknown_since_ms")?,
    })
}

fn rejection(row: &SqlRow) -> Result<Rejection, LedgerError> {
    Ok(Rejection {
        at: at(row, "at_ms")?,
        lane: row.text("lane")?,
        reason: row.text("reason")?,
        detail: row.text("detail")?,
    })
}
