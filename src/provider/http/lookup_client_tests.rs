//! What answers to look-ups mean, as a table.

use std::collections::BTreeMap;

use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde_json::{Value, json};

use super::super::tests::job;
use super::*;
use crate::domain::provider::{LookupUrl, WhenNotFound};
use crate::domain::response::{Echo, ResponseLocation, StatusCase, WaitField, WaitUnit};

fn lookup() -> LookupConfig {
    LookupConfig {
        url: LookupUrl::parse("https://x.example/charges?id=${job:id}").unwrap(),
        method: LookupMethod::Get,
        state: "/state".to_owned(),
        accepted: vec!["succeeded".to_owned(), "true".to_owned(), "7".to_owned()],
        declined: vec!["declined".to_owned()],
        in_progress: vec!["processing".to_owned()],
        reference: "/id".to_owned(),
        amount: None,
        currency: None,
        echo: Echo::default(),
        not_found: WhenNotFound::Review,
        give_up_after: Duration::from_secs(60),
    }
}

fn lookup_request() -> LookupRequest {
    let job = job("pay-1");
    let payment = PaymentIdentity::from(&job);
    LookupRequest { method: "GET", url: String::new(), account: None, payment, currency: job.currency }
}

fn read(status: u16, headers: HeaderMap, body: &str, lookup: &LookupConfig) -> LookupResult {
    let locks = BTreeMap::from([
        (429, vec![StatusCase::always(StatusMeaning::Busy)]),
        (404, vec![StatusCase::always(StatusMeaning::Declined)]),
        (200, vec![StatusCase::always(StatusMeaning::Accepted)]),
    ]);
    let reading = ProviderResponse { status, headers, body: ResponseBody::Whole(body.as_bytes().to_vec()) };
    let statuses = if status != 429 || body == "busy" { locks } else { BTreeMap::new() };
    let wait = WaitField { location: ResponseLocation::Header("x-reset-ms".to_owned()), unit: WaitUnit::Milliseconds };
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
        (200, json!({"state": "processing"}), LookupResult::InProgress),
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
    let comparing = LookupConfig { amount: Some("/amount".to_owned()), accepted: vec!["7".to_owned()], ..lookup() };
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
    assert!(matches!(&finding, LookupResult::Differs { reason } if reason.contains("has 1300 EUR")), "{finding:?}");
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
    // A charge's wait field counts for limits. For a provider that is down or busy, only `Retry-After` counts.
    let elsewhere = HeaderMap::from_iter([("x-reset-ms".parse().unwrap(), "60000".parse().unwrap())]);
    let wait = Some(Duration::from_secs(60));
    assert_eq!(read(429, elsewhere.clone(), "", &lookup()), LookupResult::Throttled { retry_after: wait });
    assert_eq!(read(429, elsewhere.clone(), "busy", &lookup()), LookupResult::Busy { retry_after: None });
    let unavailable = LookupResult::Unknown { cause: UnknownCause::ServerError(503), retry_after: None };
    assert_eq!(read(503, elsewhere, "", &lookup()), unavailable);
}

#[test]
fn different_amount_is_reported_missing_one_is_unclear() {
    let comparing = LookupConfig {
        amount: Some("/amount".to_owned()),
        currency: Some("/currency".to_owned()),
        accepted: vec!["succeeded".to_owned()],
        ..lookup()
    };
    let finding_of = |body: Value| read(200, HeaderMap::new(), &body.to_string(), &comparing);
    let differs = |theirs: &str| LookupResult::Differs {
        reason: format!(
            "the provider has {theirs} for this payment, the job has 1299 EUR: check the payment at the provider"
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
        (json!({"state": paid, "amount": 1300, "currency": "EUR"}), differs("1300 EUR")),
        (json!({"state": paid, "amount": 1299, "currency": "USD"}), differs("1299 USD")),
        (json!({"state": "declined", "amount": 1, "currency": "usd"}), differs("1 USD")),
        (json!({"state": open, "amount": 1, "currency": "EUR"}), differs("1 EUR")),
        (json!({"state": paid, "amount": 12.99, "currency": "EUR"}), no("amount in minor units")),
        (json!({"state": paid, "amount": "12,99", "currency": "EUR"}), no("amount in minor units")),
        (json!({"state": paid, "currency": "EUR"}), no("amount in minor units")),
        (json!({"state": paid, "amount": 1299}), no("currency")),
        (json!({"state": paid, "amount": 1299, "currency": "EURO"}), no("currency")),
        (json!({"state": open}), LookupResult::InProgress),
    ];
    for (body, finding) in table {
        assert_eq!(finding_of(body.clone()), finding, "{body}");
    }
}
