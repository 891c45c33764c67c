//! Dead-lettered messages of a lane, one at a time.
//!
//! A dead letter is taken under a number of its own, so its receipt finishes its row and no other. A receipt that is
//! dropped keeps its message until the next start.

use async_trait::async_trait;

use super::PREFIX;
use super::store::Store;
use crate::domain::provider::ProviderName;
use crate::queue::{DeadLetter, DeathCause, QueueError, Receipt};

pub(super) async fn take(store: &Store) -> Result<Option<DeadLetter>, QueueError> {
    let number = rand::random_range(1..i64::MAX);
    let Some((message, queue)) = store.take_dead(number).await? else { return Ok(None) };
    let name = queue.as_deref().and_then(|queue| queue.strip_prefix(PREFIX)?.strip_prefix('.'));
    Ok(Some(DeadLetter {
        cause: DeathCause::DeliveryLimit,
        lane: name.and_then(|name| ProviderName::new(name).ok()),
        body: message.body.into(),
        properties: message.properties,
        receipt: Box::new(EmbeddedDeadReceipt { store: store.clone(), id: message.id, number }),
    }))
}

struct EmbeddedDeadReceipt {
    store: Store,
    id: i64,
    number: i64,
}

fn check_held(held_until_now: bool) -> Result<(), QueueError> {
    held_until_now.then_some(()).ok_or_else(|| QueueError::Unavailable("the message's row is gone".to_owned()))
}

#[async_trait]
impl Receipt for EmbeddedDeadReceipt {
    async fn ack(self: Box<Self>) -> Result<(), QueueError> {
        check_held(self.store.finish(self.id, self.number).await?)
    }

    async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
        check_held(self.store.release(self.id, self.number).await?)
    }
}
