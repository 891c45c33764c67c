//! The place of one job in its lane's backlog: its flow, and how many jobs are expected to be claimed before it.
//!
//! It takes no lock. It reads the jobs of the job's own flow before it; of other flows, it reads the rows of the flows.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Engine, Sql, Value};
use super::{FLOW_COLUMNS, TAG_PER_COST, account_of, class_of, flow_status, unsigned};
use crate::domain::job::JobId;
use crate::ledger::LedgerError;
use crate::ledger::backlog::FlowStatus;

/// The place of a job: its flow, and the jobs before it.
pub struct JobPlace {
    pub flow: FlowStatus,
    pub before_in_flow: u64,
    /// Jobs of its account in flows of more urgent classes.
    pub urgent_of_account: u64,
    /// Those of its own flow, and those of flows that are not blocked, as if each had cost 1.
    pub claimed_before: u64,
}

pub struct BacklogPositionStatements {
    own: Sql,
    before: Sql,
}

impl BacklogPositionStatements {
    pub fn new(dialect: Dialect) -> Self {
        let (class, account) = (class_of("me"), account_of("me"));
        let own = format!(
            "SELECT {FLOW_COLUMNS}, flows.provider, flows.tag, flows.weight, \
                 (SELECT count(*) FROM jobs WHERE jobs.provider = me.provider AND {} = {class} AND {} = {account} \
                     AND jobs.backlog AND jobs.seq < me.seq) AS before_in_flow, \
                 (SELECT CAST(COALESCE(sum(urgent.waiting), 0) AS bigint) FROM flows AS urgent \
                     WHERE urgent.provider = flows.provider AND urgent.account = flows.account \
                         AND urgent.account <> '' AND urgent.class < flows.class \
                         AND urgent.class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)) AS urgent_of_account \
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

    /// `None` when the job is not in the backlog.
    pub async fn place(&self, engine: &dyn Engine, job: &JobId) -> Result<Option<JobPlace>, LedgerError> {
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
        let before_in_flow = unsigned(row, "before_in_flow")?;
        let claimed_before = others.saturating_add(before_in_flow);
        let urgent_of_account = unsigned(row, "urgent_of_account")?;
        Ok(Some(JobPlace { flow: flow_status(row)?, before_in_flow, urgent_of_account, claimed_before }))
    }
}
