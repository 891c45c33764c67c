//! The end of jobs without a delivery: expiry, the move to review, and scrubbing of old jobs.
//!
//! A job that may have been charged never expires, and keeps that mark when it moves to review.

use std::sync::Arc;
use std::time::Duration;

use super::super::attempt::{CLOSE_LEFT_OPEN, WRITE_EVENT, WRITTEN_COLUMNS};
use super::super::dialect::{Dialect, JobWrite, JobWriteText, Returning};
use super::super::engine::{Args, Sql, Value};
use super::super::{fenced_write, storable};
use super::OPEN;
use crate::domain::job::JobId;
use crate::ledger::database::Database;
use crate::ledger::upkeep::ScrubScope;
use crate::ledger::{FencedWrite, LedgerError};

/// The condition of index `jobs_waiting_by_expiry`, and the further conditions of an expired job.
const EXPIRED: &str = "state = 'waiting' AND expires_at IS NOT NULL AND expires_at <= {now} AND NOT maybe_charged \
     AND (lease_until IS NULL OR lease_until <= {now})";

/// No limit counts a request that began longer ago: a window has at most 31 days (docs/providers.md).
pub const LIMIT_WINDOW_MAX: Duration = Duration::from_secs(32 * 86_400);

pub struct RetentionStatements {
    expired: Sql,
    expire: JobWrite,
    set_aside: JobWrite,
    scrub: Sql,
    scrub_review: Sql,
    left_messages: Sql,
    forget: Sql,
}

impl RetentionStatements {
    pub fn new(dialect: Dialect) -> Self {
        let expired = format!("SELECT id FROM jobs WHERE {EXPIRED} ORDER BY expires_at LIMIT $1");
        let expire = format!(
            "UPDATE jobs SET state = 'expired', reason = $2, fence = fence + 1, lease_owner = NULL, lease_until = NULL, \
                 updated_at = {{now}} {{from}} \
             WHERE id = $1 AND {EXPIRED}"
        );
        let set_aside = format!(
            "UPDATE jobs SET state = 'review', reason = $2, maybe_charged = (maybe_charged OR state = 'sending'), \
                 attempts = attempts + CASE WHEN state = 'sending' THEN 1 ELSE 0 END, fence = fence + 1, \
                 lease_owner = NULL, lease_until = NULL, updated_at = {{now}} {{from}} \
             WHERE id = $1 AND {OPEN} AND (lease_until IS NULL OR lease_until <= {{now}})"
        );
        // A request's address may hold the reference.
        let scrub = |state: &str| {
            dialect.render(&format!(
                "UPDATE jobs SET payload = NULL, reference = NULL, scrubbed_at = {{now}}, delayed_copy = NULL, \
                     delayed_until = NULL, frozen_url = CASE WHEN frozen_url IS NULL THEN NULL ELSE '' END, \
                     frozen_body = CASE WHEN frozen_body IS NULL THEN NULL ELSE $3 END \
                 WHERE id IN (\
                     SELECT id FROM jobs \
                     WHERE scrubbed_at IS NULL AND {state} AND updated_at <= {{after:(0 - $1)}} \
                     ORDER BY updated_at LIMIT $2 {{unlocked}}) \
                 RETURNING id"
            ))
        };
        Self {
            expired: dialect.render(&expired),
            expire: dialect.job_write(&JobWriteText {
                update: &expire,
                written_columns: WRITTEN_COLUMNS,
                effects: &[WRITE_EVENT],
                returning: Returning::Job("id"),
            }),
            set_aside: dialect.job_write(&JobWriteText {
                update: &set_aside,
                written_columns: WRITTEN_COLUMNS,
                effects: &[CLOSE_LEFT_OPEN, WRITE_EVENT],
                returning: Returning::Job("id"),
            }),
            scrub: scrub("state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')"),
            scrub_review: scrub("state = 'review'"),
            // An erased job is scrubbed, and its message may be in the lane's queue still: the condition of index
            // `jobs_with_a_message_left`.
            left_messages: dialect.render(
                "UPDATE jobs SET delayed_copy = NULL, delayed_until = NULL \
                 WHERE id IN (\
                     SELECT id FROM jobs \
                     WHERE delayed_until <= created_at AND scrubbed_at IS NOT NULL AND updated_at <= {after:(0 - $1)} \
                     LIMIT $2 {unlocked}) \
                 RETURNING id",
            ),
            // As index `attempts_with_a_reference` has it.
            forget: dialect.render(
                "UPDATE attempts SET reference = NULL \
                 WHERE (job_id, number) IN (\
                     SELECT job_id, number FROM attempts \
                     WHERE (reference || '') IS NOT NULL AND began_at <= {after:(0 - $1)} ORDER BY began_at LIMIT $2 {unlocked}) \
                 RETURNING job_id",
            ),
        }
    }
}

impl Database {
    /// Expires waiting jobs whose `expires_at` has passed, with their events; returns how many. Jobs that may have been
    /// charged, and active jobs, stay as they are.
    pub async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError> {
        let rows = self.engine.query(&self.sql.upkeep.ending.expired, Arc::from([at_most.into()])).await?;
        let mut expired = 0;
        for row in rows {
            let args: Args = Arc::from([row.text("id")?.into(), storable(reason).into()]);
            // One transaction for each job: it is as small as a worker's own, and an event is never without its state.
            let done = self.engine.atomically(self.sql.upkeep.ending.expire.steps(&args)).await?;
            expired += u32::from(done.is_some());
        }
        Ok(expired)
    }

    /// Moves an open job to review. [`FencedWrite::Stale`] when it is finished, or a worker holds its lease. If its
    /// request was in flight, its outcome is unknown from then on.
    pub async fn move_to_review(&self, id: &JobId, reason: &str) -> Result<FencedWrite, LedgerError> {
        let args: [Value; 2] = [id.as_str().into(), storable(reason).into()];
        Ok(fenced_write(
            self.engine.atomically(self.sql.upkeep.ending.set_aside.steps(&Arc::from(args))).await?.is_some(),
        ))
    }

    /// Empties payload, reference, and the address and body of the request of jobs that finished, or entered review,
    /// longer than this ago; returns how many. Id and hash stay. A job that was emptied in review can still be
    /// resolved, but not be sent again.
    pub async fn scrub(&self, which: ScrubScope, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        let sql = match which {
            ScrubScope::Finished => &self.sql.upkeep.ending.scrub,
            ScrubScope::InReview => &self.sql.upkeep.ending.scrub_review,
        };
        let args: [Value; 3] = [older_than.into(), at_most.into(), Value::Bytes(Vec::new())];
        let mut rows = self.engine.query(sql, Arc::from(args)).await?.len();
        if which == ScrubScope::Finished {
            let args: [Value; 2] = [older_than.into(), at_most.into()];
            rows = rows.max(self.engine.query(&self.sql.upkeep.ending.left_messages, Arc::from(args)).await?.len());
        }
        Ok(u32::try_from(rows).unwrap_or(u32::MAX))
    }

    /// Empties the references of requests that no limit can count any more; returns how many.
    pub async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError> {
        let rows = self
            .engine
            .query(&self.sql.upkeep.ending.forget, Arc::from([LIMIT_WINDOW_MAX.into(), at_most.into()]))
            .await?;
        Ok(u32::try_from(rows.len()).unwrap_or(u32::MAX))
    }
}
