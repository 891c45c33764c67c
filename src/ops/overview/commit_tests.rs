//! Tests of a database whose commits fail: what the overview shows while its reports can still be read.

use std::sync::Arc;

use tokio::sync::watch;

use super::tests::{report, row, test_collector};
use crate::domain::backend_fault::BackendFault;
use crate::fleet::ProviderState;
use crate::ledger::database::Database;
use crate::limiter::embedded::EmbeddedLimiter;
use crate::worker::supervisor::WorkerStatus;

#[tokio::test]
async fn uncommitted_report_is_an_outage_unless_others_write() {
    let database = Database::open("sqlite::memory:", 1).unwrap();
    database.migrate().await.unwrap();
    database.apply_settings(&[row("acme")], false).await.unwrap();
    for id in ["this-one", "other"] {
        database.write_report(&report(id, 0, 1_000)).await.unwrap();
    }
    let (_progress, progress) = watch::channel(WorkerStatus::default());
    let collector = test_collector(&database, progress, Arc::new(EmbeddedLimiter::new()));
    database.committed_writes().record_report(&Err(BackendFault::DiskFull.into()));
    let full = "the database cannot write: its disk is full";
    let overview = collector.overview().await;
    let acme = &overview.providers[0];
    assert_eq!((acme.state, acme.cause.as_deref()), (ProviderState::BackendUnavailable, Some(full)));
    assert_eq!((overview.outages[0].problem.as_str(), overview.outages[0].everywhere), (full, true));
    assert_eq!(overview.warnings, [full]);
    // The other one has committed since, so the fault is this process's own.
    while !collector.overview().await.outages.is_empty() {
        database.write_report(&report("other", 0, 1_000)).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
