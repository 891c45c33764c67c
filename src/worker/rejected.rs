//! An operator's decision about a rejected message: published to its lane again, or discarded.
//!
//! The queue of rejected messages has the only copy of the bytes. A republish publishes them and waits for the confirm,
//! then records the decision, then removes the copy. So a crash in between loses nothing: the row is still open, and a
//! repetition publishes the same bytes again. The ledger acknowledges a job that it has. A discard records the decision
//! first and removes the copy afterwards.

use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::rejected::{RejectedDecision, RejectedRefusal, RejectedSummary};
use crate::queue::{Destination, InvalidLetter, OutgoingMessage, Queue, QueueError, headers};

/// Decides about rejected messages for an operator.
pub struct RejectedDecider<'a> {
    pub ledger: &'a Database,
    pub queue: &'a dyn Queue,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
    pub actor: Actor,
}

/// Whether the copy in the queue of rejected messages was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyRemoval {
    Removed,
    /// The queue had none.
    Missing,
    /// It stays there, without consequence; why.
    Kept(String),
}

impl CopyRemoval {
    /// The note for people; `None` where there is nothing to say.
    pub fn note(&self) -> Option<String> {
        match self {
            Self::Removed => None,
            Self::Missing => Some("its message was not in `payments.invalid` any more".to_owned()),
            Self::Kept(why) => Some(format!("its message stays in `payments.invalid`: {why}")),
        }
    }
}

/// Why a decision was not made as asked.
#[derive(Debug, thiserror::Error)]
pub enum RejectedError {
    #[error(transparent)]
    Refused(#[from] RejectedRefusal),
    #[error("provider `{0}` has no row: no worker takes its messages")]
    NoProvider(String),
    #[error("its message is not in `payments.invalid` any more: nothing was published")]
    NotKept,
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
            Self::Refused(_) | Self::NoProvider(_) | Self::NotKept | Self::PublishedThough(_) => false,
        }
    }
}

impl RejectedDecider<'_> {
    /// Applies the decision.
    ///
    /// # Errors
    /// Why it was refused. [`RejectedError::NotRecorded`] and [`RejectedError::PublishedThough`] have published the
    /// message, the others have not.
    pub async fn decide(&self, id: i64, decision: RejectedDecision) -> Result<CopyRemoval, RejectedError> {
        match decision {
            RejectedDecision::Republished => self.republish(id).await,
            RejectedDecision::Discarded => self.discard(id).await,
        }
    }

    async fn republish(&self, id: i64) -> Result<CopyRemoval, RejectedError> {
        let row = self.open_row(id).await?;
        let Some(lane) = self.providers.iter().find(|name| name.as_str() == row.provider) else {
            return Err(RejectedError::NoProvider(row.provider));
        };
        let kept = self.find_copy(&row).await.map_err(RejectedError::Queue)?;
        let InvalidLetter { body, properties, receipt } = kept.ok_or(RejectedError::NotKept)?;
        let properties = headers::without_rejection(properties);
        let message = OutgoingMessage { destination: Destination::Lane(lane.clone()), body, properties };
        self.queue.publish(message).await.map_err(RejectedError::Queue)?;
        let recorded = self.ledger.decide_rejected(id, RejectedDecision::Republished, &self.actor).await;
        let refusal = recorded.map_err(RejectedError::NotRecorded)?;
        let removed =
            receipt.ack().await.map_or_else(|error| CopyRemoval::Kept(error.to_string()), |()| CopyRemoval::Removed);
        refusal.map_or(Ok(removed), |refusal| Err(RejectedError::PublishedThough(refusal)))
    }

    async fn discard(&self, id: i64) -> Result<CopyRemoval, RejectedError> {
        let row = self.open_row(id).await?;
        if let Some(refusal) = self.ledger.decide_rejected(id, RejectedDecision::Discarded, &self.actor).await? {
            return Err(refusal.into());
        }
        let removed = match self.find_copy(&row).await {
            Ok(Some(kept)) => kept.receipt.ack().await.map(|()| CopyRemoval::Removed),
            Ok(None) => Ok(CopyRemoval::Missing),
            Err(error) => Err(error),
        };
        Ok(removed.unwrap_or_else(|error| CopyRemoval::Kept(error.to_string())))
    }

    async fn open_row(&self, id: i64) -> Result<RejectedSummary, RejectedError> {
        let row = self.ledger.rejected_message(id).await?.ok_or(RejectedRefusal::NoSuchMessage(id))?;
        match row.decision {
            Some(decision) => Err(RejectedRefusal::Decided { id, decision }.into()),
            None => Ok(row),
        }
    }

    async fn find_copy(&self, row: &RejectedSummary) -> Result<Option<InvalidLetter>, QueueError> {
        let digest = hex::decode(&row.body_sha256).ok().and_then(|digest| <[u8; 32]>::try_from(digest).ok());
        let Some(digest) = digest else { return Ok(None) };
        self.queue.take_invalid(digest, &row.reason).await
    }
}
