//! The embedded queue: the promises of all queues, crash recovery, group commit, and the position of a job.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::poll;
use sluicegate::domain::job::Identifier;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::database::Database;
use sluicegate::queue::embedded::EmbeddedQueue;
use sluicegate::queue::{FoundMessage, Queue, QueueError, SearchResult};
use sqlx::{Row as _, SqlitePool};

use super::{
    PATIENCE, assert_invalid_headers, bodies, conformance, invalid_message, invalid_with_all_properties, provider,
    publish_all, set, take, take_many, to_lane,
};

struct Bench {
    queue: Arc<dyn Queue>,
    pool: SqlitePool,
    _dir: tempfile::TempDir,
}

/// Opens the database as one process does: with one connection.
fn open(dir: &tempfile::TempDir) -> Database {
    Database::open(&format!("sqlite://{}", dir.path().join("queue.db").display()), 1).unwrap()
}

async fn bench(_name: &str) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let database = open(&dir);
    database.migrate().await.unwrap();
    let pool = database.sqlite_pool().unwrap();
    Bench { queue: Arc::new(EmbeddedQueue::new(pool.clone())), pool, _dir: dir }
}

conformance!(bench);

#[tokio::test(flavor = "multi_thread")]
async fn oldest_ready_age_is_reported() {
    let bench = bench("").await;
    let stripe = provider("stripe");
    let age = async || bench.queue.oldest_ready(&stripe).await.unwrap();
    assert_eq!(age().await, None);
    publish_all(&*bench.queue, "stripe", &["a", "b"]).await;
    let older = "UPDATE queue_messages SET visible_at_ms = visible_at_ms - 60000 WHERE body = ?1";
    sqlx::query(older).bind(&b"b"[..]).execute(&bench.pool).await.unwrap();
    let oldest = age().await.unwrap();
    assert!((Duration::from_secs(60)..Duration::from_secs(60) + PATIENCE).contains(&oldest), "{oldest:?}");
    // A delivered message is not ready, and a message that is not yet visible has no age.
    let mut lane = bench.queue.open_lane(&stripe, 1).await.unwrap();
    let delivery = take(&mut *lane).await;
    assert!(age().await.unwrap() < oldest);
    sqlx::query("UPDATE queue_messages SET visible_at_ms = visible_at_ms + 3600000")
        .execute(&bench.pool)
        .await
        .unwrap();
    assert_eq!(age().await, None);
    drop(delivery);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_are_kept_with_their_reason() {
    let bench = bench("").await;
    bench.queue.publish(invalid_message()).await.unwrap();
    let row = sqlx::query("SELECT body, properties FROM queue_messages WHERE queue = 'payments.invalid'")
        .fetch_one(&bench.pool)
        .await
        .unwrap();
    assert_eq!(row.get::<Vec<u8>, _>("body"), b"not a job");
    let properties: serde_json::Value = serde_json::from_str(&row.get::<String, _>("properties")).unwrap();
    assert_invalid_headers(&serde_json::from_value(properties["headers"].clone()).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn new_process_recovers_unacknowledged_messages() {
    let bench = bench("").await;
    publish_all(&*bench.queue, "stripe", &["one", "two"]).await;
    // This runtime ends like a killed process: its tasks stop where they are, and no message is requeued.
    let killed = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let queue = Arc::clone(&bench.queue);
    let holding = killed.spawn(async move {
        let mut lane = queue.open_lane(&provider("stripe"), 10).await.unwrap();
        let held = take_many(&mut *lane, 2).await;
        (lane, held)
    });
    let (_lane, held) = holding.await.unwrap();
    tokio::task::spawn_blocking(move || killed.shutdown_timeout(PATIENCE)).await.unwrap();
    let next = EmbeddedQueue::new(bench.pool.clone());
    assert_eq!(next.recover().await.unwrap(), 2);
    let mut lane = next.open_lane(&provider("stripe"), 10).await.unwrap();
    let again = take_many(&mut *lane, 2).await;
    assert_eq!(bodies(&again), set(&["one", "two"]));
    for delivery in held {
        assert!(matches!(delivery.receipt.ack().await, Err(QueueError::Unavailable(_))));
    }
    drop(lane);
    next.close().await;
    assert_eq!(next.depth(&provider("stripe")).await.unwrap(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_can_publish() {
    let bench = bench("").await;
    let mut lane = bench.queue.open_lane(&provider("stripe"), 10).await.unwrap();
    let other = EmbeddedQueue::new(open(&bench._dir).sqlite_pool().unwrap());
    publish_all(&other, "stripe", &["from elsewhere"]).await;
    take(&mut *lane).await.receipt.ack().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_table_error_names_the_fix() {
    let bench = bench("").await;
    sqlx::query("DROP TABLE queue_messages").execute(&bench.pool).await.unwrap();
    let name = ProviderName::new("stripe").unwrap();
    let error = bench.queue.declare(&[name]).await.unwrap_err();
    assert!(matches!(&error, QueueError::Refused(text) if text.contains("sluicegate migrate")), "{error}");
}

/// Finishing the only message of a prefetch of one fails. The lane must end or go on, and never fall silent.
async fn after_a_failed_finish(trigger: &str, ack: bool) {
    let bench = bench("").await;
    publish_all(&*bench.queue, "stripe", &["one"]).await;
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let delivery = take(&mut *lane).await;
    sqlx::query(sqlx::AssertSqlSafe(format!("CREATE TRIGGER fault {trigger}"))).execute(&bench.pool).await.unwrap();
    let finished = if ack { delivery.receipt.ack().await } else { delivery.receipt.requeue().await };
    assert!(matches!(finished, Err(QueueError::Unavailable(_))), "{finished:?}");
    let ended = tokio::time::timeout(PATIENCE, lane.next()).await.expect("the lane fell silent");
    assert!(matches!(ended, Err(QueueError::Unavailable(_))));
    assert!(matches!(lane.resume().await, Err(QueueError::Unavailable(_))), "ended for good");
    drop(lane);
    sqlx::query("DROP TRIGGER fault").execute(&bench.pool).await.unwrap();
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let again = take(&mut *lane).await;
    assert!(again.redelivered);
    again.receipt.ack().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_acknowledgement_ends_the_lane() {
    let trigger = "BEFORE DELETE ON queue_messages BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END";
    after_a_failed_finish(trigger, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_requeue_ends_the_lane() {
    let trigger = "BEFORE UPDATE ON queue_messages BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END";
    after_a_failed_finish(trigger, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_message_frees_its_prefetch() {
    let bench = bench("").await;
    publish_all(&*bench.queue, "stripe", &["one"]).await;
    let mut lane = bench.queue.open_lane(&provider("stripe"), 1).await.unwrap();
    let delivery = take(&mut *lane).await;
    sqlx::query("DELETE FROM queue_messages").execute(&bench.pool).await.unwrap();
    assert!(matches!(delivery.receipt.ack().await, Err(QueueError::Unavailable(_))));
    publish_all(&*bench.queue, "stripe", &["two"]).await;
    assert_eq!(&take(&mut *lane).await.body[..], b"two");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_messages_keep_all_their_properties() {
    let bench = bench("").await;
    let invalid = invalid_with_all_properties();
    let mut expected = invalid.properties.clone();
    bench.queue.publish(invalid).await.unwrap();
    // As it was written when messages had only three properties.
    let old = r#"{"message_id":"old","content_type":null,"headers":{"tenant":"a"}}"#;
    let sql =
        "INSERT INTO queue_messages (queue, body, properties, visible_at_ms) VALUES ('payments.old', x'78', ?1, 0)";
    sqlx::query(sql).bind(old).execute(&bench.pool).await.unwrap();
    // No lane consumes that queue. The test moves its messages to one that it can open.
    sqlx::query("UPDATE queue_messages SET queue = 'payments.reader'").execute(&bench.pool).await.unwrap();
    let mut lane = bench.queue.open_lane(&provider("reader"), 2).await.unwrap();
    let mut kept = take_many(&mut *lane, 2).await.into_iter().map(|delivery| delivery.properties);
    let (old, kept) = (kept.next().unwrap(), kept.next().unwrap());
    assert_eq!((old.message_id.as_deref(), old.correlation_id, old.headers.len()), (Some("old"), None, 1));
    assert_invalid_headers(&kept.headers);
    expected.headers.clone_from(&kept.headers);
    assert_eq!(kept.headers["tenant"], "a");
    assert_eq!(kept, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn job_is_found_with_its_queue_position() {
    let bench = bench("").await;
    let of = |id: &str| format!(r#"{{ "id" : "{id}", "amount": 1, "currency": "EUR", "reference": "third" }}"#);
    publish_all(bench.queue.as_ref(), "acme", &[&of("first"), "not a job, \"third\"", &of("third"), &of("last")]).await;
    bench.queue.publish(invalid_message()).await.unwrap();
    let find = async |id: &str| bench.queue.find(&Identifier::new(id).unwrap()).await.unwrap();
    let SearchResult::Found(third) = find("third").await else { panic!("not found") };
    let found = FoundMessage {
        lane: provider("acme"),
        body: of("third").into(),
        is_delivered: false,
        messages_ahead: 2,
        ready_in: Duration::ZERO,
    };
    assert_eq!(third, found);
    assert_eq!(find("fourth").await, SearchResult::NotFound);
    let mut lane = bench.queue.open_lane(&provider("acme"), 3).await.unwrap();
    let _taken = take_many(lane.as_mut(), 3).await;
    let SearchResult::Found(third) = find("third").await else { panic!("not found") };
    assert!(third.is_delivered, "{third:?}");
    assert!(matches!(
        find("last").await,
        SearchResult::Found(FoundMessage { is_delivered: false, messages_ahead: 0, .. })
    ));
}

/// Counts the commits of the queue's one connection from now on.
async fn count_commits(pool: &SqlitePool) -> Arc<AtomicUsize> {
    let commits = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&commits);
    let mut connection = pool.acquire().await.unwrap();
    connection.lock_handle().await.unwrap().set_commit_hook(move || {
        counter.fetch_add(1, Ordering::SeqCst);
        true
    });
    commits
}

/// 300 writes at once make commits of 128, 128 and 44.
const COMMITS_OF_300: usize = 3;

#[tokio::test]
async fn concurrent_writes_share_a_commit() {
    let bench = bench("").await;
    let commits = count_commits(&bench.pool).await;
    let numbers: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    let published = numbers.iter().map(|number| bench.queue.publish(to_lane("stripe", number)));
    join_all(published).await.into_iter().for_each(Result::unwrap);
    assert_eq!(commits.swap(0, Ordering::SeqCst), COMMITS_OF_300);
    let mut lane = bench.queue.open_lane(&provider("stripe"), 300).await.unwrap();
    let taken = take_many(&mut *lane, 300).await;
    assert_eq!(bodies(&taken).len(), 300);
    commits.store(0, Ordering::SeqCst);
    let finished = taken.into_iter().map(|delivery| delivery.receipt.ack());
    join_all(finished).await.into_iter().for_each(Result::unwrap);
    assert_eq!(commits.swap(0, Ordering::SeqCst), COMMITS_OF_300);
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM queue_messages").fetch_one(&bench.pool).await.unwrap();
    assert_eq!(left, 0);
}

/// A message that the lane lost fails its own receipt, whatever else is in the same commit.
#[tokio::test]
async fn each_batched_write_gets_its_own_result() {
    let bench = bench("").await;
    publish_all(&*bench.queue, "stripe", &["a", "b", "c"]).await;
    let mut lane = bench.queue.open_lane(&provider("stripe"), 3).await.unwrap();
    let taken = take_many(&mut *lane, 3).await;
    sqlx::query("DELETE FROM queue_messages WHERE body = ?1").bind(&b"b"[..]).execute(&bench.pool).await.unwrap();
    let names: Vec<String> = taken.iter().map(|delivery| String::from_utf8(delivery.body.to_vec()).unwrap()).collect();
    let answers = join_all(taken.into_iter().map(|delivery| delivery.receipt.ack())).await;
    for (name, answer) in names.iter().zip(answers) {
        assert_eq!(answer.is_err(), name == "b", "{name}");
    }
}

#[tokio::test]
async fn dropped_write_is_not_started() {
    let bench = bench("").await;
    let mut first = pin!(bench.queue.publish(to_lane("stripe", "first")));
    assert!(poll!(&mut first).is_pending());
    {
        let dropped = pin!(bench.queue.publish(to_lane("stripe", "dropped")));
        assert!(poll!(dropped).is_pending());
    }
    first.await.unwrap();
    publish_all(&*bench.queue, "stripe", &["last"]).await;
    assert_eq!(bench.queue.depth(&provider("stripe")).await.unwrap(), Some(2));
}
