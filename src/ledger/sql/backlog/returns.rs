//! Returns into the backlog without a worker: sleeping jobs that are due, and jobs of lost workers.
//!
//! An open job that is not in the backlog has a holder, or sleeps until `wake_at`. A holder without a row of `workers` is
//! lost. A job found `sending` may have been charged: its attempt ends as unknown. A look-up in flight ends in the same
//! way, and its job stays `unknown`. When a request may be taken for lost, the caller decides.
//!
//! Jobs are found by lane, longest due first, and each is written under its own condition. So processes that return the
//! same jobs at once return each one once.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;

use super::{COUNTED_AND_WRITTEN_COLUMNS, count_in};
use crate::domain::job::{FlowKey, JobId};
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::WaitReason;
use crate::ledger::LedgerError;
use crate::ledger::backlog::LostJob;
use crate::ledger::database::Database;
use crate::ledger::sql::attempt::CLOSE_LEFT_OPEN;
use crate::ledger::sql::claim::{IS_LOST, IS_UNHELD};
use crate::ledger::sql::dialect::{JobWriteText, Template, WriteTemplate};
use crate::ledger::sql::engine::args;
use crate::ledger::sql::fleet::{LANES, providers};
use crate::ledger::sql::result::{FromRow as _, SqlRow, from_row};
use crate::ledger::sql::upkeep::{CLAIMABLE, READABLE};

/// The condition of index `jobs_out_of_backlog`.
const OUT_OF_BACKLOG: &str = "jobs.state IN ('waiting', 'unknown') AND NOT jobs.backlog";
const IS_DUE: &str = "jobs.wake_at <= {now} AND (jobs.not_before IS NULL OR jobs.not_before <= {now})";
static LANES_WITH_RETURNS: Template = Template::made(|_| {
    format!(
        "{LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL AND (\
             EXISTS (SELECT 1 FROM jobs WHERE jobs.provider = lanes.provider AND {OUT_OF_BACKLOG} AND {IS_DUE} \
                 AND {IS_UNHELD}) \
             OR EXISTS (SELECT 1 FROM jobs WHERE jobs.provider = lanes.provider AND jobs.state = 'sending' \
                 AND {IS_UNHELD}))"
    )
});

/// Rows that no claim can read stay where they are.
static SLEEPERS: Template = Template::made(|_| {
    format!(
        "SELECT id FROM jobs \
         WHERE jobs.provider = $1 AND {OUT_OF_BACKLOG} AND {IS_DUE} AND jobs.holder IS NULL AND {READABLE} \
             AND {CLAIMABLE} \
         ORDER BY jobs.wake_at LIMIT $2"
    )
});

/// The columns of a [`LostJob`]. Its row does not change while a request is in flight, so that began at `updated_at`.
const LOST_COLUMNS: &str = "id, fence, last_attempt, jobs.holder = $3 AS is_own, \
     CASE WHEN response_by IS NOT NULL THEN {greatest}({ms:response_by} - {ms:updated_at}, 0) END AS wire_time_ms";

/// $3: a worker whose own jobs are found, too.
static LOST: Template = Template::made(|_| {
    format!(
        "SELECT {LOST_COLUMNS} FROM jobs \
         WHERE jobs.provider = $1 AND {OUT_OF_BACKLOG} AND {IS_DUE} AND ({IS_LOST} OR jobs.holder = $3) \
             AND {READABLE} AND {CLAIMABLE} \
         ORDER BY jobs.wake_at LIMIT $2"
    )
});

/// A person may have cleared the holder.
static LOST_IN_FLIGHT: Template = Template::made(|_| {
    format!(
        "SELECT {LOST_COLUMNS} FROM jobs \
         WHERE jobs.provider = $1 AND jobs.state = 'sending' AND ({IS_UNHELD} OR jobs.holder = $3) \
             AND {READABLE} AND {CLAIMABLE} LIMIT $2"
    )
});

/// The flow of the written job.
const FLOW: &str = "account, CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END AS class";

static WAKE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET backlog = true {{from}} \
         WHERE id = $1 AND jobs.state || '' IN ('waiting', 'unknown') AND NOT jobs.backlog \
             AND jobs.holder IS NULL AND {IS_DUE}"
    )
    .into(),
    written_columns: COUNTED_AND_WRITTEN_COLUMNS.into(),
    effects: vec![count_in().into()],
    returning: FLOW,
});

/// $3 and $4: the fence under which the job was found, and the number of its request. A request that began since then
/// keeps it. A request shows that the job itself does no harm, so only unsent ones count as lost holders.
static TAKE_AWAY: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET fence = fence + 1, backlog = true, holder = NULL, response_by = NULL, \
             lost_holders = CASE WHEN state = 'sending' OR response_by IS NOT NULL THEN 0 ELSE lost_holders + 1 END, \
             attempts = attempts + CASE WHEN state = 'sending' THEN 1 ELSE 0 END, \
             maybe_charged = maybe_charged OR state = 'sending', \
             resend = CASE WHEN state = 'sending' AND resend = 'granted' THEN 'used' ELSE resend END, \
             reason = CASE WHEN state = 'sending' THEN NULL ELSE reason END, \
             wait_reason = CASE WHEN state = 'sending' THEN $2 ELSE wait_reason END, \
             wait_limit = CASE WHEN state = 'sending' THEN NULL ELSE wait_limit END, \
             wait_detail = CASE WHEN state = 'sending' THEN NULL ELSE wait_detail END, \
             wait_since = CASE WHEN state = 'sending' THEN NULL ELSE wait_since END, \
             wait_until = CASE WHEN state = 'sending' THEN NULL ELSE wait_until END, \
             wait_request = CASE WHEN state = 'sending' THEN NULL ELSE wait_request END, \
             state = CASE WHEN state = 'sending' THEN 'unknown' ELSE state END, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND fence = $3 AND jobs.state || '' IN ('waiting', 'sending', 'unknown') AND NOT jobs.backlog \
             AND (last_attempt = $4 OR response_by IS NULL) \
             AND ({IS_LOST} OR jobs.holder = $5 OR jobs.holder IS NULL AND jobs.state || '' = 'sending')"
    )
    .into(),
    written_columns: COUNTED_AND_WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), count_in().into()],
    returning: FLOW,
});

from_row!(row => LostJob {
    id, fence, wire_time;
    number: row.get("last_attempt")?,
    is_own: row.get::<Option<bool>>("is_own")?.unwrap_or_default(),
});

from_row!(row => FlowKey { class, account });

impl Database {
    /// The lanes with sleeping jobs that are due, or jobs of lost workers. One statement for all lanes, since most have
    /// none.
    pub async fn lanes_with_returns(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.query_by_index(&LANES_WITH_RETURNS, []).await?)
    }

    /// Returns sleeping jobs of a lane that are due to the backlog, at most this many; their flows.
    pub async fn wake_due(&self, lane: &ProviderName, at_most: u32) -> Result<Vec<FlowKey>, LedgerError> {
        let found = self.query_by_index(&SLEEPERS, args![lane, at_most]).await?;
        let ids = found.iter().map(|row| row.get::<JobId>("id")).collect::<Result<Vec<_>, _>>()?;
        let writes = ids.iter().map(|id| self.write(&WAKE, args![id], Duration::ZERO));
        flows_of(join_all(writes).await)
    }

    /// Jobs of a lane whose worker is lost, and those that this worker holds, if one is named; at most this many of those
    /// with and without a charge in flight.
    pub async fn lost_jobs(
        &self,
        lane: &ProviderName,
        own: Option<&str>,
        at_most: u32,
    ) -> Result<Vec<LostJob>, LedgerError> {
        let mut lost = Vec::new();
        for sql in [&LOST, &LOST_IN_FLIGHT] {
            for row in self.query_by_index(sql, args![lane, at_most, own]).await? {
                lost.push(LostJob::from_row(&row)?);
            }
        }
        Ok(lost)
    }

    /// Returns these jobs to the backlog, if nothing has changed since they were found; their flows. `own`: as for
    /// [`Database::lost_jobs`].
    pub async fn take_away(&self, lost: &[LostJob], own: Option<&str>) -> Result<Vec<FlowKey>, LedgerError> {
        let writes = lost.iter().map(|LostJob { id, fence, number, wire_time, .. }| {
            let sent = wire_time.is_some().then_some(i64::from(*number));
            self.write(&TAKE_AWAY, args![id, WaitReason::WorkerLost.code(), *fence, sent, own], Duration::ZERO)
        });
        flows_of(join_all(writes).await)
    }
}

fn flows_of(written: Vec<Result<Option<SqlRow>, LedgerError>>) -> Result<Vec<FlowKey>, LedgerError> {
    written.into_iter().filter_map(Result::transpose).map(|row| FlowKey::from_row(&row?)).collect()
}
