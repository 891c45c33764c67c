//! The reports of the flows of a lane that have jobs, with their blocks: for the lane's workers, and for operators.
//!
//! They take no lock, and read the rows of the lane's flows and no job.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Sql, Value};
use super::super::row::SqlRow;
use super::{FLOW_COLUMNS, flow_status, unsigned};
use crate::domain::job::Identifier;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::{FlowReport, FlowStatus, LaneFlows};
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;

pub struct BacklogReportStatements {
    waiting: Sql,
    largest: Sql,
    of_account: Sql,
}

impl BacklogReportStatements {
    pub fn new(dialect: Dialect) -> Self {
        let largest = format!(
            "SELECT {FLOW_COLUMNS}, {{ms:flows.blocked_until}} AS until_ms, flows.weight, \
                 CAST(sum(CASE WHEN flows.blocked_until IS NULL OR flows.blocked_until <= {{now}} THEN flows.weight \
                     ELSE 0 END) OVER (PARTITION BY flows.class) AS bigint) AS class_weight, \
                 count(*) OVER () AS flows, CAST(sum(flows.waiting) OVER () AS bigint) AS jobs \
             FROM flows WHERE flows.provider = $1 AND flows.queued \
             ORDER BY flows.waiting DESC, flows.class, flows.account LIMIT $2"
        );
        // The classes are listed, so that the primary key of `flows` fits.
        let of_account = format!(
            "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND class IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) \
                 AND account = $2 AND queued ORDER BY class"
        );
        Self {
            waiting: dialect.render(&format!(
                "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND queued \
                 ORDER BY class, waiting DESC, account LIMIT $2"
            )),
            largest: dialect.render(&largest),
            of_account: dialect.render(&of_account),
        }
    }
}

impl Database {
    /// The flows of a lane with jobs in the backlog: the most urgent class first, and in a class those with most jobs.
    pub async fn waiting_flows(&self, lane: &ProviderName, at_most: u32) -> Result<Vec<FlowStatus>, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        self.engine.query(&self.sql.backlog.report.waiting, Arc::from(args)).await?.iter().map(flow_status).collect()
    }

    /// The flows of a lane with most jobs in the backlog, for operators. Reads the lane's flows and no job.
    pub async fn largest_flows(&self, lane: &ProviderName, at_most: u32) -> Result<LaneFlows, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        let rows = self.engine.query(&self.sql.backlog.report.largest, Arc::from(args)).await?;
        let Some(first) = rows.first() else { return Ok(LaneFlows::default()) };
        let (flows, waiting) = (unsigned(first, "flows")?, unsigned(first, "jobs")?);
        Ok(LaneFlows { largest: rows.iter().map(flow_report).collect::<Result<_, _>>()?, flows, waiting })
    }

    /// The flows of one account on a lane that have jobs in the backlog, the most urgent class first.
    pub async fn account_flows(
        &self,
        lane: &ProviderName,
        account: &Identifier,
    ) -> Result<Vec<FlowStatus>, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), account.as_str().into()];
        self.engine.query(&self.sql.backlog.report.of_account, Arc::from(args)).await?.iter().map(flow_status).collect()
    }
}

fn flow_report(row: &SqlRow) -> Result<FlowReport, LedgerError> {
    Ok(FlowReport {
        status: flow_status(row)?,
        blocked_until: row.opt_instant("until_ms")?.map(|at| DatabaseTime(at.0)),
        weight: row.count("weight")?,
        class_weight: unsigned(row, "class_weight")?,
    })
}
