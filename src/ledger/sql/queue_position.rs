//! The queries for a payment's neighbours: jobs ahead of it, active jobs, and rejected messages with its id.
//!
//! Jobs ahead are those that are due earlier or more urgent; for a job of the backlog, those that are expected to be
//! claimed before it. No query takes a lock. Of the backlog, the jobs of the job's own flow are read, and of other flows
//! only their rows.

use super::backlog::{FLOW_COLUMNS, TAG_PER_COST, account_of, class_of};
use super::claim::LOST_HOLDERS;
use super::dialect::Template;
use super::engine::args;
use super::result::{FromRow, from_row, read_or_log};
use super::texts;
use super::upkeep::OPEN;
use crate::domain::explain::{AccountHolder, Rejected};
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogPosition, FlowStatus, JobProgress, LedgerQueuePosition};
use crate::ledger::database::Database;

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
        let rejected = read_or_log(&self.query(&REJECTED, args![id]).await?, "rejected_messages", "lane");
        let own = self.query_one(&OWN, args![id]).await?;
        let progress = own.as_ref().map(JobProgress::from_row).transpose()?.unwrap_or_default();
        let names = texts(sharing.iter().map(ProviderName::as_str));
        let around = self.query_row(&AROUND, args![id, names]).await?;
        let place = self.backlog_place(id).await?;
        let (jobs_ahead, cost_ahead) = match &place {
            Some(place) => {
                let jobs = place.claimed_before.saturating_add(around.get("active_before")?);
                (jobs, jobs)
            }
            None => (around.get("jobs_before")?, around.get("cost_before")?),
        };
        let active_of_account: u64 = around.get("active_of_account")?;
        let backlog = place.map(|place| BacklogPosition {
            before_in_flow: place.before_in_flow,
            account_ahead: place.urgent_of_account.saturating_add(active_of_account),
            account_holder: place.account_holder,
            flow: place.flow,
        });
        Ok(LedgerQueuePosition {
            rejected,
            progress,
            backlog,
            jobs_ahead,
            cost_ahead,
            due: around.get("due")?,
            active: around.get("active")?,
            workers: around.get("workers")?,
            mean_request_time: around.get("hold")?,
            // Last, so that nothing that was read is later than this.
            now: self.query_row(&NOW, []).await?.get("now")?,
        })
    }
}

from_row!(row => JobProgress { lookups, resend, lost_holders, unknown_since });
from_row!(row => Rejected { at, lane, reason, detail });

/// The place of a job: its flow, and the jobs before it.
pub struct JobPlace {
    pub flow: FlowStatus,
    pub before_in_flow: u64,
    /// Jobs of its account in flows of more urgent classes.
    pub urgent_of_account: u64,
    /// Those of its own flow, and those of flows that are not blocked, as if each had cost 1.
    pub claimed_before: u64,
    pub account_holder: Option<AccountHolder>,
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

/// The condition of a claim in order, for one account.
static ACCOUNT_HOLDER: Template = Template::new(
    "SELECT id, state FROM jobs WHERE provider = $1 AND account = $2 AND in_order AND NOT backlog \
         AND state IN ('waiting', 'sending', 'unknown', 'review') ORDER BY seq LIMIT 1",
);

from_row!(row => AccountHolder { id, state });

impl Database {
    /// `None` when the job is not in the backlog.
    pub async fn backlog_place(&self, job: &JobId) -> Result<Option<JobPlace>, LedgerError> {
        let Some(row) = self.query_one(&PLACE, args![job]).await? else { return Ok(None) };
        let (before_in_flow, tag): (u64, i64) = (row.get("before_in_flow")?, row.get("tag")?);
        let before = i64::try_from(before_in_flow).unwrap_or(i64::MAX);
        let cost = before.saturating_mul(TAG_PER_COST.into()) / row.get::<i64>("weight")?.max(1);
        let (provider, class, account): (String, i64, String) =
            (row.get("provider")?, row.get("class")?, row.get("account")?);
        let holder = self.query_one(&ACCOUNT_HOLDER, args![&provider, &account]).await?;
        let others = self.query_row(&JOBS_BEFORE, args![provider, class, account, tag.saturating_add(cost)]).await?;
        Ok(Some(JobPlace {
            flow: FlowStatus::from_row(&row)?,
            before_in_flow,
            urgent_of_account: row.get("urgent_of_account")?,
            claimed_before: others.get::<u64>("jobs")?.saturating_add(before_in_flow),
            account_holder: holder.as_ref().map(AccountHolder::from_row).transpose()?,
        }))
    }
}
