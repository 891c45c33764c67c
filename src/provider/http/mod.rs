//! Payment providers that speak HTTP: one row in, one request per attempt out.
//!
//! Refuses retries, redirects and proxies (`client`), targets that nobody allowed (`outbound`) and secrets in print
//! (`secrets`). The meaning of an answer is a pure function (`classify`).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use self::classify::{ResponseRules, classify};
use self::client::HttpClient;
use self::connection::ReceivedResponse;
use self::echo::{check_echo, is_confirmed};
use self::lookup_client::LookupClient;
pub use self::outbound::OutboundPolicy;
use self::outbound::OutboundTarget;
use self::pool::ConnectionReuse;
use self::request_builder::RequestBuilder;
use self::unexpected_responses::UnexpectedResponseLog;
use super::secret_grants::SecretUse;
use super::{FreezeError, FrozenRequest, LookupRequest, PaymentProvider, RequestResult};
use crate::domain::echo::{Echo, PaymentIdentity};
use crate::domain::expansion::TooLarge;
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::lookup::LookupResult;
use crate::domain::outcome::Outcome;
use crate::domain::provider::Provider;
use crate::domain::redacted_url::redact_url;

mod address;
mod blocking;
pub mod classify;
mod client;
mod connection;
mod connector;
mod echo;
mod failure;
mod form;
mod half_duplex;
mod lookup_client;
mod outbound;
mod placeholder;
mod pool;
pub mod request;
pub mod request_builder;
mod resolver;
mod response_json;
pub mod retry_after;
mod secret_files;
mod secrets;
mod socket;
mod template;
mod unexpected_responses;
mod wait_field;

/// One provider row of kind `http`, ready to be called. Keeps its own connections.
pub struct HttpProvider {
    request_builder: RequestBuilder,
    response_rules: ResponseRules,
    lookup_client: Option<LookupClient>,
    timeout: Duration,
    reuse: ConnectionReuse,
    echo: Echo,
    response_log: Arc<UnexpectedResponseLog>,
    client: Arc<HttpClient>,
}

impl HttpProvider {
    /// Checks the row's URL, headers and request shape, and sets up its client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError`] naming what cannot be meant, with the mend.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let expansion = RequestBuilder::new(provider, outbound)?;
        let meanings = ResponseRules::from_provider(provider);
        let pointer = &meanings.reference_pointer;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(FreezeError::Template(format!("reference `{pointer}`: write a JSON pointer like /id")));
        }
        let strays = Arc::new(UnexpectedResponseLog::new(provider.name.clone()));
        let inquiry = |lookup| LookupClient::new(lookup, provider, outbound, Arc::clone(&strays));
        let inquiry = provider.lookup.as_ref().map(inquiry).transpose()?;
        let reuse = ConnectionReuse { is_allowed: provider.reuses_connections(), max_age: provider.connection_max_age };
        let client = HttpClient::new(&expansion.target, provider.timeout, reuse, Arc::clone(&strays))?;
        let (timeout, echo) = (provider.timeout, provider.request.echo.clone());
        Ok(Self {
            request_builder: expansion,
            response_rules: meanings,
            lookup_client: inquiry,
            timeout,
            reuse,
            echo,
            response_log: strays,
            client: Arc::new(client),
        })
    }

    /// What no worker could use of a row, wherever its requests may go: one error per header, and one of the request.
    #[must_use]
    pub fn problems(provider: &Provider) -> Vec<FreezeError> {
        RequestBuilder::problems(provider)
    }

    /// The secrets that a row would send, and where, whether it may or not; none of a row that cannot be used.
    #[must_use]
    pub fn secret_uses(provider: &Provider, outbound: &OutboundPolicy) -> Vec<SecretUse> {
        RequestBuilder::secret_uses(provider, outbound)
    }

    /// What of its secrets this process cannot read now, one error per header, without any value.
    #[must_use]
    pub async fn unreadable_secrets(&self) -> Vec<FreezeError> {
        self.request_builder.headers.unreadable(self.request_builder.target.host()).await
    }

    /// The row's own client, or one for the address that an older version of the row froze.
    fn client_for(&self, target: &OutboundTarget) -> Result<Arc<HttpClient>, FreezeError> {
        let own = &self.request_builder.target.url;
        if target.url == *own || target.url.origin() == own.origin() {
            return Ok(Arc::clone(&self.client));
        }
        // A client for one request keeps nothing.
        let reuse = ConnectionReuse { is_allowed: false, ..self.reuse };
        HttpClient::new(target, self.timeout, reuse, Arc::clone(&self.response_log)).map(Arc::new)
    }

    /// The meaning of a response, as far as it is certain that it answers this job's request.
    fn interpret(&self, job: &Job, answered: ReceivedResponse, client: &HttpClient) -> RequestResult {
        let (reading, payment) = (&answered.response, PaymentIdentity::from(job));
        let (status, read_at) = (reading.status, answered.read_at);
        let mut outcome = classify(reading, &self.response_rules, SystemTime::now());
        let settles = matches!(outcome, Outcome::Accepted { .. } | Outcome::Declined { .. });
        let doubt = check_echo(reading, &self.echo, &payment, settles);
        if let Some(cause) = doubt {
            outcome = Outcome::Unknown { cause, retry_after: None };
        }
        if let Some(refusal) = outcome.refusal()
            && !is_confirmed(reading, &self.echo, &payment)
        {
            if answered.on_used_connection {
                outcome = Outcome::Unconfirmed { refusal, status };
            }
            // No other payment meets a copy of it, and on a connection of its own a refusal is certain.
            drop(answered);
        } else {
            client.release_connection(answered, doubt);
        }
        RequestResult { outcome, status: Some(status), response_age: read_at.elapsed() }
    }
}

#[async_trait]
impl PaymentProvider for HttpProvider {
    async fn freeze(&self, job: &Job) -> Result<FrozenRequest, FreezeError> {
        self.request_builder.freeze(job).await
    }

    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError> {
        self.request_builder.credential_fingerprint(account).await
    }

    async fn send(&self, job: &Job, request: &FrozenRequest) -> RequestResult {
        let prepared =
            self.request_builder.prepare(request).await.and_then(|out| Ok((self.client_for(&out.target)?, out)));
        let (client, outgoing) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return without_response(Outcome::LocalFault(error.into())),
        };
        match client.exchange(outgoing).await {
            Ok(answered) => self.interpret(job, *answered, &client),
            Err(failure) => without_response(failure.into_outcome()),
        }
    }

    fn check_size(&self, job: &Job) -> Result<(), TooLarge> {
        self.request_builder.check_size(job)
    }

    fn lookup_request(&self, job: &Job) -> Result<LookupRequest, String> {
        self.lookup_client.as_ref().ok_or("the provider's row has no look-up any more")?.request_for(job)
    }

    async fn look_up(&self, question: &LookupRequest) -> RequestResult<LookupResult> {
        match &self.lookup_client {
            Some(inquiry) => inquiry.look_up(question, &self.request_builder.headers, SystemTime::now).await,
            None => {
                let problem = "the provider's row has no look-up any more".to_owned();
                without_response(LookupResult::LocalFault(LocalFault::Unbuildable(problem)))
            }
        }
    }
}

fn without_response<T>(outcome: T) -> RequestResult<T> {
    RequestResult { outcome, status: None, response_age: Duration::ZERO }
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProvider")
            .field("url", &redact_url(self.request_builder.target.url.as_str()))
            .field("headers", &self.request_builder.headers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::domain::job::{Identifier, Job};
    use crate::domain::provider::ProviderName;

    /// The smallest job.
    pub(super) fn job(id: &str) -> Job {
        Job {
            id: Identifier::new(id).unwrap(),
            provider: ProviderName::new("acme").unwrap(),
            amount: 1_299,
            currency: "EUR".to_owned(),
            account: None,
            reference: None,
            idempotency_key: None,
            cost: 1,
            priority: 0,
            not_before: None,
            expires_at: None,
            payload: None,
        }
    }
}
