//! How many jobs have settled for good: a sum that is kept, so that no account need count them all.
//!
//! Refuses to cost a payment anything: what settled since is added once a minute, found by the index of what settled lately.
//! Refuses to be believed for ever: SQL may change what settled long ago, and a clock be set back, so all are counted anew
//! from time to time, for at most a hundredth of the time.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Engine, Sql, Step};
use crate::ledger::LedgerError;

/// What nothing of ours takes back. A dead job may be replayed, so it is counted with those that wait for somebody.
const FOR_GOOD: &str = "state IN ('succeeded', 'declined', 'expired', 'cancelled')";
/// All other states.
pub const NOT_FOR_GOOD: &str = "('waiting', 'sending', 'unknown', 'review', 'dead')";
/// Those of [`FOR_GOOD`] that the sum may not hold yet, by the condition of index `jobs_settled_by_update`. Nothing is
/// scrubbed within a day. The end, a year ahead, is for PostgreSQL, which takes what is open at one side for a third of all.
pub const UNSUMMED: &str = "scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') \
     AND state <> 'dead' AND updated_at >= (SELECT counted_before FROM settled_mark WHERE only_row) \
     AND updated_at < {after:31536000000}";

/// The sum ends so long ago. A job says when it settled before anybody can see it: by far shorter, since a statement is
/// ended after ten seconds.
const LAG_MS: u32 = 120_000;
/// A sum that ends longer ago than this was kept by nobody: adding what is missing could take longer than a statement may.
const LEFT_MS: u32 = 900_000;
/// All are counted anew after so long, and after so many times as long as that takes.
const ANEW_MS: u32 = 600_000;
const ANEW_FACTOR: u32 = 100;
/// Counting anew is the one question that may take long: a second per million jobs, and nobody waits for it.
const PATIENT: &str = "SELECT set_config('statement_timeout', '30min', true) AS patient";

const WITH_SUM: &str = "ON CONFLICT (provider, state) DO UPDATE SET";

pub struct Statements {
    anew: Vec<Step>,
    add: Vec<Step>,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        let none: Args = Arc::from([]);
        let step = |sql: Sql, must_affect| Step { sql, args: none.clone(), must_affect };
        // Whoever has the row counts, for minutes perhaps; the others leave it to them.
        let mark = |sets: &str, due: &str| {
            dialect.sql(&format!(
                "UPDATE settled_mark SET {sets}, counted_before = {{after:(0 - {LAG_MS})}} \
                 WHERE only_row IN (SELECT only_row FROM settled_mark WHERE {due} {{unlocked}}) RETURNING only_row"
            ))
        };
        let due = format!("recount_after <= {{now}} OR counted_before <= {{after:(0 - {LEFT_MS})}}");
        // An instant that is known when the statement is planned, far enough back, keeps it to the index.
        let recent = format!("updated_at >= {{after:(0 - {LEFT_MS} - {LAG_MS})}}");
        let all = format!(
            "INSERT INTO settled_jobs (provider, state, jobs) \
             SELECT provider, state, sum(jobs) FROM ( \
                 SELECT provider, state, count(*) AS jobs FROM jobs WHERE {FOR_GOOD} GROUP BY provider, state \
                 UNION ALL \
                 SELECT provider, state, -count(*) FROM jobs WHERE {UNSUMMED} AND {recent} \
                 GROUP BY provider || '', provider, state) AS counted \
             WHERE true GROUP BY provider, state {WITH_SUM} jobs = excluded.jobs"
        );
        let next = format!(
            "UPDATE settled_mark SET recount_after = CASE \
                 WHEN {{now}} + {ANEW_FACTOR} * ({{now}} - counted_at) > {{after:{ANEW_MS}}} \
                 THEN {{now}} + {ANEW_FACTOR} * ({{now}} - counted_at) ELSE {{after:{ANEW_MS}}} END"
        );
        let lately = UNSUMMED.replace("counted_before", "counted_from");
        let since = format!(
            "INSERT INTO settled_jobs (provider, state, jobs) \
             SELECT min(provider), min(state), count(*) FROM jobs \
             WHERE {lately} AND {recent} AND updated_at < (SELECT counted_before FROM settled_mark WHERE only_row) \
             GROUP BY provider || '', state || '' {WITH_SUM} jobs = settled_jobs.jobs + excluded.jobs"
        );
        let patient = (dialect == Dialect::Postgres).then(|| step(dialect.sql(PATIENT), false));
        let anew = [
            step(mark("counted_from = counted_before, counted_at = {now}", &due), true),
            step(dialect.sql("UPDATE settled_jobs SET jobs = 0"), false),
            step(dialect.sql(&all), false),
            step(dialect.sql(&next), false),
        ];
        let passed = format!("counted_before < {{after:(0 - {LAG_MS})}}");
        let add = vec![step(mark("counted_from = counted_before", &passed), true), step(dialect.sql(&since), false)];
        Self { anew: patient.into_iter().chain(anew).collect(), add }
    }

    /// Adds what has settled for good since the last time, or counts all anew when that is due.
    pub async fn sum_up(&self, engine: &dyn Engine) -> Result<(), LedgerError> {
        if engine.atomically(self.anew.clone()).await?.is_none() {
            engine.atomically(self.add.clone()).await?;
        }
        Ok(())
    }
}
