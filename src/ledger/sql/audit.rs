//! The audit of settings and of jobs: author, program and reason of a change, and reading the audit of settings.
//!
//! Triggers write the audit, for plain SQL and commands alike, in the transaction of the change. They read the author
//! from settings of the session, or on SQLite from a row. The audit row of a job is completed after the change there.

use super::dialect::{Dialect, Template};
use super::engine::{Args, Step, Value, args};
use super::result::{FromRow, SqlRow, from_row, read_or_log};
use super::storable;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::settings::{AuditRow, AuditedChange};

/// Sets author and reason for the triggers.
static SET_ACTOR: Template = Template::by_dialect(
    "SELECT set_config('sluicegate.os_user', $1, true) AS os_user, \
         set_config('sluicegate.because', COALESCE($2, ''), true) AS because, \
         set_config('application_name', COALESCE($3, current_setting('application_name')), true) AS program",
    "UPDATE settings_person SET os_user = $1, because = $2, program = COALESCE($3, 'sluicegate')",
);

/// For SQLite; PostgreSQL clears them at the transaction's end.
static FORGET_ACTOR: Template =
    Template::new("UPDATE settings_person SET os_user = NULL, because = NULL, program = NULL");

static COMPLETE_JOB_AUDIT: Template = Template::new(
    "UPDATE job_audit SET os_user = $1, because = $2, program = COALESCE($3, program) \
     WHERE id = (SELECT max(id) FROM job_audit WHERE job_id = $4)",
);

static READ: Template = Template::new(
    "SELECT {ms:at} AS at_ms, who, os_user, program, because, table_name, row_key, \
         {text:old_row} AS old_row, {text:new_row} AS new_row FROM settings_audit \
     WHERE $1 IS NULL OR (table_name <> 'settings_version' \
         AND (row_key = $1 OR substr(row_key, 1, length($1) + 1) = $1 || '/')) \
     ORDER BY id DESC LIMIT $2",
);

impl Database {
    /// A transaction on settings with its author. The rows of its steps begin at [`LEADING_STEPS`].
    pub(super) fn settings_change_by(&self, by: &Actor, steps: Vec<Step>) -> Vec<Step> {
        let forget = (self.dialect() == Dialect::Sqlite).then(|| self.step(&FORGET_ACTOR, []));
        std::iter::once(self.step(&SET_ACTOR, actor_args(by))).chain(steps).chain(forget).collect()
    }

    /// A change of jobs, with its author on PostgreSQL. On SQLite, the caller completes each audit row afterwards.
    pub(super) fn job_changes_by(&self, by: &Actor, change: Vec<Step>) -> Vec<Step> {
        let author = (self.dialect() == Dialect::Postgres).then(|| self.must_affect(&SET_ACTOR, actor_args(by)));
        author.into_iter().chain(change).collect()
    }

    /// The change of one job, with its author on both databases.
    pub(super) fn job_change_by(&self, by: &Actor, id: &JobId, change: Vec<Step>) -> Vec<Step> {
        let mut all = self.job_changes_by(by, change);
        if self.dialect() == Dialect::Sqlite {
            let args: Args = actor_args(by).into_iter().chain(args![id]).collect();
            all.push(self.must_affect(&COMPLETE_JOB_AUDIT, args));
        }
        all
    }

    /// The last changes of a provider's rows (row, limits, account rules), or of all settings; newest first, at most
    /// `at_most`. Changes by SQL are listed like those by commands.
    pub async fn settings_audit(
        &self,
        provider: Option<&ProviderName>,
        at_most: u32,
    ) -> Result<Vec<AuditedChange>, LedgerError> {
        let rows = self.query(&READ, args![provider, at_most]).await?;
        Ok(read_or_log(&rows, "settings_audit", "row_key"))
    }
}

/// Number of steps before the steps of the change.
pub const LEADING_STEPS: usize = 1;

pub fn actor_args(by: &Actor) -> [Value; 3] {
    args![storable(&by.os_user), by.reason.as_deref().map(storable), by.program]
}

from_row!(row => AuditRow { at, who, os_user, program, because, table_name, row_key, old_row, new_row });

impl FromRow for AuditedChange {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        AuditRow::from_row(row).map(Self::from)
    }
}
