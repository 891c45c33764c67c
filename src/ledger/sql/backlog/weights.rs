//! The weights of a lane's flows, brought up to the accounts' rows after a change of settings.
//!
//! A new flow takes its account's weight when it is inserted. A changed weight counts for later claims: tags that jobs
//! have moved on stay as they are.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::Sql;
use super::{account_weight, count_of, update_flows};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

pub struct WeightStatements {
    sync: Sql,
}

impl WeightStatements {
    pub fn new(dialect: Dialect) -> Self {
        let weight = account_weight("flows.provider", "flows.account");
        let differs = format!("flows.provider = $1 AND flows.weight <> {weight}");
        Self { sync: update_flows(dialect, &format!("weight = {weight}"), &differs, "FOR UPDATE") }
    }
}

impl Database {
    /// Gives the flows of a lane the weights of their accounts, where they differ; returns how many differed. Later
    /// claims share by them.
    pub async fn sync_weights(&self, lane: &ProviderName) -> Result<u32, LedgerError> {
        Ok(count_of(&self.engine.query(&self.sql.backlog.weights.sync, Arc::from([lane.as_str().into()])).await?))
    }
}
