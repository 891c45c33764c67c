//! An operator's decision about a rejected message: published to its lane again, or discarded.
//!
//! The row has the only copy. A republish publishes it and waits for the confirm, then records the decision, which empties
//! the row. So a crash in between loses nothing: the row is still open, and a repetition publishes the same bytes again.
//! The ledger acknowledges a job that it has.

use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::rejected::StoredMessage;
use crate::ledger::rejected::{RejectedDecision, RejectedRefusal, RejectedSummary};
use crate::queue::{Destination, OutgoingMessage, Queue, QueueError, headers};

/// Decides about rejected messages for an operator.
pub struct RejectedDecider<'a> {
    pub ledger: &'a Database,
    /// `None`: `queue.url` names no broker, and nothing can be published.
    pub queue: Option<&'a dyn Queue>,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
    pub actor: Actor,
}

/// Why a decision was not made as asked.
#[derive(Debug, thiserror::Error)]
pub enum RejectedError {
    #[error(transparent)]
    Refused(#[from] RejectedRefusal),
    #[error("provider `{0}` has no row: no worker takes its messages")]
    NoProvider(String),
    #[error("queue.url names no broker: enqueue the payment once more, and discard the message")]
    NoBroker,
    #[error("its body is not stored: nothing was published, and it can only be discarded")]
    NotKept,
    #[error("its body was longer than 64 KiB or held what must not be stored: it is masked, and can only be discarded")]
    Masked,
    #[error("nothing was changed: {0}")]
    Queue(QueueError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The message is in its lane, and the row is still open.
    #[error("published, but the decision was not recorded: {0}; a repetition publishes the same message once more")]
    NotRecorded(LedgerError),
    /// The message is in its lane, although another operator decided in the meantime.
    #[error("published, although another decision came first: {0}")]
    PublishedThough(RejectedRefusal),
}

impl RejectedError {
    /// Whether the next message would fail in the same way.
    pub fn aborts_batch(&self) -> bool {
        match self {
            Self::Queue(error) => !matches!(error, QueueError::Unroutable(_)),
            Self::Ledger(_) | Self::NotRecorded(_) => true,
            Self::Refused(_)
            | Self::NoProvider(_)
            | Self::NoBroker
            | Self::NotKept
            | Self::Masked
            | Self::PublishedThough(_) => false,
        }
    }
}

impl RejectedDecider<'_> {
    /// Applies the decision.
    ///
    /// # Errors
    /// Why it was refused. [`RejectedError::NotRecorded`] and [`RejectedError::PublishedThough`] have published the
    /// message, the others have not.
    pub async fn decide(&self, id: i64, decision: RejectedDecision) -> Result<(), RejectedError> {
        match decision {
            RejectedDecision::Republished => self.republish(id).await,
            RejectedDecision::Discarded => self.discard(id).await,
        }
    }

    async fn republish(&self, id: i64) -> Result<(), RejectedError> {
        let row = self.open_row(id).await?;
        let Some(lane) = self.providers.iter().find(|name| name.as_str() == row.provider) else {
            return Err(RejectedError::NoProvider(row.provider));
        };
        let queue = self.queue.ok_or(RejectedError::NoBroker)?;
        let stored = self.ledger.stored_rejected(id).await?.ok_or(RejectedError::NotKept)?;
        let StoredMessage { body, properties, is_masked } = stored;
        if is_masked {
            return Err(RejectedError::Masked);
        }
        let properties = serde_json::from_str(&properties).map_err(|_| RejectedError::NotKept)?;
        let message = OutgoingMessage {
            destination: Destination::Lane(lane.clone()),
            body: body.into(),
            properties: headers::without_rejection(properties),
        };
        queue.publish(message).await.map_err(RejectedError::Queue)?;
        let recorded = self.ledger.decide_rejected(id, RejectedDecision::Republished, &self.actor).await;
        let refusal = recorded.map_err(RejectedError::NotRecorded)?;
        refusal.map_or(Ok(()), |refusal| Err(RejectedError::PublishedThough(refusal)))
    }

    async fn discard(&self, id: i64) -> Result<(), RejectedError> {
        let refusal = self.ledger.decide_rejected(id, RejectedDecision::Discarded, &self.actor).await?;
        refusal.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    async fn open_row(&self, id: i64) -> Result<RejectedSummary, RejectedError> {
        let row = self.ledger.rejected_message(id).await?.ok_or(RejectedRefusal::NoSuchMessage(id))?;
        match row.decision {
            Some(decision) => Err(RejectedRefusal::Decided { id, decision }.into()),
            None => Ok(row),
        }
    }
}
