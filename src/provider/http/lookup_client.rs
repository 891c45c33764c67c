//! Client for look-ups: asks the provider what happened to a payment, and classifies the response by the row's
//! `lookup`.
//!
//! Only a state that the row lists decides. If the row compares amount or currency, a payment counts as accepted only
//! when they match. The row's `statuses` are for charges: look-ups use them only for limits, locks and outages
//! (`docs/decisions/0034-look-ups-of-unknown-outcomes.md`).

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
use crate::domain::job::Job;
use crate::domain::outcome::{LookupResult, UnknownCause};
use crate::domain::provider::{LookupConfig, LookupMethod, Provider};
use crate::domain::response::{PaymentIdentity, StatusMeaning};
use crate::provider::{FreezeError, LookupRequest, RequestResult};

/// Look-up client of one provider row. It has its own connections, because look-ups may go to another host.
pub(super) struct LookupClient {
    policy: OutboundPolicy,
    lookup: LookupConfig,
    /// Rules for responses to charges; look-ups use those on limits, locks and outages.
    charge_rules: ResponseRules,
    client: HttpClient,
}

impl LookupClient {
    /// Checks the address of look-ups, and sets up their client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when the address is not allowed.
    pub(super) fn new(
        lookup: &LookupConfig,
        provider: &Provider,
        outbound: &OutboundPolicy,
        response_log: Arc<UnexpectedResponseLog>,
    ) -> Result<Self, FreezeError> {
        let target = outbound.admit(&lookup.url.sample())?;
        // A look-up may be repeated, so a lost one costs only time.
        let is_allowed = provider.reuse_connections.unwrap_or(true);
        let reuse = ConnectionReuse { is_allowed, max_age: provider.connection_max_age };
        Ok(Self {
            client: HttpClient::new(&target, provider.timeout, reuse, response_log)?,
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

    /// Sends one look-up. `now` replaces the `Date` of a response that has none.
    pub(super) async fn look_up(
        &self,
        request: &LookupRequest,
        headers: &HeaderTemplates,
        now: fn() -> SystemTime,
    ) -> RequestResult<LookupResult> {
        let outgoing = match self.prepare(request, headers).await {
            Ok(outgoing) => outgoing,
            Err(error) => return without_response(LookupResult::LocalFault(error.into())),
        };
        match self.client.exchange(outgoing).await {
            Ok(answered) => {
                let reading = &answered.response;
                let mut result = classify_lookup(reading, request, &self.lookup, &self.charge_rules, now());
                let is_final = matches!(
                    result,
                    LookupResult::Accepted { .. } | LookupResult::Declined { .. } | LookupResult::Differs { .. }
                );
                let doubt = check_echo(reading, &self.lookup.echo, &request.payment, is_final);
                if let Some(cause) = doubt {
                    result = LookupResult::Unknown { cause, retry_after: None };
                }
                let (status, read_at) = (reading.status, answered.read_at);
                self.client.release_connection(*answered, doubt);
                RequestResult { outcome: result, status: Some(status), response_age: read_at.elapsed() }
            }
            Err(failure) => without_response(failure.into_lookup_result()),
        }
    }

    async fn prepare(
        &self,
        request: &LookupRequest,
        headers: &HeaderTemplates,
    ) -> Result<PreparedRequest, FreezeError> {
        let mut map = client::base_headers(None);
        let target = self.policy.admit(&request.url)?;
        headers.resolve(request.account.as_deref(), target.host()).await?.insert_into(&mut map)?;
        let method = if request.method == "POST" { Method::POST } else { Method::GET };
        // Some servers refuse a POST without a length (411).
        let body = (method == Method::POST).then(Vec::new);
        Ok(PreparedRequest { method, target, headers: map, body })
    }
}

fn without_response(result: LookupResult) -> RequestResult<LookupResult> {
    RequestResult { outcome: result, status: None, response_age: Duration::ZERO }
}

/// Result of a look-up by its response. `now` replaces the `Date` of a response that has none. A response with two
/// values where one is needed leaves the outcome unknown.
fn classify_lookup(
    reading: &ProviderResponse,
    request: &LookupRequest,
    lookup: &LookupConfig,
    rules: &ResponseRules,
    now: SystemTime,
) -> LookupResult {
    let status = reading.status;
    let unreadable = LookupResult::Unknown { cause: UnknownCause::UnreadableResponse(status), retry_after: None };
    let Ok(from_row) = row_meaning(reading, &rules.statuses) else { return unreadable };
    let throttled = || LookupResult::Throttled { retry_after: rules.throttle_wait(reading, now) };
    let retry_after = || rules.retry_after(reading, now);
    let server_error = |retry_after| LookupResult::Unknown { cause: UnknownCause::ServerError(status), retry_after };
    match from_row {
        Some(StatusMeaning::Throttled) => return throttled(),
        Some(StatusMeaning::Busy) => return LookupResult::Busy { retry_after: rules.busy_wait(reading, now) },
        Some(StatusMeaning::Unavailable) => return server_error(retry_after()),
        _ => {}
    }
    match status {
        200..=299 => classify_payment_state(reading, request, lookup).unwrap_or(unreadable),
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
    request: &LookupRequest,
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
    let Some((state, text)) = state.and_then(|state| state.to_text().map(|text| (state, text))) else {
        return Ok(LookupResult::Unclear { reason: format!("the look-up response has no state at {}", lookup.state) });
    };
    let is_among = |states: &[String]| states.iter().any(|listed| state.matches(listed));
    let (accepted, declined) = (is_among(&lookup.accepted), is_among(&lookup.declined));
    if !accepted && !declined && !is_among(&lookup.in_progress) {
        let state = if is_token(&text) { format!("the state `{text}`") } else { "a state".to_owned() };
        return Ok(LookupResult::Unclear {
            reason: format!("the look-up response has {state} that no list in lookup contains"),
        });
    }
    Ok(match compare_amount(&body, request, lookup)? {
        AmountComparison::Differs(reason) => LookupResult::Differs { reason },
        AmountComparison::Unreadable(what) if accepted => {
            LookupResult::Unclear { reason: format!("the look-up response has no {what} to compare with the job's") }
        }
        AmountComparison::Same | AmountComparison::Unreadable(_) if accepted => {
            LookupResult::Accepted { reference: reference(&body, &lookup.reference)? }
        }
        _ if declined => LookupResult::Declined { reason: format!("{text}, as the provider says when asked") },
        _ => LookupResult::InProgress,
    })
}

enum AmountComparison {
    Same,
    Differs(String),
    /// The field that could not be read.
    Unreadable(&'static str),
}

fn compare_amount(
    body: &ResponseJson,
    request: &LookupRequest,
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
    let theirs = (amount.flatten().unwrap_or(request.payment.amount), currency.flatten());
    let theirs = (theirs.0, theirs.1.unwrap_or_else(|| request.currency.clone()));
    if theirs == (request.payment.amount, request.currency.clone()) {
        return Ok(AmountComparison::Same);
    }
    Ok(AmountComparison::Differs(format!(
        "the provider has {} {} for this payment, the job has {} {}: check the payment at the provider",
        theirs.0, theirs.1, request.payment.amount, request.currency
    )))
}

#[cfg(test)]
#[path = "lookup_client_tests.rs"]
mod tests;
