//! The weights of a lane's flows, brought up to the accounts' rows after a change of settings.
//!
//! A new flow takes its account's weight when it is inserted. A changed weight counts for later claims: tags that jobs
//! have moved on stay as they are.

use std::sync::Arc;

use super::super::dialect::Dialect;
use super::super::engine::{Engine, Sql};
use super::{account_weight, count_of, update_flows};
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;

pub struct WeightStatements {
    sync: Sql,
}

impl WeightStatements {
    pub fn new(dialect: Dialect) -> Self {
        let weight = account_weight("flows.provider", "flows.account");
        let differs = format!("flows.provider = $1 AND flows.weight <> {weight}");
        Self { sync: update_flows(dialect, &format!("weight = {weight}"), &differs, "FOR UPDATE") }
    }

    /// Sets the weight of the flows that differ from their account's; returns how many.
    pub async fn sync(&self, engine: &dyn Engine, lane: &ProviderName) -> Result<u32, LedgerError> {
        Ok(count_of(&engine.query(&self.sync, Arc::from([lane.as_str().into()])).await?))
    }
}
