//! The upkeep of flows: comparing them with the jobs of a lane, and removing those that are no longer needed.
//!
//! Flows and jobs are written in one commit, so in one snapshot they agree. Where they do not, for instance after a
//! restore of one table, the flow is locked and counted again: each earlier change of it is committed by then.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Sql, Step, Value};
use super::{account_of, account_weight, class_of, count_of, virtual_time};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::RepairedFlows;
use crate::ledger::database::Database;

pub struct RepairStatements {
    different: Sql,
    /// In one transaction, for one flow.
    repair: Vec<Sql>,
    idle: Sql,
}

impl RepairStatements {
    pub fn new(dialect: Dialect) -> Self {
        let (class, account) = (class_of("jobs"), account_of("jobs"));
        let different = format!(
            "SELECT class, account, max(is_known) AS is_known \
             FROM (SELECT {class} AS class, {account} AS account, count(*) AS jobs, 0 AS is_known FROM jobs \
                   WHERE jobs.provider = $1 AND jobs.backlog GROUP BY {class}, {account} \
                   UNION ALL SELECT class, account, 0 - waiting, 1 FROM flows WHERE provider = $1) AS both_sides \
             GROUP BY class, account HAVING sum(jobs) <> 0 ORDER BY class, account LIMIT $2"
        );
        let of_flow = "flows.provider = $1 AND flows.class = $2 AND flows.account = $3";
        let clock = virtual_time("$1", "$2");
        let waiting = format!(
            "(SELECT count(*) FROM jobs WHERE jobs.provider = $1 AND {class} = $2 AND {account} = $3 AND jobs.backlog)"
        );
        let mut repair = vec![format!(
            "INSERT INTO flows (provider, class, account, tag, weight) VALUES ($1, $2, $3, {clock}, {}) \
             ON CONFLICT DO NOTHING",
            account_weight("$1", "$3")
        )];
        // The next statement sees what was committed before the lock was free.
        if dialect == Dialect::Postgres {
            repair.push(format!("SELECT waiting FROM flows WHERE {of_flow} FOR UPDATE"));
        }
        repair.push(format!(
            "UPDATE flows SET waiting = {waiting}, \
                 tag = CASE WHEN flows.waiting > 0 THEN flows.tag ELSE {{greatest}}(flows.tag, {clock}) END \
             WHERE {of_flow} AND flows.waiting <> {waiting} RETURNING flows.account"
        ));
        let unused = format!(
            "SELECT class, account FROM flows \
             WHERE flows.provider = $1 AND NOT flows.queued AND (flows.blocked_until IS NULL OR flows.blocked_until <= {{now}}) \
                 AND (flows.tag <= {} OR flows.class NOT IN (\
                     SELECT busy.class FROM flows AS busy WHERE busy.provider = $1 AND busy.queued)) \
             LIMIT $2",
            virtual_time("$1", "flows.class")
        );
        let idle = match dialect {
            Dialect::Postgres => format!(
                "WITH unused AS MATERIALIZED ({unused} FOR UPDATE OF flows SKIP LOCKED) DELETE FROM flows USING unused \
                 WHERE flows.provider = $1 AND flows.class = unused.class AND flows.account = unused.account \
                 RETURNING flows.account"
            ),
            Dialect::Sqlite => {
                format!("DELETE FROM flows WHERE provider = $1 AND (class, account) IN ({unused}) RETURNING account")
            }
        };
        Self {
            different: dialect.render(&different),
            repair: repair.iter().map(|text| dialect.render(text)).collect(),
            idle: dialect.render(&idle),
        }
    }
}

impl Database {
    /// Deletes rows of flows without jobs whose tag the lane's virtual time has passed; returns how many.
    pub async fn remove_idle_flows(&self, lane: &ProviderName, at_most: u32) -> Result<u32, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        Ok(count_of(&self.engine.query(&self.sql.backlog.repair.idle, Arc::from(args)).await?))
    }

    /// Compares the flows of a lane with its jobs, and repairs at most this many. Reads every job of the lane's
    /// backlog.
    pub async fn repair_flows(&self, lane: &ProviderName, at_most: u32) -> Result<RepairedFlows, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        let mut repaired = RepairedFlows::default();
        for row in self.engine.query_by_index(&self.sql.backlog.repair.different, Arc::from(args)).await? {
            let (class, account, is_known) = (row.int("class")?, row.text("account")?, row.int("is_known")? != 0);
            tracing::warn!(provider = %lane, class, is_known, "the waiting jobs of a flow are counted again");
            let flow: [Value; 3] = [lane.as_str().into(), class.into(), account.into()];
            let flow: Args = Arc::from(flow);
            let step = |sql: &Sql| Step { sql: sql.clone(), args: flow.clone(), must_affect: false };
            let rows = self
                .engine
                .atomically(self.sql.backlog.repair.repair.iter().map(step).collect())
                .await?
                .unwrap_or_default();
            let changed = u32::from(rows.last().is_some_and(|rows| !rows.is_empty()));
            *(if is_known { &mut repaired.corrected } else { &mut repaired.recreated }) += changed;
        }
        Ok(repaired)
    }
}
