//! The lease statements: renewing leases of active jobs, and releasing a job without having sent anything.
//!
//! Every statement checks the fencing token and the lease. The token alone would still match after a release, until the
//! next claim. See `docs/decisions/0030-leases-and-operator-decisions.md`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::{CLOSE_LEFT_OPEN, WRITE_EVENT, WRITTEN_COLUMNS};
use super::batcher::Batcher;
use super::copies::{self, RETURN_PLAN_COLUMNS, return_plan};
use super::dialect::{Dialect, JobWriteText, Returning};
use super::engine::{Sql, Value};
use super::wait::{WaitParameters, wait_args};
use super::{fenced_write, storable};
use crate::domain::time::copy_step;
use crate::domain::wait_reason::WaitReason;
use crate::ledger::copies::ReturnPlan;
use crate::ledger::database::Database;
use crate::ledger::{FencedWrite, JobState, LeaseToken, LedgerError};

/// Leases prolonged by one statement. Their rows stay locked as long as it runs, and the end of one of those jobs waits
/// for it.
const RENEW_BATCH_MAX: usize = 250;

pub struct LeaseStatements {
    renew: Sql,
    wait: Batcher,
    finalize: Batcher,
    release: Batcher,
    wait_on: Batcher,
}

impl LeaseStatements {
    pub fn new(dialect: Dialect) -> Self {
        // A job that may have been charged never returns to `waiting`, whatever the caller says.
        let delayed = copies::delayed_copy_update("{after:$4}", "$6", "NOT (maybe_charged OR $3)");
        let waits = WaitParameters { detail: "$5", code: "$7", limit: "$8" }.begin_or_go_on("{after:$4}");
        let rest = format!(
            "UPDATE jobs SET state = CASE WHEN maybe_charged OR $3 THEN 'unknown' ELSE 'waiting' END, \
                        maybe_charged = (maybe_charged OR $3), {waits}, {delayed}, lost_holders = 0, \
                        lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
                    WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')"
        );
        let finalize = "UPDATE jobs SET state = $3, provider_reference = COALESCE($4, provider_reference), reason = $5, \
                          lease_owner = NULL, lease_until = NULL, updated_at = {now} {from} \
                      WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')";
        // A worker that stops releases all of its jobs at once, except those that it may have sent: they keep their
        // lease until it ends.
        let release = "UPDATE jobs SET lease_owner = NULL, lease_until = NULL, updated_at = {now}, \
                           wake_at = CASE WHEN not_before > {now} THEN not_before ELSE {now} END {from} \
                       WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')";
        // Reason and start of the wait stay. A job that was never delayed waits for its time from now on.
        let not_before = WaitReason::NotBefore.code();
        let due = "CASE WHEN not_before > wake_at THEN not_before ELSE wake_at END";
        let delayed = copies::delayed_copy_update(due, "$3", "NOT maybe_charged");
        let wait_on = format!(
            "UPDATE jobs SET wake_at = {due}, \
                 wait_since = CASE WHEN wait_reason IS NOT NULL AND wait_request = last_attempt + 1 \
                     THEN wait_since ELSE {{now}} END, \
                 wait_reason = COALESCE(wait_reason, '{not_before}'), wait_until = {due}, \
                 wait_request = last_attempt + 1, \
                 wait_begun_at = COALESCE(wait_begun_at, {{now}}), {delayed}, \
                 lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
             WHERE id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' IN ('waiting', 'unknown')"
        );
        let kept = format!("{WRITTEN_COLUMNS}, {RETURN_PLAN_COLUMNS}");
        Self {
            renew: dialect.render(
                "UPDATE jobs SET lease_until = {after:$2} WHERE id IN (\
                     SELECT jobs.id FROM {held:$1} {join} jobs ON jobs.id = held.id AND jobs.fence = held.fence \
                     WHERE jobs.lease_until IS NOT NULL {unlocked}) \
                 RETURNING id, fence",
            ),
            wait: Batcher::new(dialect.job_write(&JobWriteText {
                update: &rest,
                written_columns: &kept,
                effects: &[CLOSE_LEFT_OPEN],
                returning: Returning::Job(RETURN_PLAN_COLUMNS),
            })),
            finalize: Batcher::new(dialect.job_write(&JobWriteText {
                update: finalize,
                written_columns: WRITTEN_COLUMNS,
                effects: &[CLOSE_LEFT_OPEN, WRITE_EVENT],
                returning: Returning::Job("id"),
            })),
            release: Batcher::new(dialect.job_write(&JobWriteText {
                update: release,
                written_columns: WRITTEN_COLUMNS,
                effects: &[CLOSE_LEFT_OPEN],
                returning: Returning::Job("id"),
            })),
            wait_on: Batcher::new(dialect.job_write(&JobWriteText {
                update: &wait_on,
                written_columns: &kept,
                effects: &[CLOSE_LEFT_OPEN],
                returning: Returning::Job(RETURN_PLAN_COLUMNS),
            })),
        }
    }
}

impl Database {
    /// Prolongs the leases of active jobs. Returns the leases that are lost, and those whose row is being written at
    /// this moment: most often that write finishes the job.
    pub async fn renew(&self, leases: &[LeaseToken], lease: Duration) -> Result<Vec<LeaseToken>, LedgerError> {
        // Ordered, so that two renewals cannot deadlock on each other's rows.
        let mut ordered: Vec<&LeaseToken> = leases.iter().collect();
        ordered.sort_by(|a, b| a.id.cmp(&b.id));
        let mut kept: HashSet<(String, i64)> = HashSet::new();
        let mut first = Ok(());
        for some in ordered.chunks(RENEW_BATCH_MAX) {
            let list: Vec<_> =
                some.iter().map(|token| serde_json::json!({"id": token.id.as_str(), "fence": token.fence})).collect();
            let args: [Value; 2] = [serde_json::Value::from(list).to_string().into(), lease.into()];
            match self.engine.query_by_index(&self.sql.lease.renew, Arc::from(args)).await {
                Ok(rows) => {
                    for row in rows {
                        kept.insert((row.text("id")?, row.int("fence")?));
                    }
                }
                // The other leases are prolonged all the same.
                Err(error) => first = first.and(Err(error)),
            }
        }
        first?;
        let lost = |token: &&LeaseToken| !kept.contains(&(token.id.as_str().to_owned(), token.fence));
        Ok(leases.iter().filter(lost).cloned().collect())
    }

    /// Commits a state change without an attempt: delayed, expired, or moved to review.
    pub async fn transition(&self, lease: &LeaseToken, next: &JobState) -> Result<FencedWrite, LedgerError> {
        Ok(self.transition_with_copy(lease, next).await?.0)
    }

    /// Changes the state like [`Database::transition`]; returns the return plan of a waiting job.
    pub async fn transition_with_copy(
        &self,
        lease: &LeaseToken,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError> {
        let mut args: Vec<Value> = vec![lease.id.as_str().into(), lease.fence.into()];
        let batcher = match next {
            JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
                let [detail, code, limit] = wait_args(reason);
                let unknown = matches!(next, JobState::Unknown { .. });
                args.extend([unknown.into(), (*wait).into(), detail, copy_step(*wait).into(), code, limit]);
                &self.sql.lease.wait
            }
            JobState::Final { state, reason, reference } => {
                let reference = reference.as_deref().map(storable);
                args.extend([state.name().into(), reference.into(), storable(reason).into()]);
                &self.sql.lease.finalize
            }
        };
        let wait = next.wait();
        let row = batcher.write(&self.engine, Arc::from(args), Duration::ZERO).await?;
        let back = row.as_ref().filter(|_| wait.is_some()).map(return_plan).transpose()?;
        Ok((fenced_write(row.is_some()), back))
    }

    /// Releases the lease; the job stays as it is and is due at once.
    pub async fn release(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        let args: [Value; 2] = [lease.id.as_str().into(), lease.fence.into()];
        Ok(fenced_write(self.sql.lease.release.write(&self.engine, Arc::from(args), Duration::ZERO).await?.is_some()))
    }

    /// Releases the lease of a job that came before it is due: its reason and `wake_at` stay.
    pub async fn release_waiting(&self, lease: &LeaseToken) -> Result<FencedWrite, LedgerError> {
        Ok(self.release_waiting_with_copy(lease, Duration::ZERO).await?.0)
    }

    /// Releases the lease; the job is looked at again after `wait` at the latest. Returns its return plan.
    pub async fn release_waiting_with_copy(
        &self,
        lease: &LeaseToken,
        wait: Duration,
    ) -> Result<(FencedWrite, Option<ReturnPlan>), LedgerError> {
        let args: [Value; 3] = [lease.id.as_str().into(), lease.fence.into(), copy_step(wait).into()];
        let row = self.sql.lease.wait_on.write(&self.engine, Arc::from(args), Duration::ZERO).await?;
        Ok((fenced_write(row.is_some()), row.as_ref().map(return_plan).transpose()?))
    }
}
