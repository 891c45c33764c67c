//! PostgreSQL that allows fewer connections than configured: work goes on, and errors quote the server's message.

use std::sync::atomic::AtomicBool;

use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::ConnectionLimits;
use sluicegate::ledger::database::Database;

use super::*;
use crate::support::process::free_port;

const CLAIMS: u32 = 100;
const PATIENCE: Duration = Duration::from_secs(60);

/// A migrated database whose owner is limited to this many connections, and the URL of that owner.
async fn limited_to(connections: u32) -> (Fixture, String) {
    let fixture = Fixture::empty(Kind::Postgres);
    let name = url::Url::parse(&fixture.url).unwrap().path().trim_start_matches('/').to_owned();
    fixture.sql(&format!("CREATE ROLE \"{name}\" LOGIN")).await.unwrap();
    fixture.sql(&format!("ALTER DATABASE \"{name}\" OWNER TO \"{name}\"")).await.unwrap();
    let url = fixture.url.replace("postgres@", &format!("{name}@"));
    let owner = Database::open(&url, 16).unwrap();
    owner.migrate().await.unwrap();
    owner.close().await;
    let left = format!("SELECT count(*) FROM pg_stat_activity WHERE usename = '{name}'");
    while fixture.one(&left).await != "0" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fixture.sql(&format!("ALTER ROLE \"{name}\" CONNECTION LIMIT {connections}")).await.unwrap();
    (fixture, url)
}

/// Claims jobs from sixteen tasks; returns the errors that occurred on the way.
async fn work(database: &Database, worker: &'static str) -> Vec<LedgerError> {
    let claim = |number: u32| {
        let ledger = database.clone();
        async move {
            let (job, mut errors) = (job(&format!("{worker}-{number}")), Vec::new());
            loop {
                match ledger.claim(&job, hash(1), worker).await {
                    Ok(_) => return errors,
                    Err(error) => errors.push(error),
                }
            }
        }
    };
    let claims = futures_util::stream::iter((0..CLAIMS).map(claim));
    let errors: Vec<Vec<LedgerError>> =
        futures_util::StreamExt::collect(futures_util::StreamExt::buffer_unordered(claims, 16)).await;
    errors.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_runs_with_fewer_connections() {
    for connections in [4, 1] {
        let (fixture, url) = limited_to(connections).await;
        let database = Database::open(&url, 16).unwrap();
        let (mut hints, is_done) = (database.change_hints().unwrap(), Arc::new(AtomicBool::new(false)));
        let listening = tokio::spawn(async move {
            loop {
                hints.next().await;
            }
        });
        let (settings, done) = (database.clone(), Arc::clone(&is_done));
        let polls = tokio::spawn(async move {
            while !done.load(Ordering::Relaxed) {
                settings.settings_version().await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let errors = tokio::time::timeout(PATIENCE, work(&database, "worker-a")).await.unwrap();
        is_done.store(true, Ordering::Relaxed);
        polls.await.unwrap();
        listening.abort();
        assert!(errors.is_empty(), "{connections}: {errors:?}");
        assert_eq!(fixture.one("SELECT count(*) FROM jobs").await, CLAIMS.to_string());
        database.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_share_limited_connections() {
    let (fixture, url) = limited_to(4).await;
    let workers: Vec<Database> = (0..3).map(|_| Database::open(&url, 16).unwrap()).collect();
    let all = async { tokio::join!(work(&workers[0], "a"), work(&workers[1], "b"), work(&workers[2], "c")) };
    let (a, b, c) = tokio::time::timeout(PATIENCE, all).await.unwrap();
    let is_theirs = |error: &LedgerError| matches!(error, LedgerError::Unavailable(text) if text.contains("53300"));
    let errors: Vec<LedgerError> = a.into_iter().chain(b).chain(c).collect();
    assert!(errors.iter().all(is_theirs), "{errors:?}");
    assert_eq!(fixture.one("SELECT count(*) FROM jobs").await, (3 * CLAIMS).to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_error_quotes_the_server() {
    let (_fixture, url) = limited_to(0).await;
    let error = Database::open(&url, 16).unwrap().ping().await.unwrap_err();
    let quotes_server = |text: &str| text.contains("too many connections for role") && text.contains("SQLSTATE 53300");
    assert!(matches!(&error, LedgerError::Unavailable(text) if quotes_server(text)), "{error:?}");
    let nobody = format!("postgres://postgres@127.0.0.1:{}/ledger", free_port());
    let error = Database::open(&nobody, 16).unwrap().ping().await.unwrap_err();
    assert!(matches!(&error, LedgerError::Unavailable(text) if text.contains("Connection refused")), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_limits_are_reported() {
    let (fixture, url) = limited_to(4).await;
    let limits = Database::open(&url, 16).unwrap().connection_limits().await.unwrap();
    assert_eq!(limits, Some(ConnectionLimits { role: Some(4), database: None, server: 297 }));
    let superuser = fixture.database.connection_limits().await.unwrap();
    assert_eq!(superuser, Some(ConnectionLimits { role: None, database: None, server: 297 }));
}
