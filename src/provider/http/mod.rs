//! Payment providers that speak HTTP: one row in, one request per attempt out.
//!
//! Refuses retries, redirects and proxies (`client`), targets that nobody allowed (`outbound`) and secrets in print
//! (`secrets`). The meaning of an answer is a pure function (`classify`).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use self::classify::{Meanings, classify};
use self::client::Client;
use self::echo::doubt;
use self::expansion::Expansion;
use self::inquiry::Inquiry;
pub use self::outbound::OutboundPolicy;
use self::outbound::Target;
use self::pool::Reuse;
use self::strays::StrayLog;
use super::secret_grants::SecretUse;
use super::{Answer, FreezeError, FrozenRequest, PaymentProvider, Question};
use crate::domain::echo::{Echo, PaymentIdentity};
use crate::domain::expansion::TooLarge;
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::lookup::Finding;
use crate::domain::outcome::Outcome;
use crate::domain::provider::Provider;
use crate::domain::shown_url::shown_url;

mod address;
mod answer_json;
mod blocking;
pub mod classify;
mod client;
mod connection;
mod connector;
mod echo;
pub mod expansion;
mod failure;
mod form;
mod half_duplex;
mod inquiry;
mod named_wait;
mod outbound;
mod placeholder;
mod pool;
pub mod request;
mod resolver;
pub mod retry_after;
mod secret_files;
mod secrets;
mod socket;
mod strays;
mod template;

/// One provider row of kind `http`, ready to be called. Keeps its own connections.
pub struct HttpProvider {
    expansion: Expansion,
    meanings: Meanings,
    inquiry: Option<Inquiry>,
    timeout: Duration,
    reuse: Reuse,
    echo: Echo,
    strays: Arc<StrayLog>,
    client: Arc<Client>,
}

impl HttpProvider {
    /// Checks the row's URL, headers and request shape, and sets up its client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError`] naming what cannot be meant, with the mend.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let expansion = Expansion::new(provider, outbound)?;
        let meanings = Meanings::of(provider);
        let pointer = &meanings.reference_pointer;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(FreezeError::Template(format!("reference `{pointer}`: write a JSON pointer like /id")));
        }
        let strays = Arc::new(StrayLog::new(provider.name.clone()));
        let inquiry = |lookup| Inquiry::new(lookup, provider, outbound, Arc::clone(&strays));
        let inquiry = provider.lookup.as_ref().map(inquiry).transpose()?;
        let reuse = Reuse { is_allowed: provider.reuses_connections(), max_age: provider.connection_max_age };
        let client = Client::new(&expansion.target, provider.timeout, reuse, Arc::clone(&strays))?;
        let (timeout, echo) = (provider.timeout, provider.request.echo.clone());
        Ok(Self { expansion, meanings, inquiry, timeout, reuse, echo, strays, client: Arc::new(client) })
    }

    /// What no worker could use of a row, wherever its requests may go: one error per header, and one of the request.
    #[must_use]
    pub fn problems(provider: &Provider) -> Vec<FreezeError> {
        Expansion::problems(provider)
    }

    /// The secrets that a row would send, and where, whether it may or not; none of a row that cannot be used.
    #[must_use]
    pub fn secrets(provider: &Provider, outbound: &OutboundPolicy) -> Vec<SecretUse> {
        Expansion::secrets(provider, outbound)
    }

    /// What of its secrets this process cannot read now, one error per header, without any value.
    #[must_use]
    pub async fn unreadable(&self) -> Vec<FreezeError> {
        self.expansion.headers.unreadable(self.expansion.target.host()).await
    }

    /// The row's own client, or one for the address that an older version of the row froze.
    fn client_for(&self, target: &Target) -> Result<Arc<Client>, FreezeError> {
        let own = &self.expansion.target.url;
        if target.url == *own || target.url.origin() == own.origin() {
            return Ok(Arc::clone(&self.client));
        }
        // A client for one request keeps nothing.
        let reuse = Reuse { is_allowed: false, ..self.reuse };
        Client::new(target, self.timeout, reuse, Arc::clone(&self.strays)).map(Arc::new)
    }
}

#[async_trait]
impl PaymentProvider for HttpProvider {
    async fn freeze(&self, job: &Job) -> Result<FrozenRequest, FreezeError> {
        self.expansion.freeze(job).await
    }

    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError> {
        self.expansion.credential_fingerprint(account).await
    }

    async fn send(&self, job: &Job, request: &FrozenRequest) -> Answer {
        let prepared = self.expansion.outgoing(request).await.and_then(|out| Ok((self.client_for(&out.target)?, out)));
        let (client, outgoing) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return unanswered(Outcome::LocalFault(error.into())),
        };
        match client.exchange(outgoing).await {
            Ok(answered) => {
                let reading = &answered.reading;
                let mut outcome = classify(reading, &self.meanings, SystemTime::now());
                let settles = matches!(outcome, Outcome::Accepted { .. } | Outcome::Declined { .. });
                let doubt = doubt(reading, &self.echo, &PaymentIdentity::from(job), settles);
                if let Some(cause) = doubt {
                    outcome = Outcome::Unknown { cause, retry_after: None };
                }
                let (status, read_at) = (reading.status, answered.read_at);
                client.conclude(*answered, doubt);
                Answer { outcome, status: Some(status), answer_age: read_at.elapsed() }
            }
            Err(failure) => unanswered(failure.outcome()),
        }
    }

    fn fits(&self, job: &Job) -> Result<(), TooLarge> {
        self.expansion.fits(job)
    }

    fn question(&self, job: &Job) -> Result<Question, String> {
        self.inquiry.as_ref().ok_or("the provider's row has no look-up any more")?.question(job)
    }

    async fn ask(&self, question: &Question) -> Answer<Finding> {
        match &self.inquiry {
            Some(inquiry) => inquiry.ask(question, &self.expansion.headers, SystemTime::now).await,
            None => {
                let problem = "the provider's row has no look-up any more".to_owned();
                unanswered(Finding::LocalFault(LocalFault::Unbuildable(problem)))
            }
        }
    }
}

fn unanswered<T>(outcome: T) -> Answer<T> {
    Answer { outcome, status: None, answer_age: Duration::ZERO }
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProvider")
            .field("url", &shown_url(self.expansion.target.url.as_str()))
            .field("headers", &self.expansion.headers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use crate::domain::job::{Job, Token};
    use crate::domain::provider::ProviderName;

    /// The smallest job.
    pub(super) fn job(id: &str) -> Job {
        Job {
            id: Token::new(id).unwrap(),
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
