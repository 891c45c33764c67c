//! PostgreSQL that waits for a synchronous standby: commits hang, the pool keeps its bound, and nothing is cancelled.

use std::sync::atomic::AtomicBool;

use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;

use super::*;

const CONNECTIONS: u32 = 6;
/// Longer than two writes wait for an answer.
const WAITING: Duration = Duration::from_secs(40);
const PATIENCE: Duration = Duration::from_secs(90);

fn psql(cluster: &Postgres, sql: &str) -> String {
    let output = cluster.psql("standby").args(["-c", sql]).output().unwrap();
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn set_standby(cluster: &Postgres, names: &str) {
    psql(cluster, &format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"));
    psql(cluster, "SELECT pg_reload_conf()");
    let deadline = std::time::Instant::now() + PATIENCE;
    while psql(cluster, "SHOW synchronous_standby_names") != names {
        assert!(std::time::Instant::now() < deadline, "the setting is not in force");
    }
}

fn open_connections(cluster: &Postgres) -> u32 {
    psql(cluster, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sluicegate'").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_commits_keep_the_bound_of_connections() {
    let cluster = Postgres::start();
    let database = Database::open(&cluster.create_database("standby"), CONNECTIONS).unwrap();
    database.migrate().await.unwrap();
    set_standby(&cluster, "missing");
    let log = cluster.log_bytes();
    let is_over = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..20)
        .map(|writer| {
            let (ledger, is_over) = (database.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let (job, mut errors) = (job(&format!("p{writer}")), Vec::new());
                while let Err(error) = ledger.record_backlog(&job, hash(1), Duration::ZERO).await {
                    assert!(matches!(error, LedgerError::Unavailable(_)), "{error:?}");
                    errors.push(error.to_string());
                    if is_over.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                }
                errors
            })
        })
        .collect();
    let begun = std::time::Instant::now();
    let mut most = 0;
    while begun.elapsed() < WAITING {
        most = most.max(open_connections(&cluster));
        // Reads wait for no standby.
        database.settings_version().await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(most <= CONNECTIONS, "{most} connections");
    is_over.store(true, Ordering::Relaxed);
    set_standby(&cluster, "");
    let mut errors = Vec::new();
    for writer in writers {
        errors.extend(tokio::time::timeout(PATIENCE, writer).await.unwrap().unwrap());
    }
    assert!(errors.iter().any(|error| error.contains("synchronous standby")), "{errors:?}");
    assert_eq!(psql(&cluster, "SELECT count(*) FROM jobs"), "20");
    let log = String::from_utf8_lossy(&cluster.log_since(log)).into_owned();
    assert!(!log.contains("canceling wait for synchronous replication"), "{log}");
    // The pool is whole again.
    database.close().await;
}
