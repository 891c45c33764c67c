//! Resending of a payment by an operator: the ledger is updated first, then the message is published and confirmed.
//!
//! Before anything changes, the message is built from the ledger's row, decoded as a worker decodes it, and compared
//! with the recorded hash. It goes through the lane and every limit like any other. If it cannot be published, the job
//! waits in the ledger, and the sweeper publishes it.

use bytes::Bytes;

use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, JobResolution, ReloadedJob, ResolutionError, ResolutionRefusal};
use crate::queue::message::{CardNumbers, DecodeError, decode, encode};
use crate::queue::{Destination, OutgoingMessage, Queue, QueueError, headers};
use crate::worker::publish::job_properties;

/// Resends jobs for an operator.
pub struct Resender<'a> {
    pub ledger: &'a Database,
    pub queue: &'a dyn Queue,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
    pub card_numbers: CardNumbers,
    /// [`JobResolution::Resend`] or [`JobResolution::Replay`].
    pub resolution: JobResolution,
    pub actor: Actor,
}

/// Why a job was not sent again.
#[derive(Debug, thiserror::Error)]
pub enum ResendError {
    #[error(transparent)]
    Refused(#[from] ResolutionRefusal),
    #[error("provider `{0}` has no row any more: no worker takes its jobs")]
    NoProvider(ProviderName),
    #[error("a worker would reject its message: {0}")]
    Unreadable(String),
    /// The ledger says `waiting`; its message is missing.
    #[error("waiting in the ledger, but its message was not published: {0}; a worker's sweeper will publish it")]
    Unpublished(QueueError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl From<ResolutionError> for ResendError {
    fn from(error: ResolutionError) -> Self {
        match error {
            ResolutionError::Refused(refusal) => refusal.into(),
            ResolutionError::Ledger(error) => error.into(),
        }
    }
}

impl ResendError {
    /// The code of a refusal, for reports about many payments.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::NoProvider(_) => "no_provider",
            Self::Unreadable(_) => "unreadable",
            Self::Unpublished(_) => "unpublished",
            Self::Ledger(_) => "ledger_refused",
        }
    }

    /// Whether the next job would fail in the same way.
    pub fn aborts_batch(&self) -> bool {
        match self {
            Self::Unpublished(error) => !matches!(error, QueueError::Unroutable(_)),
            Self::Ledger(error) => !matches!(error, LedgerError::Corrupt(_)),
            Self::Refused(_) | Self::NoProvider(_) | Self::Unreadable(_) => false,
        }
    }
}

/// Names of all providers in the database that can have a lane.
pub async fn provider_names(ledger: &Database) -> Result<Vec<ProviderName>, LedgerError> {
    let names = ledger.provider_names().await?;
    // An invalid name has no lane; `check` reports its row.
    Ok(names.into_iter().filter_map(|name| ProviderName::new(name).ok()).collect())
}

impl Resender<'_> {
    /// The message that would be published; changes nothing.
    pub async fn prepare(&self, id: &JobId) -> Result<(ReloadedJob, OutgoingMessage), ResendError> {
        let reloaded = self.ledger.reload_job(id, &self.resolution).await?;
        let job = &reloaded.job;
        if !self.providers.contains(&job.provider) {
            return Err(ResendError::NoProvider(job.provider.clone()));
        }
        let body = encode(job);
        let decoded = decode(&body, &job.provider, self.card_numbers).map_err(|error| match error {
            DecodeError::Invalid { invalid, .. } => ResendError::Unreadable(invalid.to_string()),
            error @ DecodeError::NewerVersion(_) => ResendError::Unreadable(error.to_string()),
        })?;
        if decoded.hash != reloaded.hash {
            // A missing payload was emptied; any other difference was made by hand.
            return Err(match job.payload {
                None => ResolutionRefusal::Scrubbed.into(),
                Some(_) => ResendError::Unreadable("its row no longer says what was recorded".to_owned()),
            });
        }
        let outgoing = OutgoingMessage {
            destination: Destination::Lane(job.provider.clone()),
            body: Bytes::from(body),
            // The copy number that the resolution makes the newest.
            properties: headers::with_copy_number(job_properties(id), reloaded.copy + 1),
        };
        Ok((reloaded, outgoing))
    }

    /// Makes the job `waiting` and publishes its message.
    ///
    /// # Errors
    /// Why it was not sent; only [`ResendError::Unpublished`] leaves it changed.
    pub async fn send(&self, id: &JobId) -> Result<(), ResendError> {
        let (reloaded, message) = self.prepare(id).await?;
        self.ledger.resolve_job(id, &self.resolution, Some(reloaded.fence), &self.actor).await?;
        self.queue.publish(message).await.map_err(ResendError::Unpublished)
    }
}
