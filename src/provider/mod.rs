//! The face of a payment provider: freeze a request once, send exactly that request, say what the answer means.
//!
//! Refuses permits, retries and bookkeeping: one call of [`PaymentProvider::send`] is at most one request on the wire.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::domain::echo::PaymentIdentity;
use crate::domain::expansion::{REQUEST_BODY_BYTES_MAX, RequestBuildError, TooLarge, URL_BYTES_MAX};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::lookup::LookupResult;
use crate::domain::outcome::Outcome;
use crate::domain::provider::Provider;

pub mod http;
pub mod outbound;
pub mod secret_grants;
pub mod simulated;

/// What the first attempt fixes for ever: every later attempt sends these bytes to this address under this key.
///
/// Holds no secret: header values are resolved when sending, and only their fingerprint is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenRequest {
    pub method: String,
    pub url: String,
    pub idempotency_key: String,
    pub content_type: String,
    pub body: Vec<u8>,
    /// For `${job:account}` in header values.
    pub account: Option<String>,
    /// First 16 hex digits of SHA-256 over the resolved header values; differs when a credential changed.
    pub credential_fingerprint: String,
}

impl FrozenRequest {
    /// Whether it is within the bounds of requests; one that an older version froze may not be.
    #[must_use]
    pub fn is_within_bounds(&self) -> bool {
        self.body.len() <= REQUEST_BODY_BYTES_MAX && self.url.len() <= URL_BYTES_MAX
    }
}

/// What a look-up asks, and what its answer is compared with. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupRequest {
    pub method: &'static str,
    pub url: String,
    /// For `${job:account}` in header values.
    pub account: Option<String>,
    pub payment: PaymentIdentity,
    /// ISO 4217 code.
    pub currency: String,
}

/// The end of one request: what it means, a charge's [`Outcome`] or a look-up's [`Finding`], and how it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestResult<T = Outcome> {
    pub outcome: T,
    /// HTTP status, when there was one.
    pub status: Option<u16>,
    /// From the last byte read to the return of this value; zero when nothing was read.
    pub response_age: Duration,
}

/// Why a request could not be built. The text names the header or field and the mend, never a secret.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FreezeError {
    #[error("header `{header}`: {problem}")]
    Header { header: String, problem: String },
    #[error("request template: {0}")]
    Template(String),
    #[error("url `{url}` is refused: {problem}")]
    Url { url: String, problem: String },
    #[error("{0}")]
    Job(RequestBuildError),
    /// Of a request that was frozen with other header values, or another header for its key.
    #[error("the credential has changed since this request was written down")]
    CredentialChanged,
    /// Neither the row's nor the job's.
    #[error("{0}")]
    Local(LocalFault),
}

impl From<FreezeError> for LocalFault {
    /// For a request that was built before: what hinders it now says nothing of its provider.
    fn from(error: FreezeError) -> Self {
        match error {
            FreezeError::Local(fault) => fault,
            error => Self::Unbuildable(error.to_string()),
        }
    }
}

/// One provider row, ready to be called. Built anew when the row changes.
#[async_trait]
pub trait PaymentProvider: Send + Sync {
    /// Builds the request that this job's first attempt would send. Reads secrets, in bounded time.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job is wrong; any other error is the row's or the environment's.
    async fn freeze(&self, job: &Job) -> Result<FrozenRequest, FreezeError>;

    /// Fingerprint of the credentials that a request would carry now.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a reference cannot be resolved.
    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError>;

    /// Sends exactly one request and reads its answer, within the row's total timeout. An answer about another payment than
    /// the job's is no answer to it.
    ///
    /// Never fails: whatever goes wrong is an [`Outcome`].
    async fn send(&self, job: &Job, request: &FrozenRequest) -> RequestResult;

    /// Whether each part of this job's requests is within its bound, as the row is now. Resolves no secret.
    ///
    /// # Errors
    /// [`TooLarge`] names the part, and the field that makes it so large.
    fn check_size(&self, job: &Job) -> Result<(), TooLarge>;

    /// What a look-up of this job's payment would ask. Resolves no secret.
    ///
    /// # Errors
    /// Why this payment cannot be asked about: the row has no look-up, or the job lacks what its address needs.
    fn lookup_request(&self, job: &Job) -> Result<LookupRequest, String>;

    /// Asks exactly once, within the row's total timeout.
    ///
    /// Never fails: whatever goes wrong is a [`Finding`].
    async fn look_up(&self, question: &LookupRequest) -> RequestResult<LookupResult>;
}

/// Makes provider rows callable.
pub trait ProviderFactory: Send + Sync {
    /// # Errors
    /// [`FreezeError`]: the row names an address or header that cannot be used.
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError>;
}
