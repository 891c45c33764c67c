//! Resending of a payment by an operator: the ledger makes it `waiting`, and a worker claims it again.
//!
//! Before anything changes, the row is compared with what was recorded. The payment goes through every limit like any
//! other.

use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, JobResolution, ReloadedJob, ResolutionError, ResolutionRefusal};
use crate::queue::message::is_unchanged;

/// Resends jobs for an operator.
pub struct Resender<'a> {
    pub ledger: &'a Database,
    /// Providers that have a row, and so a lane.
    pub providers: &'a [ProviderName],
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
    #[error("its row no longer says what was recorded")]
    Unreadable,
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
            Self::Unreadable => "unreadable",
            Self::Ledger(_) => "ledger_refused",
        }
    }

    /// Whether the next job would fail in the same way.
    pub fn aborts_batch(&self) -> bool {
        match self {
            Self::Ledger(error) => !matches!(error, LedgerError::Corrupt(_)),
            Self::Refused(_) | Self::NoProvider(_) | Self::Unreadable => false,
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
    /// The payment as it would be sent again; changes nothing.
    pub async fn prepare(&self, id: &JobId) -> Result<ReloadedJob, ResendError> {
        let reloaded = self.ledger.reload_job(id, &self.resolution).await?;
        let job = &reloaded.job;
        if !self.providers.contains(&job.provider) {
            return Err(ResendError::NoProvider(job.provider.clone()));
        }
        if !is_unchanged(job, reloaded.hash) {
            // A missing payload was emptied; any other difference was made by hand.
            return Err(match job.payload {
                None => ResolutionRefusal::Scrubbed.into(),
                Some(_) => ResendError::Unreadable,
            });
        }
        Ok(reloaded)
    }

    /// Makes the job `waiting`.
    ///
    /// # Errors
    /// Why it was not changed.
    pub async fn send(&self, id: &JobId) -> Result<(), ResendError> {
        let reloaded = self.prepare(id).await?;
        Ok(self.ledger.resolve_job(id, &self.resolution, Some(reloaded.fence), &self.actor).await?)
    }
}
