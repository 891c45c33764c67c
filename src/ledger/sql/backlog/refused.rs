//! The end of jobs in the backlog whose account a rule refuses: declined where they wait, with their events.
//!
//! A lane at its limit claims few jobs, and none of a blocked flow. So these jobs end without a claim. The jobs of one
//! batch are of one flow: the triggers that count them out lock no other.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::super::attempt::{WRITE_EVENT, WRITTEN_COLUMNS};
use super::super::batcher::Batcher;
use super::super::dialect::{Dialect, JobWriteText, Returning};
use super::super::engine::{Args, Sql, Value};
use super::{account_of, class_of};
use crate::domain::outcome::ACCOUNT_REFUSED;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// Most flows that one call looks at.
const FLOWS_MAX: u32 = 100;

pub struct RefusedStatements {
    flows: Sql,
    jobs: Sql,
    decline: Batcher,
}

impl RefusedStatements {
    pub fn new(dialect: Dialect) -> Self {
        let (class, account) = (class_of("jobs"), account_of("jobs"));
        // Class 0 has unknown outcomes. The classes are listed, so that the primary key of `flows` fits.
        let flows = "SELECT flows.class, flows.account FROM account_overrides AS own {join} flows \
                 ON flows.provider = own.provider AND flows.account = own.account \
                     AND flows.class IN (1, 2, 3, 4, 5, 6, 7, 8, 9, 10) \
             WHERE own.provider = $1 AND own.rule = 'refuse' AND flows.waiting > 0 LIMIT $2";
        let jobs = format!(
            "SELECT jobs.id FROM jobs WHERE jobs.provider = $1 AND {class} = $2 AND {account} = $3 AND jobs.backlog \
             ORDER BY jobs.seq LIMIT $4"
        );
        let decline = "UPDATE jobs SET state = 'declined', reason = $2, fence = fence + 1, backlog = false, \
                 updated_at = {now} {from} \
             WHERE id = $1 AND jobs.backlog AND jobs.state || '' = 'waiting' AND NOT maybe_charged";
        Self {
            flows: dialect.render(flows),
            jobs: dialect.render(&jobs),
            decline: Batcher::new(dialect.job_write(&JobWriteText {
                update: decline,
                written_columns: WRITTEN_COLUMNS,
                effects: &[WRITE_EVENT],
                returning: Returning::Job("id"),
            })),
        }
    }
}

impl Database {
    /// Declines jobs of the backlog whose account a rule of the lane refuses, with their events; returns how many. Jobs
    /// that may have been charged stay as they are.
    pub async fn decline_refused(&self, lane: &ProviderName, at_most: u32) -> Result<u32, LedgerError> {
        let args: [Value; 2] = [lane.as_str().into(), FLOWS_MAX.into()];
        let mut declined = 0;
        for flow in self.engine.query(&self.sql.backlog.refused.flows, Arc::from(args)).await? {
            let left = at_most.saturating_sub(declined);
            if left == 0 {
                break;
            }
            let (class, account) = (flow.int("class")?, flow.text("account")?);
            let args: [Value; 4] = [lane.as_str().into(), class.into(), account.into(), left.into()];
            let jobs = self.engine.query_by_index(&self.sql.backlog.refused.jobs, Arc::from(args)).await?;
            let ids = jobs.iter().map(|job| job.text("id")).collect::<Result<Vec<_>, _>>()?;
            let writes = ids.into_iter().map(|id| {
                let args: Args = Arc::from([id.into(), ACCOUNT_REFUSED.into()]);
                self.sql.backlog.refused.decline.write(&self.engine, args, Duration::ZERO)
            });
            for written in join_all(writes).await {
                declined += u32::from(written?.is_some());
            }
        }
        Ok(declined)
    }
}
