//! How many jobs have settled for good: a sum that is kept, so that no account need count them all.
//!
//! Refuses to cost a payment anything: what settled since is added once a minute, found by the index of what settled lately.
//! Refuses to be believed for ever: SQL may change what settled long ago, so all are counted anew from time to time, for at
//! most a hundredth of the time, and at once when the clock was set back.

use std::sync::Arc;
use std::time::Duration;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Engine, Sql, Step};
use crate::ledger::LedgerError;

/// What nothing of ours takes back. A dead job may be replayed, so it is counted with those that wait for somebody.
const FOR_GOOD: &str = "state IN ('succeeded', 'declined', 'expired', 'cancelled')";
/// All other states.
pub const NOT_FOR_GOOD: &str = "('waiting', 'sending', 'unknown', 'review', 'dead')";
/// The same by the condition of index `jobs_settled_by_update`. Nothing is scrubbed within a day.
const FOR_GOOD_LATELY: &str = "scrubbed_at IS NULL \
     AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'";

/// The sum ends so long ago. A job says when it settled before anybody can see it: by far shorter, since a statement is
/// ended after ten seconds.
const LAG_MS: u32 = 120_000;
/// A sum that nobody kept is brought up to now by so much at a time: adding all at once could take longer than a statement may.
const STEP_MS: u32 = 300_000;
/// All are counted anew after so long, and after so many times as long as that takes.
const ANEW_MS: u32 = 600_000;
const ANEW_FACTOR: u32 = 100;
/// Counting anew is the one question that may take long: a second per million jobs. On PostgreSQL nobody waits for it; on
/// SQLite, which has one connection, all do.
const ANEW_MAX: Duration = Duration::from_secs(30 * 60);

const WITH_SUM: &str = "ON CONFLICT (provider, state) DO UPDATE SET";

fn of_mark(column: &str) -> String {
    format!("(SELECT {column} FROM settled_mark WHERE only_row)")
}

/// Those settled for good that the sum does not hold yet. The end, a year ahead, is for PostgreSQL, which takes what is open
/// at one side for a third of all.
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
        // Whoever has the row counts, for minutes perhaps; the others leave it to them.
        let mark = |sets: &str, due: &str| {
            dialect.render(&format!(
                "UPDATE settled_mark SET {sets} \
                 WHERE only_row IN (SELECT only_row FROM settled_mark WHERE {due} {{unlocked}}) RETURNING only_row"
            ))
        };
        // A mark is at least the lag behind when it is set: one that is not was set before the clock went back, and what
        // settles now has an instant before it.
        let due = format!("recount_after <= {{now}} OR counted_before > {{after:(0 - {LAG_MS} / 2)}}");
        let unsummed = finished_since_totals();
        // An instant that is known when the statement is planned keeps it to the index; the mark has just been set.
        let recent = format!("updated_at >= {{after:(0 - 2 * {LAG_MS})}}");
        let all = format!(
            "INSERT INTO settled_jobs (provider, state, jobs) \
             SELECT provider, state, sum(jobs) FROM ( \
                 SELECT provider, state, count(*) AS jobs FROM jobs WHERE {FOR_GOOD} GROUP BY provider, state \
                 UNION ALL \
                 SELECT provider, state, -count(*) FROM jobs WHERE {unsummed} AND {recent} \
                 GROUP BY provider || '', provider, state) AS counted \
             WHERE true GROUP BY provider, state {WITH_SUM} jobs = excluded.jobs"
        );
        let next = format!(
            "UPDATE settled_mark SET recount_after = CASE \
                 WHEN {{now}} + {ANEW_FACTOR} * ({{now}} - counted_at) > {{after:{ANEW_MS}}} \
                 THEN {{now}} + {ANEW_FACTOR} * ({{now}} - counted_at) ELSE {{after:{ANEW_MS}}} END"
        );
        let since = format!(
            "INSERT INTO settled_jobs (provider, state, jobs) \
             SELECT min(provider), min(state), count(*) FROM jobs \
             WHERE {FOR_GOOD_LATELY} AND updated_at >= {} AND updated_at < {} \
             GROUP BY provider || '', state || '' {WITH_SUM} jobs = settled_jobs.jobs + excluded.jobs",
            of_mark("counted_from"),
            of_mark("counted_before"),
        );
        let recount = vec![
            step(
                mark(&format!("counted_from = counted_before, counted_at = {{now}}, counted_before = {lagging}"), &due),
                true,
            ),
            step(dialect.render("UPDATE settled_jobs SET jobs = 0"), false),
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

    /// Adds what has settled for good since the last time, or counts all anew when that is due.
    pub async fn update_totals(&self, engine: &dyn Engine) -> Result<(), LedgerError> {
        if engine.atomically_within(ANEW_MAX, self.recount.clone()).await?.is_none() {
            engine.atomically(self.add.clone()).await?;
        }
        Ok(())
    }
}
