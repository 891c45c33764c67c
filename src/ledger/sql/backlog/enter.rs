//! The statements that put a job into the backlog: a new job, and an active one.
//!
//! Each writes the job and counts it in its flow, in one commit. A flow that has had no job starts at its class's
//! virtual time, so it does not make up for the past. A new flow has its account's weight. The flows of a batch are
//! written in the order of their keys.

use std::time::Duration;

use super::{TAG_PER_COST, account_of, account_weight, block_args, class_of, virtual_time};
use crate::domain::job::{ContentHash, Job};
use crate::faults;
use crate::faults::Bug;
use crate::ledger::backlog::{BacklogRecord, BacklogReturn};
use crate::ledger::database::Database;
use crate::ledger::sql::attempt::{CLOSE_LEFT_OPEN, WRITTEN_COLUMNS};
use crate::ledger::sql::claim::{Recorded, record_args};
use crate::ledger::sql::dialect::{JobWriteText, Returning, Template, WriteTemplate};
use crate::ledger::sql::engine::{Args, Value, args};
use crate::ledger::sql::fenced_write;
use crate::ledger::sql::lease::{WaitParameters, wait_args};
use crate::ledger::{FencedWrite, LeaseToken, LedgerError};

/// How often a record retries when the row changed between its statements.
const LOOKS_MAX: u32 = 4;
/// The arguments of a record: those of a claim without owner and lease.
const RECORD_ARGS: usize = 14;

/// What [`count_in`] needs of the written job.
const COUNTED_COLUMNS: &str =
    "jobs.id, jobs.provider, jobs.state, jobs.priority, jobs.account, jobs.cost, jobs.backlog";

/// The message that brought the job is copy 0, and superseded from now on.
static RECORD: WriteTemplate = WriteTemplate::in_order_of_arrival(|| JobWriteText {
    update: "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
         reference, cost, priority, not_before, expires_at, payload, state, wake_at, backlog, unqueued, copy, fence, \
         created_at, updated_at) \
     SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'waiting', \
         CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, COALESCE({at:$12} <= {now}, true), \
         COALESCE({at:$12} > {now}, false), 1, 0, {now}, {now} {from} \
     WHERE true ON CONFLICT DO NOTHING"
        .into(),
    written_columns: COUNTED_COLUMNS.into(),
    effects: vec![count_in().into()],
    returning: Returning::Job("backlog"),
});

static LOOK: Template = Template::new(
    "SELECT provider, content_hash, state, backlog OR (unqueued AND lease_until IS NULL) AS returns \
     FROM jobs WHERE id = $1",
);

const NOT_DUE: &str = "COALESCE(not_before > {now}, false)";

/// The wait of a job that returns.
fn return_wait() -> String {
    let wake = format!("CASE WHEN {NOT_DUE} THEN not_before WHEN wake_at > {{now}} THEN {{now}} ELSE wake_at END");
    WaitParameters { detail: "$3", code: "$8", limit: "$9" }
        .begin_or_go_on_until(&wake, &format!("COALESCE({{after:$4}}, {wake})"))
}

/// Older copies of its message are superseded from now on.
static RETURN_JOB: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET backlog = NOT {NOT_DUE}, unqueued = ({NOT_DUE} AND state = 'waiting'), \
             {}, copy = copy + 1, delayed_copy = NULL, delayed_until = NULL, lost_holders = 0, \
             lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')",
        return_wait(),
    )
    .into(),
    written_columns: format!("{WRITTEN_COLUMNS}, jobs.priority, jobs.cost, jobs.backlog").into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), count_returned().into()],
    returning: Returning::Job("backlog"),
});

impl Database {
    /// What the ledger knows of the job; `None` when it could be recorded by now.
    async fn known_job(&self, job: &Job, hash: ContentHash) -> Result<Option<BacklogRecord>, LedgerError> {
        let row = match self.recorded_row(&LOOK, job, hash).await? {
            Recorded::Row(row) => row,
            Recorded::Conflict(conflict) => return Ok(Some(BacklogRecord::Conflict(conflict))),
            Recorded::Nothing => return Ok(None),
        };
        if !matches!(row.get::<String>("state")?.as_str(), "waiting" | "sending" | "unknown") {
            return Ok(Some(BacklogRecord::Finished));
        }
        Ok(Some(if row.get("returns")? { BacklogRecord::InBacklog } else { BacklogRecord::Open }))
    }

    /// Records a new job straight into the backlog, without a lease; the write may wait this long for others to be
    /// committed with. Jobs of one batch get their place in the order of the calls. After all results but
    /// [`BacklogRecord::Open`] and [`BacklogRecord::Conflict`], the message is acknowledged, and nothing else is done.
    pub async fn record_backlog(
        &self,
        job: &Job,
        hash: ContentHash,
        max_batch_delay: Duration,
    ) -> Result<BacklogRecord, LedgerError> {
        let args: Args = record_args(job, hash, "", Duration::ZERO).into_iter().take(RECORD_ARGS).collect();
        for _ in 0..LOOKS_MAX {
            if self.write(&RECORD, args.clone(), max_batch_delay).await?.is_some() {
                return Ok(BacklogRecord::Recorded);
            }
            if let Some(known) = self.known_job(job, hash).await? {
                return Ok(known);
            }
        }
        // The row that was in the way is gone each time: a claim tells what there is.
        Ok(BacklogRecord::Open)
    }

    /// Releases an active job without a request in flight into the backlog, at its former place in its flow. Older
    /// copies of its message become superseded. A job whose `not_before` lies ahead waits without a message until then.
    pub async fn return_to_backlog(
        &self,
        lease: &LeaseToken,
        how: &BacklogReturn<'_>,
    ) -> Result<FencedWrite, LedgerError> {
        let [wait, reason, limit] = block_args(how.block.as_ref());
        let [detail, code, refused_by] = how.reason.map_or_else(|| [const { Value::Text(None) }; 3], wait_args);
        let came_from_backlog = how.came_from_backlog.into();
        let [id, fence] = args![&lease.id, lease.fence];
        let args = [id, fence, detail, wait, reason, limit, came_from_backlog, code, refused_by];
        Ok(fenced_write(self.write(&RETURN_JOB, args, Duration::ZERO).await?.is_some()))
    }
}

/// What a flow becomes when jobs are added: a flow without jobs starts at the virtual time that the inserted row names.
const GROWN: &str = "waiting = flows.waiting + excluded.waiting";

/// Counts a new job in its flow.
fn count_in() -> String {
    let (class, account) = (class_of("job"), account_of("job"));
    let is_counted = if faults::bug(Bug::FlowNotCounted) { "false" } else { "job.backlog" };
    format!(
        "INSERT INTO flows (provider, class, account, tag, weight, waiting) \
         SELECT added.provider, added.class, added.account, {}, {}, added.jobs \
         FROM (SELECT job.provider AS provider, {class} AS class, {account} AS account, count(*) AS jobs \
               FROM {{job}} WHERE {is_counted} GROUP BY job.provider, {class}, {account}) AS added \
         WHERE true ORDER BY added.provider, added.class, added.account \
         ON CONFLICT (provider, class, account) DO UPDATE SET {GROWN}, \
             tag = CASE WHEN flows.waiting > 0 THEN flows.tag ELSE {{greatest}}(flows.tag, excluded.tag) END",
        virtual_time("added.provider", "added.class"),
        account_weight("added.provider", "added.account"),
    )
}

/// Counts a returned job in its flow, moves the tag back by its cost ($7), and blocks the flow ($4 to $6).
fn count_returned() -> String {
    let (class, account) = (class_of("job"), account_of("job"));
    let of = |flow: &str| {
        format!(
            "job.backlog AND job.provider = {flow}.provider AND {class} = {flow}.class AND {account} = {flow}.account"
        )
    };
    // Of several blocks in one batch, the one that ends last counts.
    let last = |value: &str| {
        format!("(SELECT {value} FROM {{job}} WHERE {} AND $4 IS NOT NULL ORDER BY $4 DESC LIMIT 1)", of("added"))
    };
    let refund = format!(
        "CAST((SELECT COALESCE(sum(CASE WHEN $7 THEN job.cost ELSE 0 END), 0) FROM {{job}} WHERE {}) AS bigint) \
             * {TAG_PER_COST} / flows.weight",
        of("flows")
    );
    let is_later = "(excluded.blocked_until IS NOT NULL \
        AND (flows.blocked_until IS NULL OR flows.blocked_until <= excluded.blocked_until))";
    let blocked =
        |column: &str| format!("{column} = CASE WHEN {is_later} THEN excluded.{column} ELSE flows.{column} END");
    format!(
        "INSERT INTO flows (\
             provider, class, account, tag, weight, waiting, blocked_until, blocked_reason, blocked_limit) \
         SELECT added.provider, added.class, added.account, {}, {}, added.jobs, {{after:added.block_ms}}, {}, {} \
         FROM (SELECT job.provider AS provider, {class} AS class, {account} AS account, count(*) AS jobs, \
                   max($4) AS block_ms \
               FROM {{job}} WHERE job.backlog GROUP BY job.provider, {class}, {account}) AS added \
         WHERE true ORDER BY added.provider, added.class, added.account \
         ON CONFLICT (provider, class, account) DO UPDATE SET {GROWN}, \
             tag = {{greatest}}(flows.tag - {refund}, CASE WHEN flows.waiting > 0 THEN 0 ELSE excluded.tag END), {}, {}, {}",
        virtual_time("added.provider", "added.class"),
        account_weight("added.provider", "added.account"),
        last("$5"),
        last("$6"),
        blocked("blocked_until"),
        blocked("blocked_reason"),
        blocked("blocked_limit"),
    )
}
