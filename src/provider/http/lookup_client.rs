//! Look-ups over HTTP: what became of a payment, asked at the row's own address and read by the row's own words.
//!
//! Refuses to guess: only a word that the row lists decides, and an accepted payment whose amount or currency the row
//! wants compared is not accepted until they are. Refuses the row's `statuses` where they would judge a payment: those
//! are a charge's; what they say of limits and locks holds here too.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::Method;

use super::classify::{ProviderResponse, ResponseBody, ResponseRules, is_token, reference, row_meaning};
use super::client::{self, HttpClient, PreparedRequest};
use super::echo::{check_echo, minor_units};
use super::outbound::OutboundPolicy;
use super::pool::ConnectionReuse;
use super::request_builder::lookup_url;
use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use super::secrets::HeaderTemplates;
use super::unexpected_responses::UnexpectedResponseLog;
use crate::domain::echo::PaymentIdentity;
use crate::domain::job::Job;
use crate::domain::lookup::{LookupConfig, LookupMethod, LookupResult};
use crate::domain::outcome::UnknownCause;
use crate::domain::provider::{Provider, StatusMeaning};
use crate::provider::{FreezeError, LookupRequest, RequestResult};

/// How one provider is asked. Keeps its own connections, because it may be another host that answers.
pub(super) struct LookupClient {
    policy: OutboundPolicy,
    lookup: LookupConfig,
    /// A charge's.
    charge_rules: ResponseRules,
    client: HttpClient,
}

impl LookupClient {
    /// Checks where look-ups would go, and sets up their client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when the address is not allowed.
    pub(super) fn new(
        lookup: &LookupConfig,
        provider: &Provider,
        outbound: &OutboundPolicy,
        strays: Arc<UnexpectedResponseLog>,
    ) -> Result<Self, FreezeError> {
        let target = outbound.admit(&lookup.url.sample())?;
        // A question may be asked again, so a lost one costs nothing but time.
        let is_allowed = provider.reuse_connections.unwrap_or(true);
        let reuse = ConnectionReuse { is_allowed, max_age: provider.connection_max_age };
        Ok(Self {
            client: HttpClient::new(&target, provider.timeout, reuse, strays)?,
            policy: outbound.clone(),
            lookup: lookup.clone(),
            charge_rules: ResponseRules::from_provider(provider),
        })
    }

    pub(super) fn request_for(&self, job: &Job) -> Result<LookupRequest, String> {
        Ok(LookupRequest {
            method: match self.lookup.method {
                LookupMethod::Get => "GET",
                LookupMethod::Post => "POST",
            },
            url: lookup_url(&self.policy, &self.lookup.url, job).map_err(|error| error.to_string())?,
            account: job.account.as_ref().map(|account| account.as_str().to_owned()),
            payment: PaymentIdentity::from(job),
            currency: job.currency.clone(),
        })
    }

    /// `now` serves dates in an answer without a `Date` of its own.
    pub(super) async fn look_up(
        &self,
        question: &LookupRequest,
        headers: &HeaderTemplates,
        now: fn() -> SystemTime,
    ) -> RequestResult<LookupResult> {
        let outgoing = match self.prepare(question, headers).await {
            Ok(outgoing) => outgoing,
            Err(error) => return without_response(LookupResult::LocalFault(error.into())),
        };
        match self.client.exchange(outgoing).await {
            Ok(answered) => {
                let reading = &answered.response;
                let mut finding = classify_lookup(reading, question, &self.lookup, &self.charge_rules, now());
                let settles = matches!(
                    finding,
                    LookupResult::Accepted { .. } | LookupResult::Declined { .. } | LookupResult::Differs { .. }
                );
                let doubt = check_echo(reading, &self.lookup.echo, &question.payment, settles);
                if let Some(cause) = doubt {
                    finding = LookupResult::Unknown { cause, retry_after: None };
                }
                let (status, read_at) = (reading.status, answered.read_at);
                self.client.release_connection(*answered, doubt);
                RequestResult { outcome: finding, status: Some(status), response_age: read_at.elapsed() }
            }
            Err(failure) => without_response(failure.into_lookup_result()),
        }
    }

    async fn prepare(
        &self,
        question: &LookupRequest,
        headers: &HeaderTemplates,
    ) -> Result<PreparedRequest, FreezeError> {
        let mut map = client::base_headers(None);
        let target = self.policy.admit(&question.url)?;
        headers.resolve(question.account.as_deref(), target.host()).await?.insert_into(&mut map)?;
        let method = if question.method == "POST" { Method::POST } else { Method::GET };
        // A POST without a length is refused by some servers (411).
        let body = (method == Method::POST).then(Vec::new);
        Ok(PreparedRequest { method, target, headers: map, body })
    }
}

fn without_response(finding: LookupResult) -> RequestResult<LookupResult> {
    RequestResult { outcome: finding, status: None, response_age: Duration::ZERO }
}

/// What an answer says about the payment. `now` serves dates in an answer without a `Date` of its own. An answer that says two
/// things where one is needed leaves it unknown.
fn classify_lookup(
    reading: &ProviderResponse,
    question: &LookupRequest,
    lookup: &LookupConfig,
    meanings: &ResponseRules,
    now: SystemTime,
) -> LookupResult {
    let status = reading.status;
    let unreadable = LookupResult::Unknown { cause: UnknownCause::UnreadableResponse(status), retry_after: None };
    let Ok(said_by_row) = row_meaning(reading, &meanings.statuses) else { return unreadable };
    let throttled = || LookupResult::Throttled { retry_after: meanings.throttle_wait(reading, now) };
    let retry_after = || meanings.retry_after(reading, now);
    let server_error = |retry_after| LookupResult::Unknown { cause: UnknownCause::ServerError(status), retry_after };
    match said_by_row {
        Some(StatusMeaning::Throttled) => return throttled(),
        Some(StatusMeaning::Busy) => return LookupResult::Busy { retry_after: meanings.busy_wait(reading, now) },
        Some(StatusMeaning::Unavailable) => return server_error(retry_after()),
        _ => {}
    }
    match status {
        200..=299 => classify_payment_state(reading, question, lookup).unwrap_or(unreadable),
        404 => LookupResult::NotFound,
        401 | 403 | 407 => LookupResult::Misconfigured { status },
        429 => throttled(),
        503 => server_error(retry_after()),
        408 | 500..=599 => server_error(None),
        405 => LookupResult::Unclear { reason: "provider answered a look-up with 405: check lookup.method".to_owned() },
        _ => LookupResult::Unclear { reason: format!("provider answered a look-up with {status}: check lookup.url") },
    }
}

fn classify_payment_state(
    reading: &ProviderResponse,
    question: &LookupRequest,
    lookup: &LookupConfig,
) -> Result<LookupResult, AmbiguousValue> {
    if let ResponseBody::Incomplete(cause) = reading.body {
        return Ok(LookupResult::Unknown { cause, retry_after: None });
    }
    let Some(body) = reading.json() else {
        let cause = UnknownCause::UnreadableResponse(reading.status);
        return Ok(LookupResult::Unknown { cause, retry_after: None });
    };
    let state = body.field(&lookup.state)?;
    let Some((state, word)) = state.and_then(|state| state.to_text().map(|word| (state, word))) else {
        return Ok(LookupResult::Unclear { reason: format!("the look-up's answer has no word at {}", lookup.state) });
    };
    let among = |words: &[String]| words.iter().any(|word| state.matches(word));
    let (accepted, declined) = (among(&lookup.accepted), among(&lookup.declined));
    if !accepted && !declined && !among(&lookup.in_progress) {
        let word = if is_token(&word) { format!("`{word}`") } else { "a word".to_owned() };
        return Ok(LookupResult::Unclear {
            reason: format!("the look-up answers {word} that no list of lookup names"),
        });
    }
    Ok(match compare_amount(&body, question, lookup)? {
        AmountComparison::Differs(reason) => LookupResult::Differs { reason },
        AmountComparison::Unreadable(what) if accepted => {
            LookupResult::Unclear { reason: format!("the look-up's answer has no {what} to compare with ours") }
        }
        AmountComparison::Same | AmountComparison::Unreadable(_) if accepted => {
            LookupResult::Accepted { reference: reference(&body, &lookup.reference)? }
        }
        _ if declined => LookupResult::Declined { reason: format!("{word}, as the provider says when asked") },
        _ => LookupResult::InProgress,
    })
}

enum AmountComparison {
    Same,
    Differs(String),
    /// What could not be read.
    Unreadable(&'static str),
}

fn compare_amount(
    body: &ResponseJson,
    question: &LookupRequest,
    lookup: &LookupConfig,
) -> Result<AmountComparison, AmbiguousValue> {
    let field = |pointer: &Option<String>| pointer.as_ref().map(|pointer| body.field(pointer)).transpose();
    let amount = field(&lookup.amount)?.map(|field| minor_units(&field?));
    let currency = field(&lookup.currency)?.map(|field| match field? {
        FieldValue::Text(code) if code.len() == 3 && is_token(&code) => Some(code.to_uppercase()),
        _ => None,
    });
    if amount == Some(None) {
        return Ok(AmountComparison::Unreadable("amount in minor units"));
    }
    if currency == Some(None) {
        return Ok(AmountComparison::Unreadable("currency"));
    }
    let theirs = (amount.flatten().unwrap_or(question.payment.amount), currency.flatten());
    let theirs = (theirs.0, theirs.1.unwrap_or_else(|| question.currency.clone()));
    if theirs == (question.payment.amount, question.currency.clone()) {
        return Ok(AmountComparison::Same);
    }
    Ok(AmountComparison::Differs(format!(
        "the provider has {} {} for this payment, we have {} {}: see it at the provider",
        theirs.0, theirs.1, question.payment.amount, question.currency
    )))
}

#[cfg(test)]
#[path = "lookup_client_tests.rs"]
mod tests;
