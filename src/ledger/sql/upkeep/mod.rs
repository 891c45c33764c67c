//! Upkeep in SQL: one file for what is brought back, one for what ends, one for the account, one for what has settled.
//!
//! Refuses to read the table: each statement finds its rows by a partial index of `migrations/*_sweeper.sql`, whose
//! expressions and conditions are repeated word for word, because SQLite uses such an index for nothing else.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::SqlLedger;
use super::dialect::Dialect;
use super::engine::{Engine, Sql};
use crate::domain::disposition::RetryPolicy;
use crate::domain::job::{ContentHash, Job, JobId};
use crate::domain::provider::ProviderName;
use crate::ledger::upkeep::{Account, Checked, Overdue, Recorded, Refused, Scrubbed, Standing, Upkeep};
use crate::ledger::{Hold, LedgerError, Written};

mod account;
mod again;
mod ending;
mod settled;

pub(in crate::ledger::sql) use ending::COUNTED_MAX;

/// The states in which a job is not final.
pub(in crate::ledger::sql) const OPEN: &str = "state IN ('waiting', 'sending', 'unknown')";

pub struct Statements {
    again: again::Statements,
    ending: ending::Statements,
    account: account::Statements,
    settled: settled::Statements,
    turn: Sql,
}

impl Statements {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            again: again::Statements::new(dialect),
            ending: ending::Statements::new(dialect),
            account: account::Statements::new(dialect),
            settled: settled::Statements::new(dialect),
            turn: dialect.sql(
                "INSERT INTO upkeep_turns (duty, taken_until) VALUES ($1, {after:$2}) \
                 ON CONFLICT (duty) DO UPDATE SET taken_until = excluded.taken_until \
                     WHERE upkeep_turns.taken_until <= {now} \
                 RETURNING duty",
            ),
        }
    }

    async fn take_turn(&self, engine: &dyn Engine, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        Ok(!engine.query(&self.turn, Arc::from([duty.into(), lasts.into()])).await?.is_empty())
    }
}

#[async_trait]
impl Upkeep for SqlLedger {
    async fn take_turn(&self, duty: &str, lasts: Duration) -> Result<bool, LedgerError> {
        self.upkeep.take_turn(&*self.engine, duty, lasts).await
    }

    async fn take_overdue(&self, lane: &ProviderName, which: &Overdue) -> Result<Vec<Recorded>, LedgerError> {
        self.upkeep.again.take_overdue(&*self.engine, lane, which).await
    }

    async fn keep_unqueued(&self, hold: &Hold) -> Result<Written, LedgerError> {
        self.upkeep.again.keep_unqueued(&*self.engine, hold).await
    }

    async fn take_unqueued(
        &self,
        lane: &ProviderName,
        ahead: Duration,
        again_after: Duration,
        at_most: u32,
    ) -> Result<Vec<Recorded>, LedgerError> {
        self.upkeep.again.take_unqueued(&*self.engine, lane, ahead, again_after, at_most).await
    }

    async fn due_lookups(
        &self,
        lane: &ProviderName,
        policy: &RetryPolicy,
        at_most: u32,
    ) -> Result<Vec<Recorded>, LedgerError> {
        self.upkeep.again.due_lookups(&*self.engine, lane, policy, at_most).await
    }

    async fn wake_refused(&self, lane: &ProviderName, which: &Refused) -> Result<u32, LedgerError> {
        self.upkeep.again.wake_refused(&*self.engine, lane, which).await
    }

    async fn expire(&self, reason: &str, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.expire(&*self.engine, reason, at_most).await
    }

    async fn set_aside(&self, id: &JobId, reason: &str) -> Result<Written, LedgerError> {
        self.upkeep.ending.set_aside(&*self.engine, id, reason).await
    }

    async fn standing(&self, job: &Job, hash: ContentHash, copy: i64) -> Result<Standing, LedgerError> {
        self.upkeep.again.standing(&*self.engine, job, hash, copy).await
    }

    async fn scrub(&self, which: Scrubbed, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.scrub(&*self.engine, which, older_than, at_most).await
    }

    async fn forget_references(&self, at_most: u32) -> Result<u32, LedgerError> {
        self.upkeep.ending.forget_references(&*self.engine, at_most).await
    }

    async fn sum_up_settled(&self) -> Result<(), LedgerError> {
        self.upkeep.settled.sum_up(&*self.engine).await
    }

    async fn conservation(&self, astray_after: Duration, checked: Checked) -> Result<Vec<Account>, LedgerError> {
        self.upkeep.account.take(&*self.engine, astray_after, checked).await
    }
}
