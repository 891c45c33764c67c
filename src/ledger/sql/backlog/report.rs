//! The report of the flows of a lane that have jobs, with their blocks: most urgent first, then largest first.
//!
//! It takes no lock, and reads the rows of the lane's flows and no job.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Engine, Sql, Value};
use super::{FLOW_COLUMNS, flow_status};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::backlog::FlowStatus;

pub struct BacklogReportStatements {
    waiting: Sql,
}

impl BacklogReportStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            waiting: dialect.render(&format!(
                "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND queued \
                 ORDER BY class, waiting DESC, account LIMIT $2"
            )),
        }
    }

    pub async fn waiting_flows(
        &self,
        engine: &dyn Engine,
        lane: &ProviderName,
        at_most: u32,
    ) -> Result<Vec<FlowStatus>, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        engine.query(&self.waiting, Arc::from(args)).await?.iter().map(flow_status).collect()
    }
}
