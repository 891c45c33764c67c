//! A payment that a person sends on its way again: the ledger first, then its message, confirmed.
//!
//! Refuses what the lanes would refuse: the message is written from the ledger's row, read as a worker reads it, and must
//! have the hash that was recorded, before anything is changed. Refuses to send by itself: the job comes back by its
//! lane and passes every gate. If the message cannot be published the job waits in the ledger, where the sweeper finds it.

use bytes::Bytes;

use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::operator::{Actor, JobResolution, Operator, ReloadedJob, ResolutionRefusal};
use crate::ledger::settings::Settings;
use crate::queue::message::{CardNumbers, DecodeError, decode, encode};
use crate::queue::{Destination, OutgoingMessage, Properties, Queue, QueueError, headers};

/// Sends jobs again.
pub struct Resender<'a> {
    pub operator: &'a dyn Operator,
    pub queue: &'a dyn Queue,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
    pub card_numbers: CardNumbers,
    /// [`Verdict::Resend`] or [`Verdict::Replay`].
    pub resolution: JobResolution,
    pub actor: Actor,
}

/// Why a job was not sent again.
#[derive(Debug, thiserror::Error)]
pub enum ResendError {
    #[error(transparent)]
    Refused(#[from] ResolutionRefusal),
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

impl ResendError {
    /// Whether the next job would fare no better.
    #[must_use]
    pub fn aborts_batch(&self) -> bool {
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
pub async fn provider_names(settings: &dyn Settings) -> Result<Vec<ProviderName>, LedgerError> {
    let names = settings.provider_names().await?;
    // A name that is none has no lane; `check` reports its row.
    Ok(names.into_iter().filter_map(|name| ProviderName::new(name).ok()).collect())
}

impl Resender<'_> {
    /// What would be published; changes nothing.
    ///
    /// # Errors
    /// Why it would not be sent.
    pub async fn prepare(&self, id: &JobId) -> Result<(ReloadedJob, OutgoingMessage), ResendError> {
        let recalled = self.operator.reload(id, &self.resolution).await??;
        let job = &recalled.job;
        if !self.providers.contains(&job.provider) {
            return Err(ResendError::NoProvider(job.provider.clone()));
        }
        let body = encode(job);
        let decoded = decode(&body, &job.provider, self.card_numbers).map_err(|error| match error {
            DecodeError::Invalid { invalid, .. } => ResendError::Unreadable(invalid.to_string()),
            error @ DecodeError::NewerVersion(_) => ResendError::Unreadable(error.to_string()),
        })?;
        if decoded.hash != recalled.hash {
            // What is missing is what was emptied; anything else was changed by hand.
            return Err(match job.payload {
                None => ResolutionRefusal::Scrubbed.into(),
                Some(_) => ResendError::Unreadable("its row no longer says what was recorded".to_owned()),
            });
        }
        let properties = Properties {
            message_id: Some(id.as_str().to_owned()),
            content_type: Some("application/json".to_owned()),
            ..Properties::default()
        };
        let outgoing = OutgoingMessage {
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
    pub async fn send(&self, id: &JobId) -> Result<(), ResendError> {
        let (recalled, message) = self.prepare(id).await?;
        self.operator.resolve(id, &self.resolution, Some(recalled.fence), &self.actor).await??;
        self.queue.publish(message).await.map_err(ResendError::Unpublished)
    }
}
