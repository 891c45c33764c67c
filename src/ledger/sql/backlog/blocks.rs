//! The ends of blocks: all of a lane after a change of its limits, and those whose instant has passed.
//!
//! A flow whose block ends starts at its class's virtual time at the earliest: it does not make up for the time in
//! which it was blocked. Rows are locked in the order of their keys.

use std::sync::Arc;
use std::time::Duration;

use super::super::dialect::Dialect;
use super::super::engine::{Args, Engine, Sql};
use super::{count_of, update_flows, virtual_time};
use crate::domain::provider::ProviderName;
use crate::faults::{self, Bug};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

pub struct BlockStatements {
    unblock: Sql,
    wake: Sql,
    /// Leaves out flows that another session has locked for long.
    wake_unlocked: Sql,
    next_wake: Sql,
}

impl BlockStatements {
    pub fn new(dialect: Dialect) -> Self {
        let unblock = format!(
            "blocked_until = NULL, blocked_reason = NULL, blocked_limit = NULL, tag = {{greatest}}(flows.tag, {})",
            virtual_time("$1", "flows.class")
        );
        let is_woken = !faults::bug(Bug::FlowNotWoken);
        let ended = format!("flows.provider = $1 AND flows.blocked_until <= {{now}} AND {is_woken}");
        Self {
            unblock: update_flows(
                dialect,
                &unblock,
                "flows.provider = $1 AND flows.blocked_until IS NOT NULL",
                "FOR UPDATE",
            ),
            wake: update_flows(dialect, &unblock, &ended, "FOR UPDATE"),
            wake_unlocked: update_flows(dialect, &unblock, &ended, "FOR UPDATE SKIP LOCKED"),
            next_wake: dialect.render(
                "SELECT {until:(SELECT min(blocked_until) FROM flows \
                         WHERE provider = $1 AND blocked_until IS NOT NULL)} AS next_wake_ms",
            ),
        }
    }

    /// Ends the blocks whose instant has passed; returns how many.
    pub async fn wake(&self, engine: &dyn Engine, lane: &ProviderName) -> Result<u32, LedgerError> {
        let args: Args = Arc::from([lane.as_str().into()]);
        match engine.query_unless_locked(&self.wake, args.clone()).await? {
            Some(rows) => Ok(count_of(&rows)),
            None => Ok(count_of(&engine.query_by_index(&self.wake_unlocked, args).await?)),
        }
    }

    pub async fn next_wake(&self, engine: &dyn Engine, lane: &ProviderName) -> Result<Option<Duration>, LedgerError> {
        let rows = engine.query(&self.next_wake, Arc::from([lane.as_str().into()])).await?;
        rows.first().map_or(Ok(None), |row| row.opt_ms("next_wake_ms"))
    }
}

impl Database {
    /// Ends all blocks of a lane; returns how many.
    pub async fn unblock_flows(&self, lane: &ProviderName) -> Result<u32, LedgerError> {
        Ok(count_of(&self.engine.query(&self.sql.backlog.blocks.unblock, Arc::from([lane.as_str().into()])).await?))
    }
}
