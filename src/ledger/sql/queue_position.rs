//! The queries for a payment's neighbours: jobs ahead of it, active jobs, and rejected messages with its id.
//!
//! Jobs ahead are those that are due earlier or more urgent; for a job of the backlog, those that are expected to be
//! claimed before it. No query takes a lock. Of the backlog, the jobs of the job's own flow are read, and of other flows
//! only their rows.

use super::backlog::{FLOW_COLUMNS, TAG_PER_COST, account_of, class_of, flow_status, unsigned};
use super::claim::LOST_HOLDERS;
use super::dialect::Template;
use super::jobs::{at, id_args, opt_at};
use super::result::{SqlRow, corrupt, read_or_log};
use super::texts;
use super::upkeep::OPEN;
use crate::domain::disposition::Resend;
use crate::domain::explain::Rejected;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogPosition, FlowStatus, JobProgress, LedgerQueuePosition};
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;

static NOW: Template = Template::new("SELECT {now_ms} AS now_ms");

static OWN: Template = Template::made(|_| {
    format!(
        "SELECT lookups, resend, {LOST_HOLDERS} AS lost_holders, \
             (SELECT {{ms:max(began_at)}} FROM attempts WHERE attempts.job_id = jobs.id \
                 AND kind = 'charge' AND (ended_at IS NULL OR outcome IN ('unknown', 'in_progress'))) \
             AS unknown_since_ms \
         FROM jobs WHERE id = $1"
    )
});

static AROUND: Template = Template::made(|_| {
    // $1 the job, $2 the providers of its quota as JSON.
    let others = format!(
        "FROM jobs AS me JOIN jobs AS other ON other.provider IN ({{texts:$2}}) AND other.{OPEN} \
         WHERE me.id = $1 AND other.id <> me.id AND other.state <> 'sending' AND NOT other.backlog \
             AND ((other.priority > me.priority AND (other.wake_at <= me.wake_at OR other.wake_at <= {{now}})) \
                 OR (other.priority = me.priority AND (other.wake_at < me.wake_at \
                     OR (other.wake_at = me.wake_at AND other.id < me.id))))"
    );
    format!(
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
    )
});

static REJECTED: Template = Template::new(
    "SELECT {ms:at} AS at_ms, lane, reason, detail FROM rejected_messages WHERE job_id = $1 \
     ORDER BY id DESC LIMIT 5",
);

impl Database {
    /// A job's neighbours in the queue, whether the ledger has the job or not. `sharing`: the providers of its quota.
    pub async fn queue_position(
        &self,
        id: &JobId,
        sharing: &[ProviderName],
    ) -> Result<LedgerQueuePosition, LedgerError> {
        let rejected = self.query(&REJECTED, id_args(id)).await?;
        let rejected = read_or_log(&rejected, "rejected_messages", "lane", rejection);
        let own = self.query(&OWN, id_args(id)).await?;
        let own = own.first().map(job_progress).transpose()?.unwrap_or_default();
        let names = texts(sharing.iter().map(ProviderName::as_str));
        let around = self.query(&AROUND, [id.as_str().into(), names]).await?;
        let around = around.first().ok_or_else(|| corrupt("jobs_before", "is missing"))?;
        let many = |column: &str| u64::try_from(around.int(column)?).map_err(|_| corrupt(column, "is negative"));
        let place = self.backlog_place(id).await?;
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
        let now = self.query(&NOW, []).await?;
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

fn rejection(row: &SqlRow) -> Result<Rejected, LedgerError> {
    Ok(Rejected {
        at: EpochMs(row.instant("at_ms")?.0),
        lane: row.text("lane")?,
        reason: row.text("reason")?,
        detail: row.text("detail")?,
    })
}

/// The place of a job: its flow, and the jobs before it.
pub struct JobPlace {
    pub flow: FlowStatus,
    pub before_in_flow: u64,
    /// Jobs of its account in flows of more urgent classes.
    pub urgent_of_account: u64,
    /// Those of its own flow, and those of flows that are not blocked, as if each had cost 1.
    pub claimed_before: u64,
}

static PLACE: Template = Template::made(|_| {
    let (class, account) = (class_of("me"), account_of("me"));
    format!(
        "SELECT {FLOW_COLUMNS}, flows.provider, flows.tag, flows.weight, \
             (SELECT count(*) FROM jobs WHERE jobs.provider = me.provider AND {} = {class} AND {} = {account} \
                 AND jobs.backlog AND jobs.seq < me.seq) AS before_in_flow, \
             (SELECT CAST(COALESCE(sum(urgent.waiting), 0) AS bigint) FROM flows AS urgent \
                 WHERE urgent.provider = flows.provider AND urgent.account = flows.account \
                     AND urgent.account <> '' AND urgent.class < flows.class \
                     AND urgent.class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)) AS urgent_of_account \
         FROM jobs AS me {{join}} flows ON flows.provider = me.provider AND flows.class = {class} \
             AND flows.account = {account} \
         WHERE me.id = $1 AND me.backlog",
        class_of("jobs"),
        account_of("jobs"),
    )
});

/// $4 the job's own start tag, if each job costs 1. A flow's jobs have tags at equal distances.
static JOBS_BEFORE: Template = Template::made(|_| {
    format!(
        "SELECT CAST(COALESCE(sum(CASE WHEN class < $2 THEN waiting WHEN tag >= $4 THEN 0 \
             WHEN (($4 - tag) * weight + {TAG_PER_COST} - 1) / {TAG_PER_COST} < waiting \
                 THEN (($4 - tag) * weight + {TAG_PER_COST} - 1) / {TAG_PER_COST} \
             ELSE waiting END), 0) AS bigint) AS jobs \
         FROM flows WHERE provider = $1 AND queued AND class <= $2 AND NOT (class = $2 AND account = $3) \
             AND (blocked_until IS NULL OR blocked_until <= {{now}})"
    )
});

impl Database {
    /// `None` when the job is not in the backlog.
    pub async fn backlog_place(&self, job: &JobId) -> Result<Option<JobPlace>, LedgerError> {
        let rows = self.query(&PLACE, [job.as_str().into()]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let before_in_flow = row.int("before_in_flow")?;
        let cost = before_in_flow.saturating_mul(TAG_PER_COST.into()) / row.int("weight")?.max(1);
        let args = [
            row.text("provider")?.into(),
            row.int("class")?.into(),
            row.text("account")?.into(),
            row.int("tag")?.saturating_add(cost).into(),
        ];
        let others = self.query(&JOBS_BEFORE, args).await?;
        let others = others.first().map_or(Ok(0), |row| unsigned(row, "jobs"))?;
        let before_in_flow = unsigned(row, "before_in_flow")?;
        let claimed_before = others.saturating_add(before_in_flow);
        let urgent_of_account = unsigned(row, "urgent_of_account")?;
        Ok(Some(JobPlace { flow: flow_status(row)?, before_in_flow, urgent_of_account, claimed_before }))
    }
}
