//! Interface to a payment provider: freezes a job's request, sends exactly that request, and interprets the response.
//!
//! One call of [`PaymentProvider::send`] sends at most one request. Permits and retries belong to the worker, records
//! to the ledger.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use crate::domain::expansion::{REQUEST_BODY_BYTES_MAX, RequestBuildError, TooLarge, URL_BYTES_MAX};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{LookupResult, Outcome};
use crate::domain::provider::Provider;
use crate::domain::response::PaymentIdentity;
use crate::domain::sum::SentSum;
use crate::domain::unconfirmed::ConnectionEvidence;
use http::OutboundPolicy;

pub mod http;
pub mod secret_grants;
pub mod simulated;

/// Request that the first attempt fixes for ever. Every later attempt sends these bytes to this address under this key.
///
/// It holds no secret. Header values are resolved when a request is sent; only their fingerprint is kept. Its clones share
/// its texts and its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenRequest {
    pub method: Arc<str>,
    pub url: Arc<str>,
    pub idempotency_key: Arc<str>,
    pub content_type: Arc<str>,
    pub body: Bytes,
    /// For `${job:account}` in header values.
    pub account: Option<Arc<str>>,
    /// The sum that the body has.
    pub sum: SentSum,
    /// First 16 hex digits of SHA-256 over the resolved header values; differs when a credential changed.
    pub credential_fingerprint: Arc<str>,
}

impl FrozenRequest {
    /// Whether body and URL are within today's bounds. An older version of Sluicegate may have frozen a larger request.
    pub fn is_within_bounds(&self) -> bool {
        self.body.len() <= REQUEST_BODY_BYTES_MAX && self.url.len() <= URL_BYTES_MAX
    }
}

/// A look-up's request, and the payment that its response is compared with. It holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupRequest {
    pub method: &'static str,
    pub url: String,
    /// For `${job:account}` in header values.
    pub account: Option<Arc<str>>,
    pub payment: PaymentIdentity,
}

/// Result of one request: its meaning (a charge's [`Outcome`] or a look-up's [`LookupResult`]), status and age.
#[derive(Debug)]
pub struct RequestResult<T = Outcome> {
    pub outcome: T,
    /// HTTP status, if there was a response.
    pub status: Option<u16>,
    /// From the last byte read to the return of this value; zero when nothing was read.
    pub response_age: Duration,
    /// The response may answer an earlier request of its connection, so the slot is held until the deadline.
    pub watch: Option<ConnectionWatch>,
}

/// Watch of a connection whose last response may answer an earlier request. The connection carries no other request,
/// and is closed when this is dropped.
pub struct ConnectionWatch(Pin<Box<dyn Future<Output = bool> + Send>>);

impl ConnectionWatch {
    /// `other_response` ends when another response begins (true), or when none can follow (false).
    pub fn new(other_response: impl Future<Output = bool> + Send + 'static) -> Self {
        Self(Box::pin(other_response))
    }

    /// Reads the connection until the deadline.
    pub async fn evidence_until(self, deadline: Instant) -> ConnectionEvidence {
        match timeout_at(deadline, self.0).await {
            Ok(true) => ConnectionEvidence::OtherResponse,
            Ok(false) | Err(_) => ConnectionEvidence::Silence,
        }
    }
}

impl fmt::Debug for ConnectionWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectionWatch")
    }
}

/// Reason why a request could not be built. The text names the header or field and the fix, never a secret.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub enum FreezeError {
    #[error("header `{header}`: {problem}")]
    Header {
        header: String,
        problem: String,
    },
    #[error("request template: {0}")]
    Template(String),
    #[error("url `{url}` is refused: {problem}")]
    Url {
        url: String,
        problem: String,
    },
    Job(RequestBuildError),
    /// The request was frozen with other header values, or with another header for its key.
    #[error("the credential has changed since this request was recorded")]
    CredentialChanged,
    /// A fault of this process; neither the row nor the job is wrong.
    Local(LocalFault),
}

impl From<FreezeError> for LocalFault {
    /// For a request that was built before: an error now says nothing about its provider.
    fn from(error: FreezeError) -> Self {
        match error {
            FreezeError::Local(fault) => fault,
            error => Self::Unbuildable(error.to_string()),
        }
    }
}

/// One provider row, ready to be called. A new one is built when the row changes.
#[async_trait]
pub trait PaymentProvider: Send + Sync {
    /// Builds the request that this job's first attempt would send, for this sum. Reads secrets, in bounded time.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job is invalid. Any other error comes from the row or the environment.
    async fn freeze(&self, job: &Job, sum: SentSum) -> Result<FrozenRequest, FreezeError>;

    /// Fingerprint of the credentials that a request would carry now.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a reference cannot be resolved.
    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError>;

    /// Sends exactly one request and reads its response, within the row's total timeout. A response about another
    /// payment leaves the outcome unknown.
    ///
    /// It never fails: every error is an [`Outcome`].
    async fn send(&self, job: &Job, request: &FrozenRequest) -> RequestResult;

    /// Checks that each part of this job's requests is within its bound, by the row as it is now. Resolves no secret.
    ///
    /// # Errors
    /// [`TooLarge`] names the part, and the field that makes it too large.
    fn check_size(&self, job: &Job, sum: SentSum) -> Result<(), TooLarge>;

    /// The request that a look-up of this job's payment would send. The response is compared with the sum that was
    /// sent. Resolves no secret.
    ///
    /// # Errors
    /// The reason why no look-up is possible: the row has none, or the job lacks a field that its address needs.
    fn lookup_request(&self, job: &Job, sum: SentSum) -> Result<LookupRequest, String>;

    /// Sends exactly one look-up, within the row's total timeout.
    ///
    /// It never fails: every error is a [`LookupResult`].
    async fn look_up(&self, request: &LookupRequest) -> RequestResult<LookupResult>;
}

/// Makes provider rows callable.
pub trait ProviderFactory: Send + Sync {
    /// # Errors
    /// [`FreezeError`] if the row has an address or header that cannot be used.
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError>;
}

/// Checks each entry of the configuration list `outbound.allow`.
///
/// # Errors
/// One line per entry that is neither `loopback`, host:port, a CIDR nor http://host:port.
pub fn validate_outbound(entries: &[String]) -> Result<(), Vec<String>> {
    OutboundPolicy::parse(entries).map(drop)
}
