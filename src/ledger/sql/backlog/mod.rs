//! The SQL of a lane's backlog: recording, returning, claiming, blocks, reports and repair, one file each.
//!
//! Lock order: jobs, then flows by key. So batches of several workers do not deadlock. A dispatcher locks flows first,
//! and never waits for a job's lock. See `docs/decisions/0040-flows-and-backlog.md`.

use std::time::Duration;

use super::dialect::{Dialect, Template};
use super::engine::{Args, Value, args};
use super::result::{FromRow, SqlRow, read};
use super::storable;
use crate::domain::fair_order::FairClaim;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{BacklogClaim, BacklogClaimRequest, BlockedFlow, FlowBlock, FlowStatus};
use crate::ledger::database::Database;

mod claim;
mod enter;
mod flows;

/// A tag's units for each unit of cost, at weight 1: thousandths of it are exact at the largest weight.
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
