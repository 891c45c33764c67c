//! Who made a change, with what and why, written into its audit in the same transaction.
//!
//! Refuses to write the audit itself: triggers do, for plain SQL too. They are told before where the database can pass
//! settings to them; else their rows are completed afterwards.

use super::dialect::Dialect;
use super::engine::{Args, Sql, Step, Value};
use super::storable;
use crate::domain::job::JobId;
use crate::ledger::operator::By;

pub struct Signature {
    /// For this transaction alone.
    before: Option<Sql>,
    after_job: Option<Sql>,
}

impl Signature {
    pub fn new(dialect: Dialect) -> Self {
        let sqlite = dialect == Dialect::Sqlite;
        let before = "SELECT set_config('sluicegate.os_user', $1, true) AS os_user, \
                          set_config('sluicegate.because', COALESCE($2, ''), true) AS because, \
                          set_config('application_name', COALESCE($3, current_setting('application_name')), true) \
                              AS program";
        let after_job = "UPDATE job_audit SET os_user = $1, because = $2, program = COALESCE($3, program) \
                         WHERE id = (SELECT max(id) FROM job_audit WHERE job_id = $4)";
        Self { before: (!sqlite).then(|| dialect.sql(before)), after_job: sqlite.then(|| dialect.sql(after_job)) }
    }

    /// The change, signed where the database is told before. Each audit of it is completed afterwards by whoever knows them
    /// elsewhere.
    pub fn before(&self, change: Vec<Step>, by: &By) -> Vec<Step> {
        let before = self.before.iter().map(|sql| step(sql, who_and_why(by).into()));
        before.chain(change).collect()
    }

    /// The change of one job, signed.
    pub fn on_job(&self, id: &JobId, change: Vec<Step>, by: &By) -> Vec<Step> {
        let mut all = self.before(change, by);
        all.extend(self.after_job.iter().map(|sql| {
            let mut args = who_and_why(by).to_vec();
            args.push(id.as_str().into());
            step(sql, Args::from(args))
        }));
        all
    }
}

pub fn who_and_why(by: &By) -> [Value; 3] {
    [storable(&by.os_user).into(), by.because.as_deref().map(storable).into(), by.program.into()]
}

fn step(sql: &Sql, args: Args) -> Step {
    Step { sql: sql.clone(), args, must_affect: true }
}
