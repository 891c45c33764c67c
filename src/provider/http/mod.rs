//! Payment providers of kind `http`: a provider row in, one HTTP request per attempt out.
//!
//! `request_builder` freezes requests, `client` sends each once, without redirects and proxies, and `classify`
//! interprets responses. `outbound` limits the targets, and `secrets` resolves header values, which are never printed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use self::classify::{ResponseRules, classify};
use self::client::{ConnectionReuse, HttpClient};
use self::connection::ReceivedResponse;
use self::echo::{check_echo, is_confirmed};
use self::failure::UnexpectedResponseLog;
use self::lookup_client::LookupClient;
pub use self::outbound::OutboundPolicy;
use self::outbound::OutboundTarget;
use self::request_builder::RequestBuilder;
use super::secret_grants::SecretUse;
use super::{FreezeError, FrozenRequest, LookupRequest, PaymentProvider, RequestResult};
use crate::domain::expansion::TooLarge;
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{LookupResult, Outcome};
use crate::domain::printable::redact_url;
use crate::domain::provider::Provider;
use crate::domain::response::{Echo, PaymentIdentity};

pub mod classify;
mod client;
mod connection;
mod echo;
mod failure;
mod lookup_client;
mod outbound;
pub mod request;
pub mod request_builder;
mod resolver;
mod response_json;
pub mod retry_after;
mod secret_files;
mod secrets;
mod socket;
mod template;

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
    /// [`FreezeError`] naming what is invalid, and how to fix it.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let request_builder = RequestBuilder::new(provider, outbound)?;
        let response_rules = ResponseRules::from_provider(provider);
        let pointer = &response_rules.reference_pointer;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(FreezeError::Template(format!("reference `{pointer}`: write a JSON pointer like /id")));
        }
        let response_log = Arc::new(UnexpectedResponseLog::new(provider.name.clone()));
        let lookup_client = |lookup| LookupClient::new(lookup, provider, outbound, Arc::clone(&response_log));
        let lookup_client = provider.lookup.as_ref().map(lookup_client).transpose()?;
        let reuse = ConnectionReuse { is_allowed: provider.reuses_connections(), max_age: provider.connection_max_age };
        let client = HttpClient::new(&request_builder.target, provider.timeout, reuse, Arc::clone(&response_log))?;
        let (timeout, echo) = (provider.timeout, provider.request.echo.clone());
        Ok(Self {
            request_builder,
            response_rules,
            lookup_client,
            timeout,
            reuse,
            echo,
            response_log,
            client: Arc::new(client),
        })
    }

    /// Problems of a row that make it unusable for every worker: one error per header, and one for the request.
    pub fn problems(provider: &Provider) -> Vec<FreezeError> {
        RequestBuilder::problems(provider)
    }

    /// Secrets that a row would send, and their hosts, allowed or not; none for a row that cannot be used.
    pub fn secret_uses(provider: &Provider, outbound: &OutboundPolicy) -> Vec<SecretUse> {
        RequestBuilder::secret_uses(provider, outbound)
    }

    /// Secrets that this process cannot read now: one error per header, without any value.
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

    /// Result of a request, as far as it is certain that the response answers this job's request.
    fn interpret(&self, job: &Job, answered: ReceivedResponse, client: &HttpClient) -> RequestResult {
        let (reading, payment) = (&answered.response, PaymentIdentity::from(job));
        let (status, read_at) = (reading.status, answered.read_at);
        let mut outcome = classify(reading, &self.response_rules, SystemTime::now());
        let is_final = matches!(outcome, Outcome::Accepted { .. } | Outcome::Declined { .. });
        let doubt = check_echo(reading, &self.echo, &payment, is_final);
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
        self.lookup_client.as_ref().ok_or("the provider's row no longer has a look-up")?.request_for(job)
    }

    async fn look_up(&self, request: &LookupRequest) -> RequestResult<LookupResult> {
        match &self.lookup_client {
            Some(client) => client.look_up(request, &self.request_builder.headers, SystemTime::now).await,
            None => {
                let problem = "the provider's row no longer has a look-up".to_owned();
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

    /// A job without optional fields.
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
