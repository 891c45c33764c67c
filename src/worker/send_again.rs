//! A payment that a person sends on its way again: the ledger first, then its message, confirmed.
//!
//! Refuses what the lanes would refuse: the message is written from the ledger's row, read as a worker reads it, and must
//! have the hash that was recorded, before anything is changed. Refuses to send by itself: the job comes back by its
//! lane and passes every gate. If the message cannot be published the job waits in the ledger, where the sweeper finds it.

use bytes::Bytes;

use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::operator::{By, Operator, Recalled, Refusal, Verdict};
use crate::ledger::settings::Settings;
use crate::queue::message::{CardNumbers, DecodeError, decode, encode};
use crate::queue::{Destination, Outgoing, Properties, Queue, QueueError, headers};

/// Sends jobs again.
pub struct SendAgain<'a> {
    pub operator: &'a dyn Operator,
    pub queue: &'a dyn Queue,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
    pub card_numbers: CardNumbers,
    /// [`Verdict::Resend`] or [`Verdict::Replay`].
    pub verdict: Verdict,
    pub by: By,
}

/// Why a job was not sent again.
#[derive(Debug, thiserror::Error)]
pub enum NotSent {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("provider `{0}` has no row any more: nothing takes its lane")]
    NoProvider(ProviderName),
    #[error("a worker would refuse its message: {0}")]
    Unreadable(String),
    /// The ledger says `waiting`; its message is missing.
    #[error("waiting in the ledger, but its message was not published: {0}; a worker's sweeper will publish it")]
    Unpublished(QueueError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl NotSent {
    /// Whether the next job would fare no better.
    #[must_use]
    pub fn ends_it_all(&self) -> bool {
        match self {
            Self::Unpublished(error) => !matches!(error, QueueError::Unroutable(_)),
            Self::Ledger(error) => !matches!(error, LedgerError::Corrupt(_)),
            Self::Refused(_) | Self::NoProvider(_) | Self::Unreadable(_) => false,
        }
    }
}

/// Names of all providers in the database: those whose lanes somebody takes from.
///
/// # Errors
/// When the database fails.
pub async fn lanes(settings: &dyn Settings) -> Result<Vec<ProviderName>, LedgerError> {
    let names = settings.names().await?;
    // A name that is none has no lane; `check` reports its row.
    Ok(names.into_iter().filter_map(|name| ProviderName::new(name).ok()).collect())
}

impl SendAgain<'_> {
    /// What would be published; changes nothing.
    ///
    /// # Errors
    /// Why it would not be sent.
    pub async fn prepare(&self, id: &JobId) -> Result<(Recalled, Outgoing), NotSent> {
        let recalled = self.operator.recall(id, &self.verdict).await??;
        let job = &recalled.job;
        if !self.providers.contains(&job.provider) {
            return Err(NotSent::NoProvider(job.provider.clone()));
        }
        let body = encode(job);
        let decoded = decode(&body, &job.provider, self.card_numbers).map_err(|error| match error {
            DecodeError::Invalid { invalid, .. } => NotSent::Unreadable(invalid.to_string()),
            error @ DecodeError::NewerVersion(_) => NotSent::Unreadable(error.to_string()),
        })?;
        if decoded.hash != recalled.hash {
            // What is missing is what was emptied; anything else was changed by hand.
            return Err(match job.payload {
                None => Refusal::Emptied.into(),
                Some(_) => NotSent::Unreadable("its row no longer says what was recorded".to_owned()),
            });
        }
        let properties = Properties {
            message_id: Some(id.as_str().to_owned()),
            content_type: Some("application/json".to_owned()),
            ..Properties::default()
        };
        let outgoing = Outgoing {
            destination: Destination::Lane(job.provider.clone()),
            body: Bytes::from(body),
            // The one that the verdict makes the newest.
            properties: headers::with_copy_number(properties, recalled.copy + 1),
        };
        Ok((recalled, outgoing))
    }

    /// Makes the job `waiting` and publishes its message.
    ///
    /// # Errors
    /// Why it was not sent; [`NotSent::Unpublished`] alone leaves it changed.
    pub async fn send(&self, id: &JobId) -> Result<(), NotSent> {
        let (recalled, message) = self.prepare(id).await?;
        self.operator.decide(id, &self.verdict, Some(recalled.fence), &self.by).await??;
        self.queue.publish(message).await.map_err(NotSent::Unpublished)
    }
}
