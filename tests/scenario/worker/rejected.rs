//! An operator's decisions about rejected messages beside a running worker: what is republished is the original, and a
//! failure in between loses nothing.

use std::sync::Arc;

use async_trait::async_trait;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::ledger::rejected::{RejectedDecision, RejectedFilter};
use sluicegate::queue::{
    DeadLetter, InvalidLetter, LaneConsumer, OutgoingMessage, Properties, Queue, QueueError, Receipt,
};
use sluicegate::worker::rejected::{CopyRemoval, RejectedDecider, RejectedError};

use super::bench::{Bench, name, row};

const INVALID: &str = "SELECT count(*) FROM queue_messages WHERE queue = 'payments.invalid'";
const OPEN: &str = "SELECT count(*) FROM rejected_messages WHERE decision IS NULL";

fn actor() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: None }
}

async fn decide(
    bench: &Bench,
    queue: &dyn Queue,
    id: i64,
    decision: RejectedDecision,
) -> Result<CopyRemoval, RejectedError> {
    let providers = [name("acme")];
    RejectedDecider { ledger: &bench.database, queue, providers: &providers, actor: actor() }.decide(id, decision).await
}

/// A worker whose row requires an account, and one message without it that was rejected.
async fn with_rejected(body: &str) -> Bench {
    let strict = ProviderRow { require: vec![serde_json::json!("account")], ..row("acme") };
    let bench = Bench::open(&[strict]).await;
    let properties = Properties {
        message_id: Some("m-1".to_owned()),
        headers: [("tenant".to_owned(), "a".to_owned())].into(),
        ..Properties::default()
    };
    bench.publish_with("acme", body, properties).await;
    bench.until("it is rejected", async || bench.count(OPEN).await == 1).await;
    bench.until("its message is acknowledged", async || bench.queued("acme").await == 0).await;
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
    // As long as the cause remains, it is rejected again, as another message.
    decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap();
    let both = "SELECT count(*) FROM rejected_messages WHERE (id = 1) = (decision IS NOT NULL)";
    bench.until("it is rejected again", async || bench.count(both).await == 2).await;
    assert_eq!(bench.count(INVALID).await, 1);
    bench.apply(&[row("acme")]).await;
    bench.settings_known().await;
    bench.stop().await;
    decide(&bench, &*bench.queue(), 2, RejectedDecision::Republished).await.unwrap();
    let body = format!(
        "SELECT count(*) FROM queue_messages WHERE queue = 'payments.acme' AND body = CAST('{PAYMENT}' AS BLOB)"
    );
    assert_eq!(bench.count(&body).await, 1);
    let properties = bench.properties_in("payments.acme").await;
    assert_eq!(properties, [serde_json::json!({ "message_id": "m-1", "headers": { "tenant": "a" } })]);
    assert_eq!((bench.count(INVALID).await, bench.count(OPEN).await), (0, 0));
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

struct NeverAcknowledged;

#[async_trait]
impl Receipt for NeverAcknowledged {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        Err(QueueError::Unavailable("killed".to_owned()))
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        Ok(())
    }
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

    async fn take_invalid(&self, sha256: [u8; 32], reason: &str) -> Result<Option<InvalidLetter>, QueueError> {
        let found = self.queue.take_invalid(sha256, reason).await?;
        Ok(found.map(|letter| InvalidLetter { receipt: Box::new(NeverAcknowledged), ..letter }))
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
        assert_eq!(bench.count(INVALID).await, 1);
        assert_eq!(bench.count(OPEN).await, i64::from(database_fails));
        if database_fails {
            decide(&bench, &*bench.queue(), 1, RejectedDecision::Republished).await.unwrap();
            bench.until("the repetition is acknowledged", async || bench.queued("acme").await == 0).await;
            assert_eq!(bench.count(INVALID).await, 0);
        }
        assert_eq!((bench.script.sent().len(), bench.count(OPEN).await), (1, 0));
        assert_eq!(bench.count("SELECT count(*) FROM rejected_messages").await, 1);
    }
}

#[tokio::test]
async fn discarded_message_is_gone() {
    let bench = with_rejected(PAYMENT).await;
    let removed = decide(&bench, &*bench.queue(), 1, RejectedDecision::Discarded).await.unwrap();
    assert_eq!((removed, bench.count(INVALID).await, bench.count(OPEN).await), (CopyRemoval::Removed, 0, 0));
    // Another one whose message an operator has removed from the queue by hand.
    bench.publish("acme", PAYMENT).await;
    bench.until("it is rejected", async || bench.count(OPEN).await == 1).await;
    bench.sql("DELETE FROM queue_messages WHERE queue = 'payments.invalid'").await;
    let missing = decide(&bench, &*bench.queue(), 2, RejectedDecision::Republished).await.unwrap_err();
    assert!(matches!(missing, RejectedError::NotKept), "{missing}");
    assert_eq!(bench.count(OPEN).await, 1);
    let removed = decide(&bench, &*bench.queue(), 2, RejectedDecision::Discarded).await.unwrap();
    assert_eq!((removed, bench.count(OPEN).await), (CopyRemoval::Missing, 0));
    assert!(bench.script.sent().is_empty());
}
