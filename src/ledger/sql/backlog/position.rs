//! The place of one job in its lane's backlog: how many jobs are expected to be claimed before it.
//!
//! It takes no lock. It reads the jobs of the job's own flow before it; of other flows, it reads the rows of the flows.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Engine, Sql, Value};
use super::{TAG_PER_COST, account_of, class_of, unsigned};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;

pub struct BacklogPositionStatements {
    own: Sql,
    before: Sql,
}

impl BacklogPositionStatements {
    pub fn new(dialect: Dialect) -> Self {
        let (class, account) = (class_of("me"), account_of("me"));
        let own = format!(
            "SELECT flows.provider, flows.class, flows.account, flows.tag, flows.weight, \
                 (SELECT count(*) FROM jobs WHERE jobs.provider = me.provider AND {} = {class} AND {} = {account} \
                     AND jobs.backlog AND jobs.seq < me.seq) AS before_in_flow \
             FROM jobs AS me {{join}} flows ON flows.provider = me.provider AND flows.class = {class} \
                 AND flows.account = {account} \
             WHERE me.id = $1 AND me.backlog",
            class_of("jobs"),
            account_of("jobs"),
        );
        // $4 the job's own start tag, if each job costs 1. A flow's jobs have tags at equal distances.
        let before = format!(
            "SELECT CAST(COALESCE(sum(CASE WHEN class < $2 THEN waiting WHEN tag >= $4 THEN 0 \
                 WHEN (($4 - tag) * weight + {TAG_PER_COST} - 1) / {TAG_PER_COST} < waiting \
                     THEN (($4 - tag) * weight + {TAG_PER_COST} - 1) / {TAG_PER_COST} \
                 ELSE waiting END), 0) AS bigint) AS jobs \
             FROM flows WHERE provider = $1 AND queued AND class <= $2 AND NOT (class = $2 AND account = $3) \
                 AND (blocked_until IS NULL OR blocked_until <= {{now}})"
        );
        Self { own: dialect.render(&own), before: dialect.render(&before) }
    }

    /// Jobs before it: those of its own flow, and those of flows that are not blocked, as if each had cost 1. `None`
    /// when it is not in the backlog.
    pub async fn jobs_before(&self, engine: &dyn Engine, job: &JobId) -> Result<Option<u64>, LedgerError> {
        let rows = engine.query(&self.own, Arc::from([job.as_str().into()])).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let before_in_flow = row.int("before_in_flow")?;
        let cost = before_in_flow.saturating_mul(TAG_PER_COST.into()) / row.int("weight")?.max(1);
        let args: [Value; 4] = [
            row.text("provider")?.into(),
            row.int("class")?.into(),
            row.text("account")?.into(),
            row.int("tag")?.saturating_add(cost).into(),
        ];
        let others = engine.query(&self.before, Arc::from(args)).await?;
        let others = others.first().map_or(Ok(0), |row| unsigned(row, "jobs"))?;
        Ok(Some(others.saturating_add(unsigned(row, "before_in_flow")?)))
    }
}
