//! Payment providers of kind `http`: a provider row in, one HTTP request per attempt out.
//!
//! [`RequestBuilder`] freezes requests: body, URLs and headers, each within its bound, without a connection. A worker
//! checks the sizes before it records a job, and again before it sends, because the row may have changed. `client` sends
//! each request once, without redirects and proxies, and `classify` interprets responses. `outbound` limits the targets,
//! and `secrets` resolves header values, which are never printed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderName, HeaderValue};

use self::classify::{ProviderResponse, ResponseRules, classify};
use self::client::{ClientSettings, ConnectionReuse, HttpClient, PreparedRequest, base_headers};
use self::connection::ReceivedResponse;
use self::failure::UnexpectedResponseLog;
pub use self::header_names::{HeaderNames, title_case};
use self::lookup_client::LookupClient;
pub use self::outbound::OutboundPolicy;
use self::outbound::OutboundTarget;
use self::request::{KEY_HEADER, RequestPlan};
use self::response_fields::{check_echo, has_other_amount, is_confirmed};
use self::response_json::AmbiguousValue;
use self::secrets::{HEADER_OVERHEAD_BYTES, HeaderTemplates};
use self::sums::{SumComparison, compare_sum, other_echo};
use super::secret_grants::{SecretReference, SecretUse};
use super::{FreezeError, FrozenRequest, LookupRequest, PaymentProvider, RequestResult};
use crate::domain::expansion::{RequestBuildError, RequestPart, TooLarge, URL_BYTES_MAX, UrlTemplate};
use crate::domain::job::Job;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{LookupResult, Outcome, PartialCharge, UnknownCause};
use crate::domain::printable::redact_url;
use crate::domain::provider::{LookupUrl, Provider};
use crate::domain::response::{Echo, PaymentIdentity, SumFields};
use crate::domain::sum::SentSum;

pub mod classify;
mod client;
mod connection;
mod content_coding;
mod failure;
mod header_names;
mod lookup_client;
mod outbound;
pub mod request;
mod resolver;
pub mod response_fields;
mod response_json;
mod secret_files;
mod secrets;
mod socket;
mod sums;
mod template;
pub mod waits;

/// One provider row of kind `http`, ready to be called. Keeps its own connections.
pub struct HttpProvider {
    request_builder: RequestBuilder,
    response_rules: ResponseRules,
    lookup_client: Option<LookupClient>,
    echo: Echo,
    sum_fields: SumFields,
    client_settings: ClientSettings,
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
        let client_settings = ClientSettings {
            timeout: provider.timeout,
            reuse: ConnectionReuse { is_allowed: provider.reuses_connections(), max_age: provider.connection_max_age },
            header_names: Arc::new(HeaderNames::from_provider(provider)),
            response_log: Arc::new(UnexpectedResponseLog::new(provider.name.clone())),
        };
        let lookup_client = |lookup| LookupClient::new(lookup, provider, outbound, client_settings.clone());
        let lookup_client = provider.lookup.as_ref().map(lookup_client).transpose()?;
        let client = HttpClient::new(&request_builder.target, client_settings.clone())?;
        Ok(Self {
            request_builder,
            response_rules,
            lookup_client,
            echo: provider.request.echo.clone(),
            sum_fields: provider.request.sum.clone(),
            client_settings,
            client: Arc::new(client),
        })
    }

    /// Problems of a row that make it unusable for every worker: one error per header, and one for the request.
    pub fn problems(provider: &Provider) -> Vec<FreezeError> {
        let (headers, content_type) = split_content_type(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref());
        let key_header = plan.as_ref().map_or(HeaderName::from_static(KEY_HEADER), |plan| plan.key_header.clone());
        let alone = |(name, value)| {
            HeaderTemplates::parse(&BTreeMap::from([(name, value)]), &key_header, &OutboundPolicy::default()).err()
        };
        plan.err().into_iter().chain(headers.into_iter().filter_map(alone)).collect()
    }

    /// Secrets that a row would send, and their hosts, allowed or not; none for a row that cannot be used.
    pub fn secret_uses(provider: &Provider, outbound: &OutboundPolicy) -> Vec<SecretUse> {
        let (headers, content_type) = split_content_type(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref());
        let templates = plan.and_then(|plan| HeaderTemplates::parse(&headers, &plan.key_header, outbound));
        let (Ok(templates), Ok(hosts)) = (templates, target_hosts(provider, outbound)) else { return Vec::new() };
        let to_each = |(_, reference): (_, &SecretReference)| {
            let reference = reference.clone();
            hosts.iter().map(move |host| SecretUse { reference: reference.clone(), host: host.clone() })
        };
        templates.references().flat_map(to_each).collect()
    }

    /// Secrets that this process cannot read now: one error per header, without any value.
    pub async fn unreadable_secrets(&self) -> Vec<FreezeError> {
        self.request_builder.headers.unreadable(&self.request_builder.target.host).await
    }

    /// The row's own client, or one for the address that an older version of the row froze.
    fn client_for(&self, target: &OutboundTarget) -> Result<Arc<HttpClient>, FreezeError> {
        let own = &self.request_builder.target.url;
        if target.url == *own || target.url.origin() == own.origin() {
            return Ok(Arc::clone(&self.client));
        }
        // A client for one request keeps nothing.
        let reuse = ConnectionReuse { is_allowed: false, ..self.client_settings.reuse };
        HttpClient::new(target, ClientSettings { reuse, ..self.client_settings.clone() }).map(Arc::new)
    }

    /// Result of a request, as far as it is certain that the response answers this job's request.
    fn interpret(&self, payment: &PaymentIdentity, answered: ReceivedResponse, client: &HttpClient) -> RequestResult {
        let reading = &answered.response;
        let (status, read_at) = (reading.status, answered.read_at);
        let mut outcome = classify(reading, &self.response_rules, SystemTime::now());
        let is_final = matches!(outcome, Outcome::Accepted { .. } | Outcome::Declined { .. });
        let doubt = check_echo(reading, &self.echo, payment, is_final);
        outcome = match doubt {
            Some(_) if has_other_amount(reading, &self.echo, payment) => {
                Outcome::Differs { reason: other_echo(), reference: None }
            }
            Some(cause) => Outcome::Unknown { cause, retry_after: None },
            None => self.judge_sum(outcome, reading, payment),
        };
        let response_age = read_at.elapsed();
        let refusal = outcome.refusal();
        let may_be_stray = refusal.is_some() || matches!(outcome, Outcome::Rejected { .. });
        let mut watch = None;
        if !may_be_stray || is_confirmed(reading, &self.echo, payment) {
            client.release_connection(answered, doubt);
        } else if answered.on_used_connection {
            if let Some(refusal) = refusal {
                outcome = Outcome::Unconfirmed { refusal, status };
            }
            watch = client.watch(answered);
        } else if refusal.is_none() {
            client.release_connection(answered, doubt);
        }
        // Dropped otherwise: a refusal on a connection of its own is certain, and no other payment meets a copy of it.
        RequestResult { outcome, status: Some(status), response_age, watch }
    }

    /// The outcome of a response that is about this payment, by the sum that it names.
    fn judge_sum(&self, outcome: Outcome, reading: &ProviderResponse, payment: &PaymentIdentity) -> Outcome {
        let reference = match &outcome {
            Outcome::Accepted { reference } => reference.clone(),
            Outcome::InProgress { .. } => None,
            _ => return outcome,
        };
        let is_accepted = matches!(outcome, Outcome::Accepted { .. });
        let names_sum = self.sum_fields.amount.is_some() || self.sum_fields.currency.is_some();
        let body = names_sum.then(|| reading.json()).flatten();
        match compare_sum(body.as_ref(), &self.sum_fields, payment) {
            Ok(SumComparison::Differs(reason)) => Outcome::Differs { reason, reference },
            Ok(SumComparison::Part(amount)) if is_accepted => {
                Outcome::PartlyAccepted(PartialCharge { reference, amount })
            }
            Ok(SumComparison::Unreadable(_)) | Err(AmbiguousValue) if is_accepted => {
                Outcome::Unknown { cause: UnknownCause::UnreadableResponse(reading.status), retry_after: None }
            }
            Ok(_) | Err(AmbiguousValue) => outcome,
        }
    }
}

#[async_trait]
impl PaymentProvider for HttpProvider {
    async fn freeze(&self, job: &Job, sum: SentSum) -> Result<FrozenRequest, FreezeError> {
        self.request_builder.freeze(job, sum).await
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
            Ok(answered) => self.interpret(&PaymentIdentity::new(job, request.sum), *answered, &client),
            Err(failure) => without_response(failure.into_outcome()),
        }
    }

    fn check_size(&self, job: &Job, sum: SentSum) -> Result<(), TooLarge> {
        self.request_builder.check_size(job, sum)
    }

    fn lookup_request(&self, job: &Job, sum: SentSum) -> Result<LookupRequest, String> {
        self.lookup_client.as_ref().ok_or("the provider's row no longer has a look-up")?.request_for(job, sum)
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
    RequestResult { outcome, status: None, response_age: Duration::ZERO, watch: None }
}

impl fmt::Debug for HttpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpProvider")
            .field("url", &redact_url(self.request_builder.target.url.as_str()))
            .field("headers", &self.request_builder.headers)
            .finish_non_exhaustive()
    }
}

/// The validated parts of a provider row that make a request from a job.
pub struct RequestBuilder {
    policy: OutboundPolicy,
    /// Target of `url`, with sample values for its placeholders. The host is the same for every job.
    target: Arc<OutboundTarget>,
    /// The target's URL as text.
    own_url: Arc<str>,
    url: UrlTemplate,
    lookup_url: Option<LookupUrl>,
    plan: RequestPlan,
    headers: HeaderTemplates,
}

impl RequestBuilder {
    /// Checks the row's URL, headers and request shape. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError`] naming what is invalid, and how to fix it.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let invalid = |problem| FreezeError::Url { url: redact_url(&provider.url), problem };
        let url = UrlTemplate::parse(&provider.url).map_err(|problem| invalid(problem.to_string()))?;
        let target = Arc::new(outbound.admit(&url.sample())?);
        if target.url.as_str().len() > URL_BYTES_MAX {
            return Err(invalid(format!("is longer than {URL_BYTES_MAX} bytes as it is sent")));
        }
        let lookup_url = provider.lookup.as_ref().map(|lookup| lookup.url.clone());
        let (headers, content_type) = split_content_type(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref())?;
        let headers = HeaderTemplates::parse(&headers, &plan.key_header, outbound)?;
        headers.check_grants(&target_hosts(provider, outbound)?)?;
        let own_url = target.url.as_str().into();
        Ok(Self { policy: outbound.clone(), target, own_url, url, lookup_url, plan, headers })
    }

    /// The request that this job's first attempt would send, for this sum. Reads secrets, in bounded time.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job is invalid. Any other error comes from the row or the environment.
    pub async fn freeze(&self, job: &Job, sum: SentSum) -> Result<FrozenRequest, FreezeError> {
        Ok(FrozenRequest {
            method: Arc::clone(&self.plan.method),
            url: self.url(job)?,
            idempotency_key: job.effective_key().into(),
            content_type: Arc::clone(&self.plan.content_type),
            body: self.plan.body(job, sum)?.into(),
            account: job.account.as_ref().map(Arc::from),
            sum,
            credential_fingerprint: self.credential_fingerprint(job.account_name()).await?.into(),
        })
    }

    async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError> {
        Ok(self.headers.resolve(account, &self.target.host).await?.fingerprint(&self.plan.key_header))
    }

    /// The frozen request with the current header values, which must be those that it was frozen with. Nothing is sent.
    async fn prepare(&self, request: &FrozenRequest) -> Result<PreparedRequest, FreezeError> {
        let header = |name: &HeaderName, value: &str| {
            HeaderValue::from_str(value).map_err(|_| FreezeError::Header {
                header: name.to_string(),
                problem: "its frozen value has a character that a header cannot hold".to_owned(),
            })
        };
        let key = &self.plan.key_header;
        // An older version of the row may have frozen another content type, and another host. The row's own URL was
        // admitted when the row was read.
        let content_type = match request.content_type == self.plan.content_type {
            true => self.plan.content_type_header.clone(),
            false => header(&CONTENT_TYPE, &request.content_type)?,
        };
        let mut headers = base_headers(Some(content_type));
        let is_own = request.url == self.own_url;
        let target = if is_own { Arc::clone(&self.target) } else { Arc::new(self.policy.admit(&request.url)?) };
        let resolved = self.headers.resolve(request.account.as_deref(), &target.host).await?;
        // A repeat after an unknown outcome must carry the credential that the request was frozen with.
        if resolved.fingerprint(key) != *request.credential_fingerprint {
            return Err(FreezeError::CredentialChanged);
        }
        resolved.insert_into(&mut headers)?;
        headers.insert(key, header(key, &request.idempotency_key)?);
        let method = Method::from_bytes(request.method.as_bytes())
            .map_err(|_| FreezeError::Template("the frozen method is not an HTTP method".to_owned()))?;
        Ok(PreparedRequest { method, target, headers, body: Some(request.body.clone()) })
    }

    /// Bytes of all headers of this request, with their names and separators.
    ///
    /// # Errors
    /// The reason why the request would not be sent.
    pub async fn header_bytes(&self, request: &FrozenRequest) -> Result<usize, FreezeError> {
        let headers = self.prepare(request).await?.headers;
        Ok(headers.iter().map(|(name, value)| name.as_str().len() + value.len() + HEADER_OVERHEAD_BYTES).sum())
    }

    /// The address of this job's charges.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job lacks a field of it, or has one that changes the host or is too long.
    pub fn url(&self, job: &Job) -> Result<Arc<str>, FreezeError> {
        if !self.url.has_placeholders() {
            return Ok(Arc::clone(&self.own_url));
        }
        let written = self.url.for_job(job, RequestPart::Url).map_err(FreezeError::Job)?;
        let target = admit_within_bound(&self.policy, &written, RequestPart::Url, job)?;
        if target.url.origin() != self.target.url.origin() {
            return Err(FreezeError::Job(RequestBuildError::Field(
                "a field of the job would change the host of url".to_owned(),
            )));
        }
        Ok(target.url.as_str().into())
    }

    /// The address of this job's look-ups; `None` if the row has no look-up.
    pub fn lookup_url(&self, job: &Job) -> Option<Result<String, FreezeError>> {
        self.lookup_url.as_ref().map(|url| lookup_url(&self.policy, url, job))
    }

    /// Checks that each part of this job's requests is within its bound.
    ///
    /// # Errors
    /// [`TooLarge`] names the first part that is not.
    pub fn check_size(&self, job: &Job, sum: SentSum) -> Result<(), TooLarge> {
        let body = self.plan.can_expand().then(|| self.plan.body(job, sum).err()).flatten();
        let url = self.url.has_placeholders().then(|| self.url(job).err()).flatten();
        let parts = [body, url, self.lookup_url(job).and_then(Result::err)];
        let too_large = |error| match error {
            FreezeError::Job(RequestBuildError::TooLarge(too_large)) => Some(too_large),
            _ => None,
        };
        parts.into_iter().flatten().find_map(too_large).map_or(Ok(()), Err)
    }
}

/// Hosts of the row's charges and look-ups; they are the same for every job.
fn target_hosts(provider: &Provider, outbound: &OutboundPolicy) -> Result<Vec<String>, FreezeError> {
    let invalid = |problem| FreezeError::Url { url: redact_url(&provider.url), problem };
    let charges = UrlTemplate::parse(&provider.url).map_err(|problem| invalid(problem.to_string()))?.sample();
    let lookups = provider.lookup.as_ref().map(|lookup| lookup.url.sample());
    let hosts = std::iter::once(charges).chain(lookups).map(|url| Ok(outbound.admit(&url)?.host));
    hosts.collect()
}

/// The row's headers without the content type, and the content type, which is frozen with a request.
fn split_content_type(provider: &Provider) -> (BTreeMap<String, String>, Option<String>) {
    let mut headers = provider.headers.clone();
    let content_type = headers.keys().find(|name| name.eq_ignore_ascii_case("content-type")).cloned();
    let content_type = content_type.and_then(|name| headers.remove(&name));
    (headers, content_type)
}

/// The address of a look-up of this job.
fn lookup_url(policy: &OutboundPolicy, url: &LookupUrl, job: &Job) -> Result<String, FreezeError> {
    let written = url.for_job(job).map_err(FreezeError::Job)?;
    Ok(admit_within_bound(policy, &written, RequestPart::LookupUrl, job)?.url.into())
}

/// Admits an address and checks its length as sent. The parser percent-encodes, so it may be longer than the row's
/// text.
fn admit_within_bound(
    policy: &OutboundPolicy,
    url: &str,
    part: RequestPart,
    job: &Job,
) -> Result<OutboundTarget, FreezeError> {
    let target = policy.admit(url)?;
    if target.url.as_str().len() > part.bytes_max() {
        return Err(FreezeError::Job(RequestBuildError::TooLarge(TooLarge::new(part, job))));
    }
    Ok(target)
}
