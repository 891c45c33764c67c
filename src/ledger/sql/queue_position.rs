//! The queries for a payment's neighbours: jobs ahead of it, active jobs, and rejected messages with its id.
//!
//! Jobs ahead are those that are due earlier or more urgent; for a job of the backlog, those that are expected to be
//! claimed before it. No query takes a lock. Of the backlog, the jobs of the job's own flow are read, and of other flows
//! only their rows.

use super::backlog::{FLOW_COLUMNS, TAG_PER_COST, account_of, class_of};
use super::claim::IS_LOST;
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

/// Times the largest weight, 1,000, it still is a number of 64 bits.
const TAG_DISTANCE_MAX: i64 = 9_000_000_000_000_000;
/// Thousandths of a cost of 1.
const MILLI: u64 = 1_000;

static NOW: Template = Template::new("SELECT {now_ms} AS now_ms");

static OWN: Template = Template::made(|_| {
    format!(
        "SELECT lookups, resend, lost_holders + CASE WHEN {IS_LOST} AND response_by IS NULL THEN 1 ELSE 0 END AS lost_holders, \
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
    let active = |which: &str| {
        format!(
            "FROM jobs AS other JOIN jobs AS me ON {which} \
             WHERE me.id = $1 AND other.id <> $1 AND other.provider IN ({{texts:$2}}) AND other.{OPEN} \
                 AND other.state <> 'sending' AND other.holder IS NOT NULL"
        )
    };
    let active_before = active("other.priority >= me.priority");
    let active_of_account = active("other.account = me.account");
    let active_of_flow = active(&format!(
        "other.provider = me.provider AND {} = {} AND {} = {}",
        class_of("other"),
        class_of("me"),
        account_of("other"),
        account_of("me"),
    ));
    format!(
        "SELECT (SELECT count(*) {others}) AS jobs_before, \
             (SELECT CAST(COALESCE(sum(other.cost), 0) AS bigint) {others}) AS cost_before, \
             (SELECT count(*) FROM jobs WHERE provider IN ({{texts:$2}}) AND {OPEN} AND state <> 'sending' \
                 AND holder IS NOT NULL AND id <> $1) AS active, \
             (SELECT count(*) {active_before}) AS active_before, \
             (SELECT CAST(COALESCE(sum(other.cost), 0) AS bigint) {active_before}) AS active_cost_before, \
             (SELECT count(*) {active_of_account}) AS active_of_account, \
             (SELECT CAST(COALESCE(sum(other.cost), 0) AS bigint) {active_of_account}) AS active_cost_of_account, \
             (SELECT count(*) {active_of_flow}) AS active_of_flow, \
             (SELECT count(DISTINCT holder) FROM jobs WHERE provider IN ({{texts:$2}}) AND {OPEN} \
                 AND holder IS NOT NULL) AS workers, \
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
            Some(place) => (
                place.claimed_before.jobs.saturating_add(around.get("active_before")?),
                place.claimed_before.cost.saturating_add(around.get("active_cost_before")?),
            ),
            None => (around.get("jobs_before")?, around.get("cost_before")?),
        };
        let active_of_account: u64 = around.get("active_of_account")?;
        let active_of_flow: u64 = around.get("active_of_flow")?;
        let active_cost: u64 = around.get("active_cost_of_account")?;
        let backlog = place.map(|place| BacklogPosition {
            before_in_flow: place.before_in_flow.jobs,
            active_of_flow,
            others_of_account: place
                .urgent_of_account
                .jobs
                .saturating_add(active_of_account.saturating_sub(active_of_flow)),
            account_cost_ahead: place.before_in_flow.cost + place.urgent_of_account.cost + active_cost,
            account_holder: place.account_holder,
            flow: place.flow,
        });
        Ok(LedgerQueuePosition {
            rejected,
            progress,
            backlog,
            jobs_ahead,
            cost_ahead,
            active: around.get("active")?,
            workers: around.get("workers")?,
            mean_request_time: around.get("hold")?,
            // Last, so that nothing that was read is later than this.
            now: self.query_row(&NOW, []).await?.get("now")?,
        })
    }
}

from_row!(row => CostedJobs { jobs, cost });
from_row!(row => JobProgress { lookups, resend, lost_holders, unknown_since });
from_row!(row => Rejected { at, lane, reason, detail });

/// Some jobs, and their total cost.
#[derive(Clone, Copy)]
pub struct CostedJobs {
    pub jobs: u64,
    pub cost: u64,
}

/// The place of a job: its flow, and the jobs before it. The cost of each job of another flow is not read: it counts as
/// the mean of the provider's last requests or, without any, of its own flow.
pub struct JobPlace {
    pub flow: FlowStatus,
    pub before_in_flow: CostedJobs,
    /// Jobs of its account in flows of more urgent classes.
    pub urgent_of_account: CostedJobs,
    /// Those of its own flow, and those of flows that are not blocked.
    pub claimed_before: CostedJobs,
    pub account_holder: Option<AccountHolder>,
}

static PLACE: Template = Template::made(|_| {
    let (class, account) = (class_of("me"), account_of("me"));
    format!(
        "SELECT {FLOW_COLUMNS}, flows.provider, flows.tag, flows.weight, \
             (SELECT CAST(round(avg(cost) * 1000) AS bigint) FROM ( \
                 SELECT sent.cost AS cost FROM attempts {{join}} jobs AS sent ON sent.id = attempts.job_id \
                 WHERE attempts.provider = me.provider AND attempts.ended_at > {{after:(0 - 600000)}} \
                     AND attempts.kind = 'charge' \
                 ORDER BY attempts.ended_at DESC LIMIT 50) AS lately) AS mean_millicost, \
             (SELECT CAST(COALESCE(sum(urgent.waiting), 0) AS bigint) FROM flows AS urgent \
                 WHERE urgent.provider = flows.provider AND urgent.account = flows.account \
                     AND urgent.account <> '' AND urgent.class < flows.class \
                     AND urgent.class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)) AS urgent_of_account \
         FROM jobs AS me {{join}} flows ON flows.provider = me.provider AND flows.class = {class} \
             AND flows.account = {account} \
         WHERE me.id = $1 AND me.backlog",
    )
});

/// The jobs of a job's flow that are claimed before it.
static BEFORE_IN_FLOW: Template = Template::made(|_| {
    format!(
        "SELECT count(*) AS jobs, CAST(COALESCE(sum(jobs.cost), 0) AS bigint) AS cost \
         FROM jobs AS me {{join}} jobs ON jobs.provider = me.provider AND {} = {} AND {} = {} \
         WHERE me.id = $1 AND jobs.backlog AND jobs.seq < me.seq",
        class_of("jobs"),
        class_of("me"),
        account_of("jobs"),
        account_of("me"),
    )
});

/// $4 the job's own start tag, $5 the units of a tag for each job of another flow, at weight 1: if all jobs cost the same,
/// a flow's jobs have tags at equal distances.
static JOBS_BEFORE: Template = Template::new(
    "SELECT CAST(COALESCE(sum(CASE WHEN class < $2 THEN waiting WHEN tag >= $4 THEN 0 \
         WHEN (($4 - tag) * weight + $5 - 1) / $5 < waiting THEN (($4 - tag) * weight + $5 - 1) / $5 \
         ELSE waiting END), 0) AS bigint) AS jobs \
     FROM flows WHERE provider = $1 AND queued AND class <= $2 AND NOT (class = $2 AND account = $3) \
         AND (blocked_until IS NULL OR blocked_until <= {now})",
);

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
        let tag: i64 = row.get("tag")?;
        let in_flow = CostedJobs::from_row(&self.query_row(&BEFORE_IN_FLOW, args![job]).await?)?;
        // Without a request lately, as its own flow.
        let mean_in_flow = in_flow.cost.saturating_mul(MILLI).checked_div(in_flow.jobs);
        let millicost = row.get::<Option<u64>>("mean_millicost")?.or(mean_in_flow).unwrap_or(MILLI).max(MILLI);
        let others = |jobs: u64| CostedJobs { jobs, cost: jobs.saturating_mul(millicost) / MILLI };
        let distance = i64::try_from(in_flow.cost).unwrap_or(i64::MAX).saturating_mul(TAG_PER_COST.into())
            / row.get::<i64>("weight")?.max(1);
        let distance = distance.min(TAG_DISTANCE_MAX);
        let (provider, class, account): (String, i64, String) =
            (row.get("provider")?, row.get("class")?, row.get("account")?);
        let holder = self.query_one(&ACCOUNT_HOLDER, args![&provider, &account]).await?;
        let units = i64::try_from(u64::from(TAG_PER_COST) * millicost / MILLI).unwrap_or(i64::MAX);
        let before = args![provider, class, account, tag.saturating_add(distance), units];
        let claimed = others(self.query_row(&JOBS_BEFORE, before).await?.get("jobs")?);
        Ok(Some(JobPlace {
            flow: FlowStatus::from_row(&row)?,
            before_in_flow: in_flow,
            urgent_of_account: others(row.get("urgent_of_account")?),
            claimed_before: CostedJobs {
                jobs: claimed.jobs.saturating_add(in_flow.jobs),
                cost: claimed.cost.saturating_add(in_flow.cost),
            },
            account_holder: holder.as_ref().map(AccountHolder::from_row).transpose()?,
        }))
    }
}
