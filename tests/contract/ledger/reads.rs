//! Reads of people: on connections of their own, which payments do not miss, and each ends with its caller.

use sluicegate::ledger::LedgerError;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
/// More than there are connections.
const READERS: usize = 20;

on_every_database!(abandoned_reads_hold_up_no_payment);

/// A view in the place of the reports, without an end.
fn endless(kind: Kind) -> &'static str {
    match kind {
        Kind::Postgres => {
            "DROP TABLE worker_reports; \
             CREATE VIEW worker_reports AS SELECT 'w' AS id, 'h' AS host, 1::bigint AS pid, 'v' AS version, \
                 now() AS started_at, now() AS reported_at, 1::bigint AS format, '{}'::jsonb AS report FROM pg_sleep(3600)"
        }
        _ => {
            "DROP TABLE worker_reports; \
             CREATE VIEW worker_reports AS WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) \
                 SELECT 'w' AS id, 'h' AS host, 1 AS pid, 'v' AS version, 0 AS started_at, 0 AS reported_at, \
                 1 AS format, '{}' AS report FROM c WHERE n < 0"
        }
    }
}

async fn abandoned_reads_hold_up_no_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sql(endless(kind)).await.unwrap();
    let (ledger, reads) = (fixture.database.clone(), fixture.database.for_reads());
    let log = (kind == Kind::Postgres).then(|| Postgres::shared().log_bytes());
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let reads = reads.clone();
            tokio::spawn(async move { reads.worker_reports().await })
        })
        .collect();
    let running = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' \
                   AND query LIKE '%FROM worker_reports%' AND pid <> pg_backend_pid()";
    if kind == Kind::Postgres {
        await_that(async || fixture.one(running).await != "0").await;
    }
    for number in 0..5 {
        fixture.take(&job(&format!("p{number}"))).await;
        assert_eq!(ledger.state_counts().await.unwrap().len(), 1, "{kind:?}");
    }
    readers.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(reads.state_counts().await.unwrap().len(), 1, "{kind:?}: the connections are free");
    assert_eq!(reads.raw_rows(None).await.unwrap().len(), 0, "{kind:?}: a read of several statements");
    if let Some(log) = log {
        await_that(async || fixture.one(running).await == "0").await;
        let database = fixture.url.rsplit('/').next().unwrap();
        let log = String::from_utf8_lossy(&Postgres::shared().log_since(log)).into_owned();
        let timed_out = log.lines().find(|line| line.contains(database) && line.contains("statement timeout"));
        assert_eq!(timed_out, None, "they ended with their callers");
    }
    let error = reads.worker_reports().await.unwrap_err();
    assert!(matches!(error, LedgerError::Unavailable(_)), "{kind:?}: {error:?}");
    assert!(reads.check_commit().await.is_err(), "{kind:?}: it only reads");
}

async fn await_that(mut condition: impl AsyncFnMut() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(std::time::Instant::now() < deadline, "it never came");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
