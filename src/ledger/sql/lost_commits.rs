//! The SQL that finds lost commits, and claims their payments so that they are repaired.
//!
//! The comparison commits a row in its own transaction, so only a server that takes writes can answer. A claim for a
//! repair takes a payment wherever it waits: in the backlog, asleep, or with a worker that is lost.

use std::collections::HashMap;

use super::attempt::CLOSE_LEFT_OPEN;
use super::claim::{CLAIMED_COLUMNS, IS_UNHELD, claimed};
use super::dialect::{JobWriteText, Template, WriteTemplate};
use super::engine::args;
use super::fleet::CHECK_COMMIT;
use super::result::{FromRow as _, SqlRow};
use super::texts;
use super::upkeep::{OPEN, RECORDED};
use crate::domain::commit_memory::{End, Mark};
use crate::domain::job::JobId;
use crate::domain::outcome::FinalState;
use crate::ledger::database::Database;
use crate::ledger::lane_holds::ClaimedForRepair;
use crate::ledger::upkeep::RecordedJob;
use crate::ledger::{LeaseToken, LedgerError};

static MARKS: Template = Template::new("SELECT id, fence, last_attempt, state FROM jobs WHERE id IN ({texts:$1})");

/// Without the right to read the state of replication, a role still sees the rows. Where no name is set, all are
/// asynchronous.
static ASYNCHRONOUS_STANDBYS: Template = Template::by_dialect(
    "SELECT count(*) AS standbys FROM pg_stat_replication WHERE current_setting('synchronous_standby_names') = ''",
    "SELECT 0 AS standbys",
);

/// Before the claim, so that the job's flow counts it out. The condition fits no partial index: PostgreSQL would read the
/// whole of `jobs_in_backlog` if it was short when the plan was made.
static LEAVE_BACKLOG: Template =
    Template::new("UPDATE jobs SET backlog = false WHERE id = $1 AND coalesce(backlog, false)");

/// The token rises above the lost one: a write under it must stay rejected.
static CLAIM: WriteTemplate = WriteTemplate::new(|| JobWriteText {
    update: format!(
        "UPDATE jobs SET fence = CASE WHEN fence > $2 THEN fence ELSE $2 END + 1, holder = $3, \
             response_by = NULL, \
             attempts = attempts + CASE WHEN state = 'sending' THEN 1 ELSE 0 END, \
             maybe_charged = maybe_charged OR state = 'sending', \
             state = CASE WHEN state = 'sending' THEN 'unknown' ELSE state END, updated_at = {{now}} {{from}} \
         WHERE id = $1 AND {OPEN} AND ({IS_UNHELD} OR jobs.holder = $4)"
    )
    .into(),
    written_columns: "jobs.*".into(),
    effects: vec![CLOSE_LEFT_OPEN.into()],
    returning: CLAIM_COLUMNS.as_str(),
});

static CLAIM_COLUMNS: std::sync::LazyLock<String> =
    std::sync::LazyLock::new(|| format!("{}, {CLAIMED_COLUMNS}", RECORDED));

impl Database {
    /// The marks of these payments, from a transaction that has committed a row. Unknown payments are left out.
    pub async fn committed_marks(&self, ids: &[JobId]) -> Result<HashMap<JobId, Mark>, LedgerError> {
        let ids = texts(ids.iter().map(JobId::as_str));
        let steps = vec![self.must_affect(&CHECK_COMMIT, []), self.step(&MARKS, [ids])];
        let rows =
            self.engine.atomically(steps).await?.ok_or_else(|| {
                LedgerError::StatementFailed("table `commit_checks` has no row: insert one".to_owned())
            })?;
        let mark = |row: &SqlRow| Ok((row.get("id")?, mark_of(row)?));
        rows.iter().skip(1).flatten().map(mark).collect()
    }

    /// Number of connected standbys, if none of them is synchronous. A fail-over to one of them loses commits.
    pub async fn asynchronous_standbys(&self) -> Result<u64, LedgerError> {
        self.query_row(&ASYNCHRONOUS_STANDBYS, []).await?.get("standbys")
    }

    /// Claims an open payment for its repair, with a token above this one. `own`: the claiming process, if it works on no
    /// such payment itself. `None`: it is closed, or a living worker has it.
    pub async fn claim_for_repair(
        &self,
        lost: &LeaseToken,
        holder: &str,
        own: Option<&str>,
    ) -> Result<Option<ClaimedForRepair>, LedgerError> {
        let args = args![&lost.id, lost.fence, holder, own];
        let mut steps = vec![self.step(&LEAVE_BACKLOG, args![&lost.id])];
        steps.extend(self.write_steps(&CLAIM, args));
        let Some(rows) = self.engine.atomically(steps).await? else { return Ok(None) };
        let Some(row) = rows.iter().flatten().next() else { return Ok(None) };
        let RecordedJob { job, .. } = RecordedJob::from_row(row)?;
        Ok(Some(ClaimedForRepair { claimed: claimed(&job, row)?, job }))
    }
}

fn mark_of(row: &SqlRow) -> Result<Mark, LedgerError> {
    let end = FinalState::from_name(&row.get::<String>("state")?).map_or(End::Open, End::of);
    Ok(Mark { fence: row.get("fence")?, number: row.get("last_attempt")?, end })
}
