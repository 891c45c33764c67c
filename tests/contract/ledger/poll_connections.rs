//! Polled values, which every worker reads each second, while operators' queries hold all other connections.

use sqlx::{Connection, PgConnection};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polls_succeed_while_other_queries_wait() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let taken = fixture.database.take_leadership(&name("acme"), None, "redis:a").await.unwrap();
    let mut other = PgConnection::connect(&fixture.url).await.unwrap();
    let mut locked = other.begin().await.unwrap();
    sqlx::query("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE").execute(&mut *locked).await.unwrap();
    let questions: Vec<_> = (0..20)
        .map(|_| {
            let ledger = fixture.database.clone();
            tokio::spawn(async move { ledger.job_details(&job("p1").id).await.is_ok() })
        })
        .collect();
    let waiting =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let mut looking = PgConnection::connect(&fixture.url).await.unwrap();
    // Half of the sixteen connections are for batches, and one is for polled values.
    while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut looking).await.unwrap() < 7 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Enough polls that the last of the other connections is taken meanwhile.
    for _ in 0..300 {
        let held = fixture.database.stored_leaders(&[name("acme")]).await.unwrap();
        assert_eq!(held[&name("acme")].term, taken.term);
        fixture.database.settings_version().await.unwrap();
    }
    assert!(questions.iter().any(|question| !question.is_finished()), "no query is waiting any more");
    locked.rollback().await.unwrap();
    for question in questions {
        question.await.unwrap();
    }
}
