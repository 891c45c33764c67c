//! The totals of finished jobs by provider and state, kept so that a reconciliation need not count them all.
//!
//! Once a minute, jobs that finished since the last update are added, found by the index of recent ones. Payments write
//! nothing here. SQL may change old jobs, so all are counted again from time to time. That takes at most a hundredth of
//! the time, and happens at once when the clock was set back.

use std::sync::Arc;
use std::time::Duration;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Sql, Step};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// Finished states that no command leaves. A dead job may be replayed, so it is counted with the jobs that wait for an
/// operator.
const FOR_GOOD: &str = "state IN ('succeeded', 'declined', 'expired', 'cancelled')";
/// All other states.
pub const NOT_FOR_GOOD: &str = "('waiting', 'sending', 'unknown', 'review', 'dead')";
/// The finished jobs of [`FOR_GOOD`], by the condition of index `jobs_finished_by_update`. No job is scrubbed
/// within its first day.
const FOR_GOOD_LATELY: &str = "scrubbed_at IS NULL \
     AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'";

/// The totals end this long ago. A job's own instant precedes its commit by far less, since a statement is ended after
/// ten seconds.
const LAG_MS: u32 = 120_000;
/// Outdated totals are brought up to now in steps of this length: one statement for all could run into its timeout.
const STEP_MS: u32 = 300_000;
/// Interval of complete counts; longer if a count takes longer than a hundredth of it.
const RECOUNT_MS: u32 = 600_000;
const RECOUNT_FACTOR: u32 = 100;
/// Time limit of a complete count, the one query that may take long: a second per million jobs. On PostgreSQL it blocks
/// no other session; on SQLite, which has one connection, it blocks all.
const RECOUNT_MAX: Duration = Duration::from_secs(30 * 60);

const WITH_SUM: &str = "ON CONFLICT (provider, state) DO UPDATE SET";

fn of_mark(column: &str) -> String {
    format!("(SELECT {column} FROM finished_mark WHERE only_row)")
}

/// Finished jobs that the totals do not include yet. The upper end, a year ahead, is for PostgreSQL: it expects a third
/// of all rows for a range that is open on one side.
pub fn finished_since_totals() -> String {
    format!("{FOR_GOOD_LATELY} AND updated_at >= {} AND updated_at < {{after:31536000000}}", of_mark("counted_before"))
}

pub struct FinishedTotalsStatements {
    recount: Vec<Step>,
    add: Vec<Step>,
}

impl FinishedTotalsStatements {
    pub fn new(dialect: Dialect) -> Self {
        let none: Args = Arc::from([]);
        let step = |sql: Sql, must_affect| Step { sql, args: none.clone(), must_affect };
        let lagging = format!("{{after:(0 - {LAG_MS})}}");
        // One worker takes the mark and counts, perhaps for minutes; the others skip it.
        let mark = |sets: &str, due: &str| {
            dialect.render(&format!(
                "UPDATE finished_mark SET {sets} \
                 WHERE only_row IN (SELECT only_row FROM finished_mark WHERE {due} {{unlocked}}) RETURNING only_row"
            ))
        };
        // A new mark is at least the lag in the past. If it is not, the clock went back after it was set, and jobs that
        // finish now have an instant before it.
        let due = format!("recount_after <= {{now}} OR counted_before > {{after:(0 - {LAG_MS} / 2)}}");
        let unsummed = finished_since_totals();
        // An instant that is known at planning time keeps PostgreSQL on the index; the mark has just been set.
        let recent = format!("updated_at >= {{after:(0 - 2 * {LAG_MS})}}");
        let all = format!(
            "INSERT INTO finished_jobs (provider, state, jobs) \
             SELECT provider, state, sum(jobs) FROM ( \
                 SELECT provider, state, count(*) AS jobs FROM jobs WHERE {FOR_GOOD} GROUP BY provider, state \
                 UNION ALL \
                 SELECT provider, state, -count(*) FROM jobs WHERE {unsummed} AND {recent} \
                 GROUP BY provider || '', provider, state) AS counted \
             WHERE true GROUP BY provider, state {WITH_SUM} jobs = excluded.jobs"
        );
        let next = format!(
            "UPDATE finished_mark SET recount_after = CASE \
                 WHEN {{now}} + {RECOUNT_FACTOR} * ({{now}} - counted_at) > {{after:{RECOUNT_MS}}} \
                 THEN {{now}} + {RECOUNT_FACTOR} * ({{now}} - counted_at) ELSE {{after:{RECOUNT_MS}}} END"
        );
        let since = format!(
            "INSERT INTO finished_jobs (provider, state, jobs) \
             SELECT min(provider), min(state), count(*) FROM jobs \
             WHERE {FOR_GOOD_LATELY} AND updated_at >= {} AND updated_at < {} \
             GROUP BY provider || '', state || '' {WITH_SUM} jobs = finished_jobs.jobs + excluded.jobs",
            of_mark("counted_from"),
            of_mark("counted_before"),
        );
        let recount = vec![
            step(
                mark(&format!("counted_from = counted_before, counted_at = {{now}}, counted_before = {lagging}"), &due),
                true,
            ),
            step(dialect.render("UPDATE finished_jobs SET jobs = 0"), false),
            step(dialect.render(&all), false),
            step(dialect.render(&next), false),
        ];
        let passed = format!("counted_before < {lagging}");
        let further = format!(
            "counted_from = counted_before, counted_before = CASE \
                 WHEN counted_before < {{after:(0 - {LAG_MS} - {STEP_MS})}} \
                 THEN counted_before + ({{after:{STEP_MS}}} - {{now}}) ELSE {lagging} END"
        );
        let add = vec![step(mark(&further, &passed), true), step(dialect.render(&since), false)];
        Self { recount, add }
    }
}

impl Database {
    /// Updates the totals of finished jobs, which a reconciliation adds to its own counts. One worker at a time calls
    /// this every few minutes. From time to time it counts all jobs, which takes long: the count goes on even when the
    /// caller gets a timeout.
    pub async fn update_finished_totals(&self) -> Result<(), LedgerError> {
        if self.engine.atomically_within(RECOUNT_MAX, self.sql.upkeep.finished_totals.recount.clone()).await?.is_none()
        {
            self.engine.atomically(self.sql.upkeep.finished_totals.add.clone()).await?;
        }
        Ok(())
    }
}
