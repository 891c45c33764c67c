//! An operator's decisions about rejected messages beside a running worker: what is republished is the original, and a
//! failure in between loses nothing.

use std::sync::Arc;

use async_trait::async_trait;
use sluicegate::domain::job::InvalidReason;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::ledger::rejected::{RejectedDecision, RejectedFilter};
use sluicegate::queue::{DeadLetter, Destination, LaneConsumer, OutgoingMessage, Properties, Queue, QueueError};
use sluicegate::worker::rejected::{RejectedDecider, RejectedError};

use super::bench::{Bench, name, row};
use super::sweeps::sweeps;

/// Copies of bodies, in the ledger and in the queue.
async fn kept(bench: &Bench) -> usize {
    let rows = bench.count("SELECT count(*) FROM rejected_messages WHERE body IS NOT NULL").await;
    bench.messages.count(INVALID) + usize::try_from(rows).unwrap()
}

const INVALID: &str = "payments.invalid";
const OPEN: &str = "SELECT count(*) FROM rejected_messages WHERE decision IS NULL";

fn actor() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: None }
}

async fn decide(bench: &Bench, queue: &dyn Queue, id: i64, decision: RejectedDecision) -> Result<(), RejectedError> {
    let providers = [name("acme")];
    RejectedDecider { ledger: &bench.database, queue: Some(queue), providers: &providers, actor: actor() }
        .decide(id, decision)
        .await
}

/// A row that requires an account.
fn strict() -> ProviderRow {
    ProviderRow { require: vec![serde_json::json!("account")], ..row("acme") }
}

/// A worker whose row requires an account, and one message without it that was rejected.
async fn with_rejected(body: &str) -> Bench {
    let bench = Bench::open(&[strict()]).await;
    let properties = Properties {
        message_id: Some("m-1".to_owned()),
        headers: [("tenant".to_owned(), "a".to_owned())].into(),
        ..Properties::default()
    };
    bench.publish_with("acme", body, properties).await;
    bench.until("it is rejected", async || bench.count(OPEN).await == 1).await;
    bench.until("its message is acknowledged", async || bench.queued("acme") == 0).await;
    bench
}

const PAYMENT: &str = "{ \"id\": \"pay-1\",\t\"amount\": 1299, \"currency\": \"EUR\" }\n";

#[tokio::test]
async fn republished_message_is_the_original() {
    let mut bench = with_rejected(PAYMENT).await;
    let page = bench.database.list_rejected(&RejectedFilter::default(), None, 9).await.unwrap();
    assert_eq!(
        (page.messages[0].reason.as_str(), page.messages[0].head.as_deref()),
        ("missing_account", Some(PAYMENT))
    );
    assert_eq!(bench.rejected().await[0].body, PAYMENT);
    // As long as the cause remains, it is rejected again, as another message.
    decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap();
    let both = "SELECT count(*) FROM rejected_messages WHERE (id = 1) = (decision IS NOT NULL)";
    bench.until("it is rejected again", async || bench.count(both).await == 2).await;
    assert_eq!(kept(&bench).await, 1);
    bench.apply(&[row("acme")]).await;
    bench.settings_known().await;
    bench.stop().await;
    decide(&bench, &*bench.queue(), 2, RejectedDecision::Republished).await.unwrap();
    let messages = bench.messages.messages("payments.acme");
    let [(body, properties)] = messages.as_slice() else { panic!("{messages:?}") };
    assert_eq!(body, PAYMENT);
    let properties = serde_json::to_value(properties).unwrap();
    assert_eq!(properties, serde_json::json!({ "message_id": "m-1", "headers": { "tenant": "a" } }));
    assert_eq!((kept(&bench).await, bench.count(OPEN).await), (0, 0));
}

#[tokio::test]
async fn republished_payment_is_made_once() {
    let bench = with_rejected(PAYMENT).await;
    bench.apply(&[row("acme")]).await;
    bench.settings_known().await;
    decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap();
    bench.until_state("pay-1", "succeeded").await;
    let again = decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap_err();
    assert_eq!(again.to_string(), "rejected message 1 is republished already");
    assert_eq!(bench.script.sent().len(), 1);
}

/// Publishes, and then fails as a process that was killed does.
struct FailsAfterPublish {
    queue: Arc<dyn Queue>,
    database_fails: bool,
}

#[async_trait]
impl Queue for FailsAfterPublish {
    async fn declare(&self, providers: &[ProviderName]) -> Result<(), QueueError> {
        self.queue.declare(providers).await
    }

    async fn open_lane(&self, provider: &ProviderName, places: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        self.queue.open_lane(provider, places).await
    }

    async fn publish(&self, message: OutgoingMessage) -> Result<(), QueueError> {
        self.queue.publish(message).await?;
        // The program learns nothing of it.
        if self.database_fails { Err(QueueError::NotConfirmed("killed".to_owned())) } else { Ok(()) }
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        self.queue.take_dead_letter().await
    }

    async fn depth(&self, provider: &ProviderName) -> Result<Option<u64>, QueueError> {
        self.queue.depth(provider).await
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        self.queue.ping().await
    }
}

#[tokio::test]
async fn interrupted_republish_loses_and_doubles_nothing() {
    for database_fails in [true, false] {
        let bench = with_rejected(PAYMENT).await;
        bench.apply(&[row("acme")]).await;
        bench.settings_known().await;
        let interrupted = FailsAfterPublish { queue: bench.queue(), database_fails };
        let result = decide(&bench, &interrupted, 1, RejectedDecision::Republished).await;
        assert_eq!(result.is_err(), database_fails, "{result:?}");
        bench.until_state("pay-1", "succeeded").await;
        // Nothing is lost: either the row is open, or it says what was done.
        assert_eq!(bench.count(OPEN).await, i64::from(database_fails));
        if database_fails {
            decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap();
            bench.until("the repetition is acknowledged", async || bench.queued("acme") == 0).await;
        }
        assert_eq!((bench.script.sent().len(), bench.count(OPEN).await), (1, 0));
        assert_eq!(bench.count("SELECT count(*) FROM rejected_messages").await, 1);
    }
}

#[tokio::test]
async fn discarded_message_is_gone() {
    let bench = with_rejected(PAYMENT).await;
    decide(&bench, &*bench.queue(), 1, RejectedDecision::Discarded).await.unwrap();
    assert_eq!((kept(&bench).await, bench.count(OPEN).await), (0, 0));
    let again = decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap_err();
    assert_eq!(again.to_string(), "rejected message 1 is discarded already");
    assert!(bench.script.sent().is_empty());
}

const CARD: &str = r#"{"id":"card-1","amount":1299,"currency":"EUR","payload":{"pan":"4111 1111 1111 1111"}}"#;

/// A card number is in no copy, wherever it is looked for, and a long body is cut.
#[tokio::test]
async fn masked_message_can_only_be_discarded() {
    let bench = with_rejected(CARD).await;
    let long = format!("{{\"id\":\"{}\"}}", "x".repeat(70_000));
    bench.publish("acme", &long).await;
    bench.until("both are rejected", async || bench.count(OPEN).await == 2).await;
    for id in [1, 2] {
        let refused = decide(&bench, &*bench.queue(), id, RejectedDecision::Republished).await.unwrap_err();
        assert!(matches!(refused, RejectedError::Masked), "{refused}");
    }
    let stored = bench.rejected().await;
    assert!(stored[0].body.contains("#### #### #### ####") && !stored[0].body.contains("4111"), "{stored:?}");
    assert_eq!(stored[1].body.len(), 65_536);
    assert!(bench.messages.bodies().iter().all(|body| !String::from_utf8_lossy(body).contains("4111")));
    for id in [1, 2] {
        decide(&bench, &*bench.queue(), id, RejectedDecision::Discarded).await.unwrap();
    }
    assert_eq!((kept(&bench).await, bench.count(OPEN).await), (0, 0));
}

/// Three thousand others lie before it.
#[tokio::test]
async fn decision_finds_a_message_behind_thousands() {
    let bench = with_rejected(PAYMENT).await;
    bench
        .sql(
            "INSERT INTO rejected_messages (at, lane, reason, detail, body_sha256, body_bytes, head, body, properties) \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) \
             SELECT at, lane, reason, detail, body_sha256, body_bytes, head, body, properties FROM rejected_messages, n",
        )
        .await;
    bench.apply(&[row("acme")]).await;
    bench.settings_known().await;
    decide(&bench, &*bench.queue(), 3_001, RejectedDecision::Republished).await.unwrap();
    decide(&bench, &*bench.queue(), 3_000, RejectedDecision::Discarded).await.unwrap();
    bench.until_state("pay-1", "succeeded").await;
    assert_eq!(kept(&bench).await, 2_999);
}

/// The producer learns of it once, without a word of its content.
#[tokio::test]
async fn producer_learns_of_a_rejection() {
    let bench = with_rejected(PAYMENT).await;
    let announced = "SELECT count(*) FROM rejected_messages WHERE announced_at IS NOT NULL";
    bench.until("it is announced", async || bench.count(announced).await == 1).await;
    let events = bench.published("payments.outcomes").await;
    assert_eq!(events.len(), 1);
    let mut event = events[0].body.clone();
    assert!(event["at"].take().is_string());
    let expected = serde_json::json!({
        "id": "pay-1", "message_id": "m-1", "provider": "acme", "state": "rejected", "reason": "missing_account", "at": null
    });
    assert_eq!((&event, &events[0].properties["message_id"]), (&expected, &serde_json::json!("rejected-1")));
}

/// The broker rejects its event, which stays unpublished until it accepts it.
#[tokio::test]
async fn refused_event_is_published_later() {
    let mut bench = Bench::prepared(&[strict()]).await;
    bench.messages.refuse(Some("payments.outcomes"));
    bench.run();
    bench.publish("acme", PAYMENT).await;
    bench.until("it is rejected", async || bench.count(OPEN).await == 1).await;
    sweeps(&bench, 2).await;
    bench.messages.refuse(None);
    bench.until("its event is published", async || bench.published("payments.outcomes").await.len() == 1).await;
}

/// The row is the only copy, so a message that the ledger does not take stays in its lane.
#[tokio::test]
async fn rejection_is_committed_before_its_acknowledgement() {
    let mut bench = Bench::open(&[strict()]).await;
    let refusing =
        "CREATE TRIGGER refused BEFORE INSERT ON rejected_messages BEGIN SELECT RAISE(ABORT, 'not now'); END";
    bench.sql(refusing).await;
    bench.publish("acme", PAYMENT).await;
    bench.until("the lane pauses", async || bench.returned_permits("acme", "backend_refused") == 1).await;
    bench.stop().await;
    assert_eq!((bench.queued("acme"), kept(&bench).await), (1, 0));
    bench.sql("DROP TRIGGER refused").await;
    bench.run();
    // A message that a worker has taken is still there.
    bench.until("its message is acknowledged", async || bench.unacknowledged("acme") == 0).await;
    assert_eq!((bench.rejected().await[0].body.as_str(), kept(&bench).await), (PAYMENT, 1));
}

/// The rows of open messages say that they hold 1 GiB.
#[tokio::test]
async fn full_ledger_leaves_masked_messages_in_their_queue() {
    let mut bench = Bench::prepared(&[strict()]).await;
    bench
        .sql(
            "INSERT INTO rejected_messages (at, announced_at, lane, reason, detail, body_sha256, body_bytes) \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 16384) \
             SELECT 0, 0, 'acme', 'bad_amount', 'amount', zeroblob(32), 65536 FROM n",
        )
        .await;
    bench.run();
    bench.publish("acme", PAYMENT).await;
    bench.publish("acme", CARD).await;
    bench.until("both are in the queue", async || bench.messages.count(INVALID) == 2).await;
    bench.until("both are acknowledged", async || bench.queued("acme") == 0).await;
    assert_eq!((bench.count(OPEN).await, kept(&bench).await), (16_384, 2));
    let bodies = bench.messages.messages(INVALID).into_iter();
    let bodies: Vec<String> = bodies.map(|(body, _)| String::from_utf8(body.to_vec()).unwrap()).collect();
    assert!(bodies.iter().any(|body| body == PAYMENT) && !bodies.concat().contains("4111"), "{bodies:?}");
    bench.stop().await;
    bench.sql("UPDATE rejected_messages SET decision = 'discarded'").await;
    bench.run();
    bench.until("both are recorded", async || bench.count(OPEN).await == 2).await;
    bench.until("both have left the queue", async || bench.messages.count(INVALID) == 0).await;
    let masked = "SELECT count(*) FROM rejected_messages WHERE masked AND decision IS NULL";
    assert_eq!((bench.count(masked).await, kept(&bench).await), (1, 2));
}

/// The queue keeps what the ledger has no room for. Once it has, the sweeper records it.
#[tokio::test]
async fn overflow_is_recorded_from_its_queue() {
    let bench = with_rejected(PAYMENT).await;
    let destination = Destination::Invalid {
        lane: name("acme"),
        reason: InvalidReason::BadAmount,
        detail: "amount: must be above 0".to_owned(),
    };
    let properties = Properties { message_id: Some("m-2".to_owned()), ..Properties::default() };
    let message = OutgoingMessage { destination, body: PAYMENT.into(), properties };
    bench.queue().publish(message.clone()).await.unwrap();
    bench.until("it is recorded", async || bench.count(OPEN).await == 2).await;
    bench.until("it has left the queue", async || bench.messages.count(INVALID) == 0).await;
    let stored = &bench.rejected().await[1];
    assert_eq!((stored.reason.as_str(), stored.body.as_str()), ("bad_amount", PAYMENT));
    assert_eq!(stored.properties, serde_json::json!({ "message_id": "m-2", "headers": {} }));
    let masked =
        Properties { headers: [("x-sluicegate-masked".to_owned(), "1".to_owned())].into(), ..Properties::default() };
    bench.queue().publish(OutgoingMessage { properties: masked, ..message }).await.unwrap();
    bench.until("it is recorded", async || bench.count(OPEN).await == 3).await;
    let refused = decide(&bench, &*bench.queue(), 3, RejectedDecision::Republished).await.unwrap_err();
    assert!(matches!(refused, RejectedError::Masked), "{refused}");
}
