//! The report of a lane's largest flows, with their blocks.
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
    largest: Sql,
}

impl BacklogReportStatements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            largest: dialect.render(&format!(
                "SELECT {FLOW_COLUMNS} FROM flows WHERE provider = $1 AND queued \
                 ORDER BY waiting DESC, class, account LIMIT $2"
            )),
        }
    }

    pub async fn largest(
        &self,
        engine: &dyn Engine,
        lane: &ProviderName,
        at_most: u32,
    ) -> Result<Vec<FlowStatus>, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), at_most.into()];
        engine.query(&self.largest, Arc::from(args)).await?.iter().map(flow_status).collect()
    }
}
