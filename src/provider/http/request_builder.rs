//! Builder of a provider row's requests for a job: body, URLs and headers, each within its bound, without a connection.
//!
//! A worker checks the sizes before it records a job, and again before it sends, because the row may have changed.

use std::collections::BTreeMap;

use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderName, HeaderValue};

use super::client::{PreparedRequest, base_headers};
use super::outbound::{OutboundPolicy, OutboundTarget};
use super::request::{KEY_HEADER, RequestPlan};
use super::secrets::{HEADER_OVERHEAD_BYTES, HeaderTemplates};
use crate::domain::expansion::{RequestBuildError, RequestPart, TooLarge, URL_BYTES_MAX, UrlTemplate};
use crate::domain::job::Job;
use crate::domain::printable::redact_url;
use crate::domain::provider::{LookupUrl, Provider};
use crate::faults::{self, Bug};
use crate::provider::secret_grants::{SecretReference, SecretUse};
use crate::provider::{FreezeError, FrozenRequest};

/// The validated parts of a provider row that make a request from a job.
pub struct RequestBuilder {
    policy: OutboundPolicy,
    /// Target of `url`, with sample values for its placeholders. The host is the same for every job.
    pub(super) target: OutboundTarget,
    url: UrlTemplate,
    lookup_url: Option<LookupUrl>,
    plan: RequestPlan,
    pub(super) headers: HeaderTemplates,
}

impl RequestBuilder {
    /// Checks the row's URL, headers and request shape. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError`] naming what is invalid, and how to fix it.
    pub fn new(provider: &Provider, outbound: &OutboundPolicy) -> Result<Self, FreezeError> {
        let invalid = |problem| FreezeError::Url { url: redact_url(&provider.url), problem };
        let url = UrlTemplate::parse(&provider.url).map_err(|problem| invalid(problem.to_string()))?;
        let target = outbound.admit(&url.sample())?;
        if target.url.as_str().len() > URL_BYTES_MAX {
            return Err(invalid(format!("is longer than {URL_BYTES_MAX} bytes as it is sent")));
        }
        let lookup_url = provider.lookup.as_ref().map(|lookup| lookup.url.clone());
        let (headers, content_type) = split_content_type(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref())?;
        let headers = HeaderTemplates::parse(&headers, &plan.key_header, outbound)?;
        headers.check_grants(&target_hosts(provider, outbound)?)?;
        Ok(Self { policy: outbound.clone(), target, url, lookup_url, plan, headers })
    }

    /// Problems of a row that make it unusable for every worker: one error per header, and one for the request.
    pub(super) fn problems(provider: &Provider) -> Vec<FreezeError> {
        let (headers, content_type) = split_content_type(provider);
        let plan = RequestPlan::parse(&provider.request, content_type.as_deref());
        let key_header = plan.as_ref().map_or(HeaderName::from_static(KEY_HEADER), |plan| plan.key_header.clone());
        let alone = |(name, value)| {
            HeaderTemplates::parse(&BTreeMap::from([(name, value)]), &key_header, &OutboundPolicy::default()).err()
        };
        plan.as_ref().err().cloned().into_iter().chain(headers.into_iter().filter_map(alone)).collect()
    }

    /// Secrets that the row would send, and their hosts; none for a row that cannot be used.
    pub(super) fn secret_uses(provider: &Provider, outbound: &OutboundPolicy) -> Vec<SecretUse> {
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

    /// The request that this job's first attempt would send. Reads secrets, in bounded time.
    ///
    /// # Errors
    /// [`FreezeError::Job`] if the job is invalid. Any other error comes from the row or the environment.
    pub async fn freeze(&self, job: &Job) -> Result<FrozenRequest, FreezeError> {
        let account = job.account.as_ref().map(|account| account.as_str().to_owned());
        Ok(FrozenRequest {
            method: self.plan.method.to_string(),
            url: self.url(job)?,
            idempotency_key: job.effective_key().to_string(),
            content_type: self.plan.content_type.clone(),
            body: self.body(job)?,
            credential_fingerprint: self.credential_fingerprint(account.as_deref()).await?,
            account,
        })
    }

    pub(super) async fn credential_fingerprint(&self, account: Option<&str>) -> Result<String, FreezeError> {
        Ok(self.headers.resolve(account, self.target.host()).await?.fingerprint(&self.plan.key_header))
    }

    /// The frozen request with the current header values, which must be those that it was frozen with. Nothing is sent.
    pub(super) async fn prepare(&self, request: &FrozenRequest) -> Result<PreparedRequest, FreezeError> {
        let header = |name: &HeaderName, value: &str| {
            HeaderValue::from_str(value).map_err(|_| FreezeError::Header {
                header: name.to_string(),
                problem: "its frozen value has a character that a header cannot hold".to_owned(),
            })
        };
        let key = &self.plan.key_header;
        let mut headers = base_headers(Some(header(&CONTENT_TYPE, &request.content_type)?));
        // An older version of the row may have frozen another host.
        let target = self.target_for(&request.url)?;
        let resolved = self.headers.resolve(request.account.as_deref(), target.host()).await?;
        // A repeat after an unknown outcome must carry the credential that the request was frozen with.
        if resolved.fingerprint(key) != request.credential_fingerprint {
            return Err(FreezeError::CredentialChanged);
        }
        resolved.insert_into(&mut headers)?;
        headers.insert(key, header(key, &request.idempotency_key)?);
        if faults::bug(Bug::NewKeyPerAttempt) {
            headers.insert(key, header(key, &uuid::Uuid::now_v7().to_string())?);
        }
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
    pub fn url(&self, job: &Job) -> Result<String, FreezeError> {
        if !self.url.has_placeholders() {
            return Ok(self.target.url.to_string());
        }
        let written = self.url.for_job(job, RequestPart::Url).map_err(FreezeError::Job)?;
        let target = admit_within_bound(&self.policy, &written, RequestPart::Url, job)?;
        if target.url.origin() != self.target.url.origin() {
            return Err(FreezeError::Job(RequestBuildError::Field(
                "a field of the job would change the host of url".to_owned(),
            )));
        }
        Ok(target.url.into())
    }

    /// The address of this job's look-ups; `None` if the row has no look-up.
    pub fn lookup_url(&self, job: &Job) -> Option<Result<String, FreezeError>> {
        self.lookup_url.as_ref().map(|url| lookup_url(&self.policy, url, job))
    }

    /// The body of this job's charges.
    pub fn body(&self, job: &Job) -> Result<Vec<u8>, FreezeError> {
        self.plan.body(job)
    }

    /// Checks that each part of this job's requests is within its bound.
    ///
    /// # Errors
    /// [`TooLarge`] names the first part that is not.
    pub fn check_size(&self, job: &Job) -> Result<(), TooLarge> {
        let parts = [self.body(job).err(), self.url(job).err(), self.lookup_url(job).and_then(Result::err)];
        let too_large = |error| match error {
            FreezeError::Job(RequestBuildError::TooLarge(too_large)) => Some(too_large),
            _ => None,
        };
        parts.into_iter().flatten().find_map(too_large).map_or(Ok(()), Err)
    }

    /// Target of a frozen URL. The row's own URL was admitted when the row was read.
    fn target_for(&self, url: &str) -> Result<OutboundTarget, FreezeError> {
        if url == self.target.url.as_str() { Ok(self.target.clone()) } else { self.policy.admit(url) }
    }
}

/// Hosts of the row's charges and look-ups; they are the same for every job.
fn target_hosts(provider: &Provider, outbound: &OutboundPolicy) -> Result<Vec<String>, FreezeError> {
    let invalid = |problem| FreezeError::Url { url: redact_url(&provider.url), problem };
    let charges = UrlTemplate::parse(&provider.url).map_err(|problem| invalid(problem.to_string()))?.sample();
    let lookups = provider.lookup.as_ref().map(|lookup| lookup.url.sample());
    let hosts = std::iter::once(charges).chain(lookups).map(|url| Ok(outbound.admit(&url)?.host()));
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
pub(super) fn lookup_url(policy: &OutboundPolicy, url: &LookupUrl, job: &Job) -> Result<String, FreezeError> {
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
