//! Payment providers that speak HTTP: one row in, one request per attempt out.
//!
//! Refuses retries, redirects and proxies (`client`), targets that nobody allowed (`outbound`) and secrets in print
//! (`secrets`). The meaning of an answer is a pure function (`classify`).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use reqwest::Method;
use reqwest::header::{HeaderName, HeaderValue};

use self::classify::{Meanings, classify};
use self::client::{Client, Outgoing};
use self::inquiry::Inquiry;
pub use self::outbound::OutboundPolicy;
use self::outbound::Target;
use self::pool::Reuse;
use self::request::RequestPlan;
use self::secrets::HeaderTemplates;
use super::{Answer, FreezeError, FrozenRequest, PaymentProvider, Question};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::lookup::Finding;
use crate::domain::outcome::Outcome;
use crate::domain::provider::Provider;
use crate::domain::url_template::UrlTemplate;
use crate::faults::{self, Bug};

mod address;
mod answer_json;
mod blocking;
pub mod classify;
mod client;
mod connection;
mod connector;
mod failure;
mod form;
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
mod template;

/// One provider row of kind `http`, ready to be called. Keeps its own connections.
pub struct HttpProvider {
    policy: OutboundPolicy,
    /// Of the address without placeholders, or a sample of it: same host for every job.
    target: Target,
    url: UrlTemplate,
    plan: RequestPlan,
    headers: HeaderTemplates,
    meanings: Meanings,
    inquiry: Option<Inquiry>,
    timeout: Duration,
    reuse: Reuse,
    client: Arc<Client>,
}

impl HttpProvider {
    /// Checks the row's URL, headers and request shape, and sets up its client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError`] naming what cannot be meant, with the mend.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let refused = |problem| FreezeError::Url { url: outbound::printable(&provider.url), problem };
        let url = UrlTemplate::parse(&provider.url).map_err(refused)?;
        let target = outbound.admit(&url.sample())?;
        let (headers, content_type) = headers_of(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref())?;
        let headers = HeaderTemplates::parse(&headers, &plan.key_header)?;
        let meanings = Meanings::of(provider);
        let pointer = &meanings.reference_pointer;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(FreezeError::Template(format!("reference `{pointer}`: write a JSON pointer like /id")));
        }
        let inquiry = provider.lookup.as_ref().map(|lookup| Inquiry::new(lookup, provider, outbound)).transpose()?;
        let reuse = Reuse { is_allowed: provider.reuses_connections(), max_age: provider.connection_max_age };
        let client = Client::new(&target, provider.timeout, reuse)?;
        Ok(Self {
            policy: outbound.clone(),
            target,
            url,
            plan,
            headers,
            meanings,
            inquiry,
            timeout: provider.timeout,
            reuse,
            client: Arc::new(client),
        })
    }

    /// What no worker could use of a row, wherever its requests may go: one error per header, and one of the request.
    #[must_use]
    pub fn problems(provider: &Provider) -> Vec<FreezeError> {
        let (headers, content_type) = headers_of(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref());
        let key_header =
            plan.as_ref().map_or(HeaderName::from_static(request::KEY_HEADER), |plan| plan.key_header.clone());
        let alone = |(name, value)| HeaderTemplates::parse(&BTreeMap::from([(name, value)]), &key_header).err();
        plan.as_ref().err().cloned().into_iter().chain(headers.into_iter().filter_map(alone)).collect()
    }

    /// What of its secrets this process cannot read now, one error per header, without any value.
    #[must_use]
    pub async fn unreadable(&self) -> Vec<FreezeError> {
        self.headers.unreadable().await
    }

    /// The frozen request with today's header values, which are those that it was written down with. Nothing is sent.
    async fn outgoing(&self, request: &FrozenRequest) -> Result<Outgoing, FreezeError> {
        let header = |name: &HeaderName, value: &str| {
            HeaderValue::from_str(value).map_err(|_| FreezeError::Header {
                header: name.to_string(),
                problem: "its frozen value has a character that a header cannot hold".to_owned(),
            })
        };
        let key = &self.plan.key_header;
        let mut headers = client::base_headers(Some(header(&reqwest::header::CONTENT_TYPE, &request.content_type)?));
        let resolved = self.headers.resolve(request.account.as_deref()).await?;
        // What was written down is what a re-send after an unknown outcome is compared with.
        if resolved.fingerprint(key) != request.credential_fingerprint {
            return Err(FreezeError::CredentialChanged);
        }
        resolved.insert_into(&mut headers)?;
        headers.insert(key, header(key, &request.idempotency_key)?);
        if faults::bug(Bug::NewKeyPerAttempt) {
            headers.insert(key, header(key, &uuid::Uuid::now_v7().to_string())?);
        }
        let method = Method::from_bytes(request.method.as_bytes())
            .map_err(|_| FreezeError::Template("the frozen method is not one".to_owned()))?;
        Ok(Outgoing { method, target: self.target_of(&request.url)?, headers, body: Some(request.body.clone()) })
    }

    /// The address of this job's charges.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job lacks a field of it, or has one that leads elsewhere.
    fn url_for(&self, job: &Job) -> Result<String, FreezeError> {
        if !self.url.has_placeholders() {
            return Ok(self.target.url.to_string());
        }
        let url = self.policy.admit(&self.url.of(job, "url").map_err(FreezeError::Job)?)?.url;
        if url.origin() != self.target.url.origin() {
            return Err(FreezeError::Job("a field of the job would change the host of url".to_owned()));
        }
        Ok(url.to_string())
    }

    /// The row's own address was admitted when it was read.
    fn target_of(&self, url: &str) -> Result<Target, FreezeError> {
        if url == self.target.url.as_str() { Ok(self.target.clone()) } else { self.policy.admit(url) }
    }

    /// The row's own client, or one for the address that an older version of the row froze.
    fn client_for(&self, target: &Target) -> Result<Arc<Client>, FreezeError> {
        if target.url == self.target.url || target.url.origin() == self.target.url.origin() {
            return Ok(Arc::clone(&self.client));
        }
        // A client for one request keeps nothing.
        Client::new(target, self.timeout, Reuse { is_allowed: false, ..self.reuse }).map(Arc::new)
    }
}

/// The row's headers, and apart from them the content type, which is frozen with a request.
fn headers_of(provider: &Provider) -> (BTreeMap<String, String>, Option<String>) {
    let mut headers = provider.headers.clone();
    let content_type = headers.keys().find(|name| name.eq_ignore_ascii_case("content-type")).cloned();
    let content_type = content_type.and_then(|name| headers.remove(&name));
    (headers, content_type)
}

#[async_trait]
impl PaymentProvider for HttpProvider {
    async fn freeze(&self, job: &Job) -> Result<FrozenRequest, FreezeError> {
        let account = job.account.as_ref().map(|account| account.as_str().to_owned());
        Ok(FrozenRequest {
            method: self.plan.method.to_string(),
            url: self.url_for(job)?,
            idempotency_key: job.effective_key().to_string(),
            content_type: self.plan.content_type.clone(),
            body: self.plan.body(job)?,
            credential_fingerprint: self.credential_fingerprint(account.as_deref()).await?,
            account,
        })
    }

    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError> {
        Ok(self.headers.resolve(account).await?.fingerprint(&self.plan.key_header))
    }

    async fn send(&self, request: &FrozenRequest) -> Answer {
        let prepared = self.outgoing(request).await.and_then(|out| Ok((self.client_for(&out.target)?, out)));
        let (client, outgoing) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return unanswered(Outcome::LocalFault(error.into())),
        };
        match client.exchange(outgoing).await {
            Ok((reading, read_at)) => {
                let outcome = classify(&reading, &self.meanings, SystemTime::now());
                Answer { outcome, status: Some(reading.status), answer_age: read_at.elapsed() }
            }
            Err(failure) => unanswered(failure.outcome()),
        }
    }

    fn question(&self, job: &Job) -> Result<Question, String> {
        self.inquiry.as_ref().ok_or("the provider's row has no look-up any more")?.question(job)
    }

    async fn ask(&self, question: &Question) -> Answer<Finding> {
        match &self.inquiry {
            Some(inquiry) => inquiry.ask(question, &self.headers, SystemTime::now).await,
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
            .field("url", &outbound::printable(self.target.url.as_str()))
            .field("method", &self.plan.method)
            .field("headers", &self.headers)
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
