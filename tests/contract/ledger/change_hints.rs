//! Hints of other processes: a notice of recorded payments on PostgreSQL, and another connection's commit on SQLite.

use std::collections::BTreeSet;

use sluicegate::ledger::database::{ChangeHint, ChangeHints};

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

async fn next(hints: &mut ChangeHints) -> ChangeHint {
    tokio::time::timeout(PATIENCE, hints.next()).await.expect("no hint")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notice_names_the_lane_of_a_record() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let other = Database::open(&fixture.url, 4).unwrap();
    let mut hints = other.change_hints().unwrap();
    // It listens now.
    assert_eq!(next(&mut hints).await, ChangeHint::Anything);
    fixture.database.record_backlog(&job("p1"), hash(1), Duration::ZERO).await.unwrap();
    // The commit of a record carries no notice: the first one is this.
    fixture.database.notify_of_records(&BTreeSet::from([name("stripe")])).await.unwrap();
    assert_eq!(next(&mut hints).await, ChangeHint::Records(name("stripe")));
    fixture.sql("UPDATE settings_version SET version = version + 1").await.unwrap();
    assert_eq!(next(&mut hints).await, ChangeHint::Settings);
}

/// The commits of its own process tell a worker nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_hints_at_commits_of_others_alone() {
    let fixture = Fixture::migrated(Kind::SqliteFile).await;
    let worker = Database::open(&fixture.url, 1).unwrap();
    let mut hints = worker.change_hints().unwrap();
    // What was committed before it looked.
    assert_eq!(next(&mut hints).await, ChangeHint::Anything);
    worker.record_backlog(&job("own"), hash(1), Duration::ZERO).await.unwrap();
    let quiet = tokio::time::timeout(Duration::from_millis(300), hints.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    fixture.database.record_backlog(&job("other"), hash(3), Duration::ZERO).await.unwrap();
    assert_eq!(next(&mut hints).await, ChangeHint::Anything);
    assert!(Database::open("sqlite::memory:", 1).unwrap().change_hints().is_none());
}
