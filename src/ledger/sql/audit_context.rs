//! The context of an audited change: author, program and reason, stored in the same transaction.
//!
//! Triggers write the audit, for plain SQL too. PostgreSQL passes the context to them as settings, set before the
//! change. On SQLite, the audit row is completed after the change.

use super::dialect::Dialect;
use super::engine::{Args, Sql, Step, Value};
use super::storable;
use crate::domain::job::JobId;
use crate::ledger::operator::Actor;

pub struct AuditContext {
    /// Valid for the transaction only.
    set_actor: Option<Sql>,
    after_job: Option<Sql>,
}

impl AuditContext {
    pub fn new(dialect: Dialect) -> Self {
        let sqlite = dialect == Dialect::Sqlite;
        let before = "SELECT set_config('sluicegate.os_user', $1, true) AS os_user, \
                          set_config('sluicegate.because', COALESCE($2, ''), true) AS because, \
                          set_config('application_name', COALESCE($3, current_setting('application_name')), true) \
                              AS program";
        let after_job = "UPDATE job_audit SET os_user = $1, because = $2, program = COALESCE($3, program) \
                         WHERE id = (SELECT max(id) FROM job_audit WHERE job_id = $4)";
        Self {
            set_actor: (!sqlite).then(|| dialect.render(before)),
            after_job: sqlite.then(|| dialect.render(after_job)),
        }
    }

    /// The change, with the context set before it on PostgreSQL. On SQLite, the caller completes each audit row
    /// afterwards.
    pub fn with_actor(&self, change: Vec<Step>, by: &Actor) -> Vec<Step> {
        let before = self.set_actor.iter().map(|sql| step(sql, actor_args(by).into()));
        before.chain(change).collect()
    }

    /// The change of one job, with its context on both databases.
    pub fn wrap_job_change(&self, id: &JobId, change: Vec<Step>, by: &Actor) -> Vec<Step> {
        let mut all = self.with_actor(change, by);
        all.extend(self.after_job.iter().map(|sql| {
            let mut args = actor_args(by).to_vec();
            args.push(id.as_str().into());
            step(sql, Args::from(args))
        }));
        all
    }
}

pub fn actor_args(by: &Actor) -> [Value; 3] {
    [storable(&by.os_user).into(), by.reason.as_deref().map(storable).into(), by.program.into()]
}

fn step(sql: &Sql, args: Args) -> Step {
    Step { sql: sql.clone(), args, must_affect: true }
}
