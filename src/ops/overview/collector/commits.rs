//! Whether the database commits, as this process finds it: the reports of workers can be read, and are old, while it does
//! not.

use super::super::sources::CachedValue;
use super::{OverviewCollector, ReportsWithSkew, SOURCE_TIMEOUT};
use crate::fleet::workers::Outage;
use crate::ledger::committed_writes::WriteOutage;
use crate::ledger::fleet::StoredReport;

/// What the overview shows of it.
pub(super) struct CommitStatus {
    pub problem: Option<String>,
    /// The last time in which reports could be neither written nor read.
    pub outage: Option<Outage>,
}

impl OverviewCollector {
    pub(super) fn commit_status(&self, reports: &CachedValue<ReportsWithSkew>) -> CommitStatus {
        let writes = self.sources.ledger.committed_writes();
        let unwritten =
            writes.outage().filter(|outage| outage.ended_at.is_some() || !self.others_write(reports, outage));
        let continuing = unwritten.as_ref().filter(|outage| outage.ended_at.is_none());
        let problem = continuing.map(|outage| outage.cause.clone());
        let unread = reports.outage;
        let is_unread = unread.is_some_and(|outage| outage.ended.is_none());
        CommitStatus {
            problem: problem.or_else(|| writes.fault().map(|fault| fault.to_string())),
            outage: unread.filter(|_| is_unread).or(unwritten.map(shown)).or(unread),
        }
    }

    /// Whether another worker has reported since this one could not: then the fault is this process's own.
    fn others_write(&self, reports: &CachedValue<ReportsWithSkew>, outage: &WriteOutage) -> bool {
        let failing_for = outage.failed_at.elapsed();
        // An age is that of some moment while the reports were read.
        let age = |row: &StoredReport| row.age + reports.age + SOURCE_TIMEOUT;
        let is_newer = |row: &StoredReport| row.id != self.sources.worker && age(row) < failing_for;
        reports.value.iter().any(|(rows, _)| rows.iter().any(is_newer))
    }
}

fn shown(outage: WriteOutage) -> Outage {
    Outage { began: outage.began_at.elapsed(), ended: outage.ended_at.map(|at| at.elapsed()) }
}
