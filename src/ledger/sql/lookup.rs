//! The two commits of a look-up: that it is in flight, and what it found.
//!
//! A look-up begins only from state `unknown`, and the job stays `unknown` until a response or an operator decides.
//! Only one request of a job is in flight at a time. See `docs/decisions/0034-look-ups-of-unknown-outcomes.md`.

use std::sync::Arc;

use super::attempt::{
    CLOSE_ATTEMPT, WRITE_EVENT, WRITTEN_COLUMNS, conflict_checked_reason, conflict_checked_state, log_shared_charge,
};
use super::copies::{self, RETURN_PLAN_COLUMNS, return_plan};
use super::dialect::{Dialect, JobWrite, JobWriteText, Returning};
use super::engine::Value;
use super::outbox::final_state;
use super::wait::{WaitParameters, wait_args};
use super::{fenced_write, storable};
use crate::domain::outcome::FinalState;
use crate::domain::time::copy_step;
use crate::ledger::copies::ReturnPlan;
use crate::ledger::database::Database;
use crate::ledger::{BeginResult, FencedWrite, JobState, LeaseToken, LedgerError, LookupEnd};

/// A look-up of this job that has not ended.
const ON_WIRE: &str = "EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id \
     AND attempts.number = jobs.last_attempt AND attempts.outcome IS NULL)";

const HELD: &str = "id = $1 AND fence = $2 AND lease_until IS NOT NULL AND jobs.state || '' = 'unknown'";

pub struct LookupStatements {
    begin: JobWrite,
    wait: JobWrite,
    finalize: JobWrite,
}

impl LookupStatements {
    pub fn new(dialect: Dialect) -> Self {
        let begin = format!(
            "UPDATE jobs SET last_attempt = last_attempt + 1, lookups = lookups + 1, lost_holders = 0, updated_at = {{now}} {{from}} \
             WHERE {HELD} AND lease_until > {{now}} AND NOT {ON_WIRE}"
        );
        let delayed = copies::delayed_copy_update("{after:$9}", "$11", "false");
        let kept = format!("{WRITTEN_COLUMNS}, {RETURN_PLAN_COLUMNS}");
        let waits = WaitParameters { detail: "$10", code: "$12", limit: "$13" }.begin("{after:$9}");
        let rest = format!(
            "UPDATE jobs SET resend = CASE WHEN $8 THEN 'granted' ELSE resend END, {waits}, \
                 {delayed}, lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
             WHERE {HELD} AND last_attempt = $3 AND {ON_WIRE}"
        );
        let finalize = format!(
            "UPDATE jobs SET state = {}, provider_reference = COALESCE($10, provider_reference), reason = {}, \
                 resend = CASE WHEN $8 THEN 'granted' ELSE resend END, \
                 lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
             WHERE {HELD} AND last_attempt = $3 AND {ON_WIRE}",
            conflict_checked_state("$9"),
            conflict_checked_reason("$9", "$11"),
        );
        Self {
            begin: dialect.job_write(&JobWriteText {
                update: &begin,
                written_columns: WRITTEN_COLUMNS,
                effects: &["INSERT INTO attempts (job_id, number, provider, began_at, account, reference, kind) \
                         SELECT job.id, job.last_attempt, job.provider, job.updated_at, job.account, job.reference, \
                             'lookup' FROM {job}"],
                returning: Returning::Job("last_attempt"),
            }),
            wait: dialect.job_write(&JobWriteText {
                update: &rest,
                written_columns: &kept,
                effects: &[CLOSE_ATTEMPT],
                returning: Returning::Job(RETURN_PLAN_COLUMNS),
            }),
            finalize: dialect.job_write(&JobWriteText {
                update: &finalize,
                written_columns: WRITTEN_COLUMNS,
                effects: &[CLOSE_ATTEMPT, WRITE_EVENT],
                returning: Returning::Job("id, state, reason"),
            }),
        }
    }
}

impl Database {
    /// Commits that a look-up of an `unknown` job begins, before the first byte is sent. The job stays `unknown`.
    pub async fn begin_lookup(&self, lease: &LeaseToken) -> Result<BeginResult, LedgerError> {
        let args: [Value; 2] = [lease.id.as_str().into(), lease.fence.into()];
        match self.engine.execute_one(&self.sql.lookup.begin, &Arc::from(args)).await? {
            Some(row) => Ok(BeginResult::Attempt(row.count("last_attempt")?)),
            None => Ok(BeginResult::Stale),
        }
    }

    /// Commits the result of a look-up and the job's next state, like [`Database::finish_attempt`]. Returns the final
    /// state, if one was written (`review` for another payment's charge), and the return plan of a waiting job. Here,
    /// [`JobState::Waiting`] becomes `unknown`.
    pub async fn finish_lookup(
        &self,
        lease: &LeaseToken,
        end: &LookupEnd,
        next: &JobState,
    ) -> Result<(FencedWrite, Option<FinalState>, Option<ReturnPlan>), LedgerError> {
        let mut args: Vec<Value> = vec![
            lease.id.as_str().into(),
            lease.fence.into(),
            end.number.into(),
            end.outcome.into(),
            end.status.map(i64::from).into(),
            storable(&end.detail).into(),
            // Never counted.
            false.into(),
            end.grants_resend.into(),
        ];
        let write = match next {
            JobState::Waiting { wait, reason } | JobState::Unknown { wait, reason } => {
                let [detail, code, limit] = wait_args(reason);
                args.extend([(*wait).into(), detail, copy_step(*wait).into(), code, limit]);
                &self.sql.lookup.wait
            }
            JobState::Final { state, reason, reference } => {
                args.extend([state.name().into(), reference.as_deref().map(storable).into(), storable(reason).into()]);
                &self.sql.lookup.finalize
            }
        };
        let row = self.engine.execute_one(write, &Arc::from(args)).await?;
        log_shared_charge(lease, next, row.as_ref())?;
        let is_final = matches!(next, JobState::Final { .. });
        let state = row.as_ref().filter(|_| is_final).map(final_state).transpose()?;
        let back = row.as_ref().filter(|_| !is_final).map(return_plan).transpose()?;
        Ok((fenced_write(row.is_some()), state, back))
    }
}
