//! Client for look-ups: asks the provider what happened to a payment, and classifies the response by the row's
//! `lookup`.
//!
//! Only a state that the row lists decides. If the row compares amount or currency, a payment counts as accepted only
//! when they match. The row's `statuses` are for charges: look-ups use them only for limits, locks and outages
//! (`docs/decisions/0034-look-ups-of-unknown-outcomes.md`).

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use reqwest::Method;

use super::classify::{ProviderResponse, ResponseRules, is_token, reference, row_meaning};
use super::client::{self, ClientSettings, ConnectionReuse, HttpClient, PreparedRequest};
use super::outbound::OutboundPolicy;
use super::response_fields::{check_echo, has_other_amount};
use super::response_json::AmbiguousValue;
use super::secrets::HeaderTemplates;
use super::sums::{SumComparison, compare_sum, other_echo};
use super::{lookup_url, without_response};
use crate::domain::job::Job;
use crate::domain::outcome::{LookupResult, PartialCharge, UnknownCause};
use crate::domain::provider::{LookupConfig, LookupMethod, Provider};
use crate::domain::response::{PaymentIdentity, StatusMeaning};
use crate::domain::sum::SentSum;
use crate::provider::{FreezeError, LookupRequest, RequestResult};

/// Look-up client of one provider row. It has its own connections, because look-ups may go to another host.
pub struct LookupClient {
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
    pub fn new(
        lookup: &LookupConfig,
        provider: &Provider,
        outbound: &OutboundPolicy,
        settings: ClientSettings,
    ) -> Result<Self, FreezeError> {
        let target = outbound.admit(&lookup.url.sample())?;
        // A look-up may be repeated, so a lost one costs only time.
        let is_allowed = provider.reuse_connections.unwrap_or(true);
        let reuse = ConnectionReuse { is_allowed, ..settings.reuse };
        Ok(Self {
            client: HttpClient::new(&target, ClientSettings { reuse, ..settings })?,
            policy: outbound.clone(),
            lookup: lookup.clone(),
            charge_rules: ResponseRules::from_provider(provider),
        })
    }

    pub fn request_for(&self, job: &Job, sum: SentSum) -> Result<LookupRequest, String> {
        Ok(LookupRequest {
            method: match self.lookup.method {
                LookupMethod::Get => "GET",
                LookupMethod::Post => "POST",
            },
            url: lookup_url(&self.policy, &self.lookup.url, job).map_err(|error| error.to_string())?,
            account: job.account.as_ref().map(Arc::from),
            payment: PaymentIdentity::new(job, sum),
        })
    }

    /// Sends one look-up. `now` replaces the `Date` of a response that has none.
    pub async fn look_up(
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
                    LookupResult::Accepted { .. }
                        | LookupResult::PartlyAccepted(_)
                        | LookupResult::Declined { .. }
                        | LookupResult::Differs { .. }
                );
                let doubt = check_echo(reading, &self.lookup.echo, &request.payment, is_final);
                if let Some(cause) = doubt {
                    result = match has_other_amount(reading, &self.lookup.echo, &request.payment) {
                        true => LookupResult::Differs { reason: other_echo() },
                        false => LookupResult::Unknown { cause, retry_after: None },
                    };
                }
                let (status, read_at) = (reading.status, answered.read_at);
                self.client.release_connection(*answered, doubt);
                RequestResult { outcome: result, status: Some(status), response_age: read_at.elapsed(), watch: None }
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
        let target = Arc::new(self.policy.admit(&request.url)?);
        headers.resolve(request.account.as_deref(), &target.host).await?.insert_into(&mut map)?;
        let method = if request.method == "POST" { Method::POST } else { Method::GET };
        // Some servers refuse a POST without a length (411).
        let body = (method == Method::POST).then(Bytes::new);
        Ok(PreparedRequest { method, target, headers: map, body })
    }
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
    let unread = reading.unread_cause();
    let cause = unread.unwrap_or(UnknownCause::UnreadableResponse(status));
    let unreadable = LookupResult::Unknown { cause, retry_after: None };
    let Ok(from_row) = row_meaning(reading, &rules.statuses) else { return unreadable };
    let throttled = || LookupResult::Throttled { retry_after: rules.throttle_wait(reading, now) };
    let retry_after = || rules.own_wait(reading, now);
    let server_error = |retry_after| LookupResult::Unknown { cause: UnknownCause::ServerError(status), retry_after };
    match from_row {
        Some(StatusMeaning::Throttled) => return throttled(),
        Some(StatusMeaning::Busy) => return LookupResult::Busy { retry_after: rules.own_wait(reading, now) },
        Some(StatusMeaning::Unavailable) => return server_error(retry_after()),
        _ => {}
    }
    match status {
        200..=299 => match classify_payment_state(reading, request, lookup).unwrap_or(unreadable) {
            LookupResult::InProgress { .. } => LookupResult::InProgress { retry_after: retry_after() },
            found => found,
        },
        404 if unread.is_some() => unreadable,
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
    let Some(body) = reading.json() else { return Err(AmbiguousValue) };
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
    let reference = || reference(&body, &lookup.reference);
    Ok(match compare_sum(Some(&body), &lookup.sum, &request.payment)? {
        SumComparison::Differs(reason) => LookupResult::Differs { reason },
        SumComparison::Unreadable(what) if accepted => {
            LookupResult::Unclear { reason: format!("the look-up response has no {what} to compare with the job's") }
        }
        SumComparison::Part(amount) if accepted => {
            LookupResult::PartlyAccepted(PartialCharge { reference: reference()?, amount })
        }
        SumComparison::Same | SumComparison::Unreadable(_) if accepted => {
            LookupResult::Accepted { reference: reference()? }
        }
        _ if declined => LookupResult::Declined { reason: format!("{text}, as the provider says when asked") },
        _ => LookupResult::InProgress { retry_after: None },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use reqwest::header::{HeaderMap, RETRY_AFTER};
    use serde_json::{Value, json};

    use super::super::classify::ResponseBody;
    use super::*;
    use crate::domain::job::tests::job;
    use crate::domain::provider::{LookupUrl, WhenNotFound};
    use crate::domain::response::Echo;
    use crate::domain::response::{ResponseLocation, StatusCase, SumFields, WaitField, WaitUnit};

    fn lookup() -> LookupConfig {
        LookupConfig {
            url: LookupUrl::parse("https://x.example/charges?id=${job:id}").unwrap(),
            method: LookupMethod::Get,
            state: "/state".to_owned(),
            accepted: vec!["succeeded".to_owned(), "true".to_owned(), "7".to_owned()],
            declined: vec!["declined".to_owned()],
            in_progress: vec!["processing".to_owned()],
            reference: "/id".to_owned(),
            sum: SumFields::default(),
            echo: Echo::default(),
            not_found: WhenNotFound::Review,
            give_up_after: Duration::from_secs(60),
        }
    }

    fn sum_fields(with_currency: bool) -> SumFields {
        let currency = with_currency.then(|| "/currency".to_owned());
        SumFields { amount: Some("/amount".to_owned()), currency, ..SumFields::default() }
    }

    fn lookup_request() -> LookupRequest {
        let job = job("pay-1");
        let payment = PaymentIdentity::new(&job, SentSum { units: 1_299, decimals: 2 });
        LookupRequest { method: "GET", url: String::new(), account: None, payment }
    }

    fn read(status: u16, headers: HeaderMap, body: &str, lookup: &LookupConfig) -> LookupResult {
        let locks = BTreeMap::from([
            (429, vec![StatusCase::always(StatusMeaning::Busy)]),
            (404, vec![StatusCase::always(StatusMeaning::Declined)]),
            (200, vec![StatusCase::always(StatusMeaning::Accepted)]),
        ]);
        let reading = ProviderResponse { status, headers, body: ResponseBody::Whole(body.as_bytes().to_vec()) };
        let statuses = if status != 429 || body == "busy" { locks } else { BTreeMap::new() };
        let wait =
            WaitField { location: ResponseLocation::Header("x-reset-ms".to_owned()), unit: WaitUnit::Milliseconds };
        let charge = ResponseRules { statuses, reference_pointer: "/charge".to_owned(), wait_field: Some(wait) };
        classify_lookup(&reading, &lookup_request(), lookup, &charge, SystemTime::now())
    }

    fn assert_result(status: u16, body: &Value) -> LookupResult {
        read(status, HeaderMap::new(), &body.to_string(), &lookup())
    }

    #[test]
    fn only_listed_states_decide() {
        let accepted = |reference: Option<&str>| LookupResult::Accepted { reference: reference.map(str::to_owned) };
        let declined = LookupResult::Declined { reason: "declined, as the provider says when asked".to_owned() };
        let unclear = |reason: &str| LookupResult::Unclear { reason: reason.to_owned() };
        let unreadable =
            |status| LookupResult::Unknown { cause: UnknownCause::UnreadableResponse(status), retry_after: None };
        let error = |status| LookupResult::Unknown { cause: UnknownCause::ServerError(status), retry_after: None };
        let no_state = unclear("the look-up response has no state at /state");
        let table = [
            (200, json!({"state": "succeeded", "id": "ch_1"}), accepted(Some("ch_1"))),
            (200, json!({"state": "succeeded"}), accepted(None)),
            (201, json!({"state": true, "id": 7}), accepted(Some("7"))),
            (200, json!({"state": 7}), accepted(None)),
            (200, json!({"state": "declined"}), declined),
            (200, json!({"state": "processing"}), LookupResult::InProgress { retry_after: None }),
            (
                200,
                json!({"state": "Succeeded"}),
                unclear("the look-up response has the state `Succeeded` that no list in lookup contains"),
            ),
            (
                200,
                json!({"state": "a b <script>"}),
                unclear("the look-up response has a state that no list in lookup contains"),
            ),
            (200, json!({"state": {"x": 1}}), no_state.clone()),
            (200, json!({"states": "succeeded"}), no_state.clone()),
            (200, json!([]), no_state),
            // The row's own statuses are a charge's.
            (404, json!({"state": "succeeded"}), LookupResult::NotFound),
            (401, json!({}), LookupResult::Misconfigured { status: 401 }),
            (403, json!({}), LookupResult::Misconfigured { status: 403 }),
            (405, json!({}), unclear("provider answered a look-up with 405: check lookup.method")),
            (302, json!({}), unclear("provider answered a look-up with 302: check lookup.url")),
            (400, json!({"state": "succeeded"}), unclear("provider answered a look-up with 400: check lookup.url")),
            (408, json!({}), error(408)),
            (500, json!({"state": "succeeded"}), error(500)),
            (503, json!({}), error(503)),
            (429, json!({}), LookupResult::Throttled { retry_after: None }),
        ];
        for (status, body, finding) in table {
            assert_eq!(assert_result(status, &body), finding, "{status} {body}");
        }
        assert_eq!(read(200, HeaderMap::new(), "<html>ok</html>", &lookup()), unreadable(200));
        assert_eq!(read(204, HeaderMap::new(), "", &lookup()), unreadable(204));
    }

    #[test]
    fn lookup_numbers_are_compared_exactly() {
        let comparing = LookupConfig { sum: sum_fields(false), accepted: vec!["7".to_owned()], ..lookup() };
        let finding_of = |body: &str| read(200, HeaderMap::new(), body, &comparing);
        let long = "20250416112233445566778801";
        let accepted = LookupResult::Accepted { reference: Some(long.to_owned()) };
        for amount in ["1299", "1299.00", "1.299e3", "129900E-2", "\"1299\""] {
            assert_eq!(finding_of(&format!(r#"{{"state":7.0,"amount":{amount},"id":{long}}}"#)), accepted, "{amount}");
        }
        for amount in ["1299.0000000000000001", "1299.5", "1e99", "\"1299.00\"", "null"] {
            let finding = finding_of(&format!(r#"{{"state":7,"amount":{amount}}}"#));
            assert!(
                matches!(&finding, LookupResult::Unclear { reason } if reason.contains("no amount")),
                "{amount}: {finding:?}"
            );
        }
        let finding = finding_of(r#"{"state":7,"amount":1.3e3}"#);
        assert!(
            matches!(&finding, LookupResult::Differs { reason } if reason.contains("has 13.00 EUR")),
            "{finding:?}"
        );
    }

    #[test]
    fn byte_order_mark_of_a_lookup_is_skipped() {
        let body = "\u{feff}{\"state\":\"succeeded\",\"id\":\"ch_1\"}\r\n";
        assert_eq!(
            read(200, HeaderMap::new(), body, &lookup()),
            LookupResult::Accepted { reference: Some("ch_1".to_owned()) }
        );
    }

    #[test]
    fn lookup_reads_waits_and_busy_cases() {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, reqwest::header::HeaderValue::from_static("9"))]);
        let wait = Some(Duration::from_secs(9));
        assert_eq!(read(429, headers.clone(), "", &lookup()), LookupResult::Throttled { retry_after: wait });
        assert_eq!(read(429, headers.clone(), "busy", &lookup()), LookupResult::Busy { retry_after: wait });
        let unavailable = LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after: wait };
        assert_eq!(read(503, headers.clone(), "", &lookup()), unavailable);
        // A charge's header for quotas counts for limits. For a provider that is down or busy, `Retry-After` counts.
        let elsewhere = HeaderMap::from_iter([("x-reset-ms".parse().unwrap(), "60000".parse().unwrap())]);
        let wait = Some(Duration::from_secs(60));
        assert_eq!(read(429, elsewhere.clone(), "", &lookup()), LookupResult::Throttled { retry_after: wait });
        assert_eq!(read(429, elsewhere.clone(), "busy", &lookup()), LookupResult::Busy { retry_after: None });
        let unavailable = LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after: None };
        assert_eq!(read(503, elsewhere, "", &lookup()), unavailable);
    }

    #[test]
    fn different_amount_is_reported_missing_one_is_unclear() {
        let comparing = LookupConfig { sum: sum_fields(true), accepted: vec!["succeeded".to_owned()], ..lookup() };
        let finding_of = |body: Value| read(200, HeaderMap::new(), &body.to_string(), &comparing);
        let differs = |theirs: &str| LookupResult::Differs {
            reason: format!(
                "amount_differs: the provider has {theirs} for this payment, and 12.99 EUR were sent: check the payment at \
                 the provider"
            ),
        };
        let no = |what: &str| LookupResult::Unclear {
            reason: format!("the look-up response has no {what} to compare with the job's"),
        };
        let (paid, open) = ("succeeded", "processing");
        let accepted = LookupResult::Accepted { reference: None };
        let table = [
            (json!({"state": paid, "amount": 1299, "currency": "EUR"}), accepted.clone()),
            (json!({"state": paid, "amount": "1299", "currency": "eur"}), accepted),
            (json!({"state": paid, "amount": 1300, "currency": "EUR"}), differs("13.00 EUR")),
            (json!({"state": paid, "amount": 1299, "currency": "USD"}), differs("12.99 USD")),
            (json!({"state": "declined", "amount": 1, "currency": "usd"}), differs("0.01 USD")),
            (json!({"state": open, "amount": 1, "currency": "EUR"}), differs("0.01 EUR")),
            (json!({"state": paid, "amount": 12.99, "currency": "EUR"}), no("amount in minor units")),
            (json!({"state": paid, "amount": "12,99", "currency": "EUR"}), no("amount in minor units")),
            (json!({"state": paid, "currency": "EUR"}), no("amount in minor units")),
            (json!({"state": paid, "amount": 1299}), no("currency")),
            (json!({"state": paid, "amount": 1299, "currency": "EURO"}), no("currency")),
            (json!({"state": open}), LookupResult::InProgress { retry_after: None }),
        ];
        for (body, finding) in table {
            assert_eq!(finding_of(body.clone()), finding, "{body}");
        }
    }
}
