//! Returns into the backlog without a worker: sleeping jobs that are due, and jobs of lost workers.
//!
//! An open job that is not in the backlog has a lease, or sleeps until `wake_at`. A lease that has ended shows that its
//! worker is lost. A job found `sending` may have been charged: its attempt ends as unknown. A look-up in flight ends in
//! the same way, and its job stays `unknown`.
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
use crate::ledger::backlog::ReturnedJobs;
use crate::ledger::database::Database;
use crate::ledger::sql::attempt::CLOSE_LEFT_OPEN;
use crate::ledger::sql::claim::LOST_HOLDERS;
use crate::ledger::sql::dialect::{JobWriteText, Template, WriteTemplate};
use crate::ledger::sql::engine::{Args, args};
use crate::ledger::sql::fleet::{LANES, providers};
use crate::ledger::sql::result::{FromRow as _, from_row};
use crate::ledger::sql::upkeep::{CLAIMABLE, READABLE};

/// The condition of index `jobs_out_of_backlog`.
const OUT_OF_BACKLOG: &str = "jobs.state IN ('waiting', 'unknown') AND NOT jobs.backlog";
const IS_DUE: &str = "jobs.wake_at <= {now} AND (jobs.not_before IS NULL OR jobs.not_before <= {now})";
const IS_FREE: &str = "(jobs.lease_until IS NULL OR jobs.lease_until <= {now})";

/// The lease has ended at least $3 ago.
const IS_LOST_OR_ASLEEP: &str = "(jobs.lease_until IS NULL OR jobs.lease_until <= {after:(0 - $3)})";

static LANES_WITH_RETURNS: Template = Template::made(|_| {
    format!(
        "{LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL AND (\
             EXISTS (SELECT 1 FROM jobs WHERE jobs.provider = lanes.provider AND {OUT_OF_BACKLOG} AND {IS_DUE} \
                 AND {IS_FREE}) \
             OR EXISTS (SELECT 1 FROM jobs WHERE jobs.provider = lanes.provider AND jobs.state = 'sending' \
                 AND {IS_FREE}))"
    )
});

/// Rows that no claim can read stay where they are.
static SLEEPERS: Template = Template::made(|_| {
    format!(
        "SELECT id, lease_until IS NOT NULL AS is_lost FROM jobs \
         WHERE jobs.provider = $1 AND {OUT_OF_BACKLOG} AND {IS_DUE} AND {IS_LOST_OR_ASLEEP} AND {READABLE} \
             AND {CLAIMABLE} \
         ORDER BY jobs.wake_at LIMIT $2"
    )
});

static LEFT_IN_FLIGHT: Template = Template::made(|_| {
    format!(
        "SELECT id, true AS is_lost FROM jobs \
         WHERE jobs.provider = $1 AND jobs.state = 'sending' AND {IS_LOST_OR_ASLEEP} AND {READABLE} \
             AND {CLAIMABLE} LIMIT $2"
    )
});

/// The flow of the written job.
const FLOW: &str = "account, CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END AS class";

static WAKE: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET backlog = true {{from}} \
         WHERE id = $1 AND jobs.state || '' IN ('waiting', 'unknown') AND NOT jobs.backlog \
             AND jobs.lease_until IS NULL AND {IS_DUE}"
    )
    .into(),
    written_columns: COUNTED_AND_WRITTEN_COLUMNS.into(),
    effects: vec![count_in().into()],
    returning: FLOW,
});

/// If a person has cleared the lease of a job in flight, it returns, too. A job that waits without a lease has been
/// returned or put to sleep since it was found, and stays.
static TAKE_AWAY: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET fence = fence + 1, backlog = true, lease_owner = NULL, lease_until = NULL, \
             lost_holders = {LOST_HOLDERS}, \
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
         WHERE id = $1 AND jobs.state || '' IN ('waiting', 'sending', 'unknown') AND NOT jobs.backlog \
             AND (jobs.lease_until <= {{now}} OR (jobs.lease_until IS NULL AND jobs.state || '' = 'sending'))"
    )
    .into(),
    written_columns: COUNTED_AND_WRITTEN_COLUMNS.into(),
    effects: vec![CLOSE_LEFT_OPEN.into(), count_in().into()],
    returning: FLOW,
});

/// A job that returns.
struct Returning {
    id: JobId,
    is_lost: bool,
}

from_row!(row => Returning { id, is_lost });

from_row!(row => FlowKey { class, account });

impl Database {
    /// The lanes that have jobs for [`Database::return_due`]. One statement for all lanes, since most have none.
    pub async fn lanes_with_returns(&self) -> Result<BTreeSet<ProviderName>, LedgerError> {
        providers(&self.query_by_index(&LANES_WITH_RETURNS, []).await?)
    }

    /// Returns sleeping jobs of a lane that are due, and jobs whose lease has ended at least `grace` ago, to the backlog;
    /// at most this many of each, and none that `is_kept`.
    pub async fn return_due(
        &self,
        lane: &ProviderName,
        grace: Duration,
        at_most: u32,
        is_kept: &(dyn Fn(&JobId) -> bool + Sync),
    ) -> Result<ReturnedJobs, LedgerError> {
        let mut found: Vec<Returning> = Vec::new();
        for sql in [&SLEEPERS, &LEFT_IN_FLIGHT] {
            for row in self.query_by_index(sql, args![lane, at_most, grace]).await? {
                found.push(Returning::from_row(&row)?);
            }
        }
        found.retain(|job| !is_kept(&job.id));
        let lost = found.iter().filter(|job| job.is_lost).count();
        let write = |Returning { id, is_lost }| {
            let take_away = Args::from(args![&id, WaitReason::WorkerLost.code()]);
            match is_lost {
                true => self.write(&TAKE_AWAY, take_away, Duration::ZERO),
                false => self.write(&WAKE, Args::from(args![&id]), Duration::ZERO),
            }
        };
        let mut flows = Vec::with_capacity(found.len());
        for written in join_all(found.into_iter().map(write)).await {
            if let Some(row) = written? {
                flows.push(FlowKey::from_row(&row)?);
            }
        }
        Ok(ReturnedJobs { flows, lost: u32::try_from(lost).unwrap_or(u32::MAX) })
    }
}
