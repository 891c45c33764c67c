//! The SQL of a lane's backlog: recording and returning jobs; claims in `claim`, blocks, reports
//! and repair in `flows`, returns without a worker in `returns`.
//!
//! A job is written and counted in its flow in one commit. A flow that has had no job starts at its class's virtual
//! time, so it does not make up for the past. A new flow has its account's weight. The flows of a batch are written in
//! the order of their keys.
//!
//! Lock order: jobs, then flows by key. So batches of several workers do not deadlock. A dispatcher locks flows first,
//! and never waits for a job's lock. See `docs/decisions/0040-flows-and-backlog.md`.

use std::time::Duration;

use super::attempt::{CLOSE_LEFT_OPEN, WRITTEN_COLUMNS};
use super::claim::{Recorded, record_args};
use super::dialect::{Dialect, JobWriteText, Template, WriteTemplate};
use super::engine::{Args, Value, args};
use super::lease::{WaitParameters, wait_args};
use super::result::{FromRow, SqlRow, read};
use super::{fenced_write, storable};
use crate::domain::fair_order::FairClaim;
use crate::domain::job::{ContentHash, Job};
use crate::ledger::backlog::{
    BacklogClaim, BacklogClaimRequest, BacklogRecord, BacklogReturn, BlockedFlow, FlowBlock, FlowStatus,
};
use crate::ledger::database::Database;
use crate::ledger::{FencedWrite, LeaseToken, LedgerError};

mod claim;
mod flows;
mod returns;

/// A tag's units for each unit of cost, at weight 1. At the largest weight, 1,000, a cost of 1 is still 1,000 units.
pub const TAG_PER_COST: u32 = 1_000_000;

/// As constraint `blocked_limit_is_at_most_255_characters` has it.
const LIMIT_NAME_CHARS_MAX: usize = 255;

/// The class of a job; the expression of index `jobs_in_backlog`.
pub fn class_of(jobs: &str) -> String {
    format!("(CASE WHEN {jobs}.state = 'unknown' THEN 0 ELSE 10 - {jobs}.priority END)")
}

/// The account of a job's flow; the expression of index `jobs_in_backlog`.
pub fn account_of(jobs: &str) -> String {
    format!("COALESCE({jobs}.account, '')")
}

/// The virtual time of a class, 0 before its first claim.
fn virtual_time(provider: &str, class: &str) -> String {
    format!(
        "COALESCE((SELECT clock.virtual_time FROM flow_clocks AS clock \
             WHERE clock.provider = {provider} AND clock.class = {class}), 0)"
    )
}

/// The weight of an account's flows, 1 without a row of `account_overrides` for all its limits.
fn account_weight(provider: &str, account: &str) -> String {
    format!(
        "COALESCE((SELECT own.weight FROM account_overrides AS own \
             WHERE own.provider = {provider} AND own.account = {account} AND own.limit_name IS NULL), 1)"
    )
}

/// An update of some flows of lane $1, locked in the order of their keys. Returns their accounts.
fn update_flows(dialect: Dialect, set: &str, which: &str, lock: &str) -> String {
    match dialect {
        Dialect::Postgres => format!(
            "WITH meant AS MATERIALIZED (\
                 SELECT class AS flow_class, account AS flow_account FROM flows WHERE {which} \
                 ORDER BY class, account {lock}) \
             UPDATE flows SET {set} FROM meant \
             WHERE flows.provider = $1 AND flows.class = flow_class AND flows.account = flow_account \
             RETURNING flows.account"
        ),
        Dialect::Sqlite => format!("UPDATE flows SET {set} WHERE {which} RETURNING account"),
    }
}

impl Database {
    /// Claims the next jobs of a lane. A flow whose block has ended takes part.
    pub async fn claim_backlog(&self, request: &BacklogClaimRequest<'_>) -> Result<BacklogClaim, LedgerError> {
        let claim = self.claim_free_flows(request).await?;
        let BacklogClaim::Claimed { jobs, next_wake: Some(Duration::ZERO) } = claim else { return Ok(claim) };
        // A block has ended, most often one at a time.
        self.wake_flows(request.lane).await?;
        let rest = request.bounds.at_most.saturating_sub(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
        if rest == 0 {
            let next_wake = self.next_wake(request.lane).await?;
            return Ok(BacklogClaim::Claimed { jobs, next_wake });
        }
        let bounds = FairClaim { at_most: rest, ..request.bounds.clone() };
        let request = BacklogClaimRequest { bounds: &bounds, ..*request };
        match self.claim_free_flows(&request).await {
            Ok(BacklogClaim::Claimed { jobs: more, next_wake }) => {
                Ok(BacklogClaim::Claimed { jobs: jobs.into_iter().chain(more).collect(), next_wake })
            }
            Err(error) if jobs.is_empty() => Err(error),
            // The jobs of the first claim are this caller's.
            Ok(BacklogClaim::Busy) | Err(_) => Ok(BacklogClaim::Claimed { jobs, next_wake: Some(Duration::ZERO) }),
        }
    }

    /// Runs `waiting`. If another session has one of its locks for longer than a batch takes, runs `skipping`, which
    /// leaves such rows out.
    async fn query_or_skip_locked(
        &self,
        waiting: &Template,
        skipping: &Template,
        args: Args,
    ) -> Result<Vec<SqlRow>, LedgerError> {
        match self.engine.query_unless_locked(waiting.sql(self.dialect()), args.clone()).await? {
            Some(rows) => Ok(rows),
            None => self.query_by_index(skipping, args).await,
        }
    }
}

/// The columns of a [`FlowStatus`].
pub const FLOW_COLUMNS: &str = "flows.class, flows.account, flows.waiting, {until:flows.blocked_until} AS blocked_ms, \
     flows.blocked_reason, flows.blocked_limit";

impl FromRow for FlowStatus {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let account = row.get::<String>("account")?;
        let blocked = match row.get("blocked")? {
            Some(left) => {
                Some(BlockedFlow { left, reason: row.get("blocked_reason")?, limit: row.get("blocked_limit")? })
            }
            None => None,
        };
        Ok(read!(row => FlowStatus {
            class, waiting;
            account: if account.is_empty() { None } else { Some(row.get("account")?) },
            blocked: blocked
        }))
    }
}

/// A limit's name, made storable.
fn limit_name(name: &str) -> String {
    storable(name).chars().take(LIMIT_NAME_CHARS_MAX).collect()
}

/// The milliseconds, the code and the limit of a block, or NULLs.
fn block_args(block: Option<&FlowBlock>) -> [Value; 3] {
    args![
        block.map(|block| block.wait.min(FlowBlock::WAIT_MAX)),
        block.map(|block| block.reason.code()),
        block.and_then(|block| block.limit.as_deref()).map(limit_name)
    ]
}

/// How often a record retries when the row changed between its statements.
const LOOKS_MAX: u32 = 4;

/// What [`count_in`] needs of the written job.
const COUNTED_COLUMNS: &str =
    "jobs.id, jobs.provider, jobs.state, jobs.priority, jobs.account, jobs.cost, jobs.backlog, jobs.wake_at";

/// What [`count_in`] and [`CLOSE_LEFT_OPEN`] need of the written job.
pub const COUNTED_AND_WRITTEN_COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.account, jobs.reference, \
     jobs.last_attempt, jobs.updated_at, jobs.priority, jobs.cost, jobs.backlog";

/// A job that is not due sleeps, and says so.
static RECORD: WriteTemplate = WriteTemplate::in_order_of_arrival(|| JobWriteText {
    update: "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
         reference, cost, priority, not_before, expires_at, payload, state, wake_at, backlog, fence, created_at, \
         updated_at, wait_reason, wait_since, wait_until, wait_request, wait_begun_at) \
     SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {at:$12}, {at:$13}, $14, 'waiting', \
         CASE WHEN {at:$12} > {now} THEN {at:$12} ELSE {now} END, COALESCE({at:$12} <= {now}, true), 0, {now}, \
         {now}, CASE WHEN {at:$12} > {now} THEN 'not_before' END, CASE WHEN {at:$12} > {now} THEN {now} END, \
         CASE WHEN {at:$12} > {now} THEN {at:$12} END, CASE WHEN {at:$12} > {now} THEN 1 END, \
         CASE WHEN {at:$12} > {now} THEN {now} END {from} \
     WHERE true ON CONFLICT DO NOTHING"
        .into(),
    written_columns: COUNTED_COLUMNS.into(),
    effects: vec![count_in().into()],
    returning: "{until:wake_at} AS wait_ms",
});

const NOT_DUE: &str = "COALESCE(not_before > {now}, false)";

/// The wait of a job that returns.
fn return_wait() -> String {
    let wake = format!("CASE WHEN {NOT_DUE} THEN not_before WHEN wake_at > {{now}} THEN {{now}} ELSE wake_at END");
    WaitParameters { detail: "$3", code: "$8", limit: "$9" }
        .begin_or_go_on_until(&wake, &format!("COALESCE({{after:$4}}, {wake})"))
}

static RETURN_JOB: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET backlog = NOT {NOT_DUE}, {}, lost_holders = 0, \
             holder = NULL, response_by = NULL, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND fence = $2 AND holder IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')",
        return_wait(),
    )
    .into(),
    written_columns: format!("{WRITTEN_COLUMNS}, jobs.priority, jobs.cost, jobs.backlog").into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), count_returned().into()],
    returning: "backlog",
});

impl Database {
    /// Records a new job without a lease: in the backlog, or asleep until its `not_before`. The write may wait this long
    /// for others to be committed with. Jobs of one batch get their place in the order of the calls. Once this has
    /// returned, the ledger alone gives the job to a worker.
    pub async fn record_backlog(
        &self,
        job: &Job,
        hash: ContentHash,
        max_batch_delay: Duration,
    ) -> Result<BacklogRecord, LedgerError> {
        let args: Args = record_args(job, hash).into();
        for _ in 0..LOOKS_MAX {
            if let Some(row) = self.write(&RECORD, args.clone(), max_batch_delay).await? {
                return Ok(BacklogRecord::Recorded { wait: row.get("wait")? });
            }
            match self.recorded(job, hash).await? {
                Recorded::Same => return Ok(BacklogRecord::Known),
                Recorded::Conflict(conflict) => return Ok(BacklogRecord::Conflict(conflict)),
                Recorded::Nothing => {}
            }
        }
        let id = &job.id;
        Err(LedgerError::StatementFailed(format!("payment {id} could not be recorded: rows in its way come and go")))
    }

    /// Releases an active job without a request in flight into the backlog, at its former place in its flow. A job whose
    /// `not_before` lies ahead sleeps until then.
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

/// Counts a job that enters the backlog in its flow.
pub fn count_in() -> String {
    let (class, account) = (class_of("job"), account_of("job"));
    format!(
        "INSERT INTO flows (provider, class, account, tag, weight, waiting) \
         SELECT added.provider, added.class, added.account, {}, {}, added.jobs \
         FROM (SELECT job.provider AS provider, {class} AS class, {account} AS account, count(*) AS jobs \
               FROM {{job}} WHERE job.backlog GROUP BY job.provider, {class}, {account}) AS added \
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
