//! The contract's table of answers, row by row.

use reqwest::header::CONTENT_TYPE;

type Headers<'a> = &'a [(&'static str, &'a str)];

use super::*;
use crate::domain::response::{ResponseLocation, WaitUnit};
use std::collections::BTreeMap;

fn reading(status: u16, body: &str) -> ProviderResponse {
    ProviderResponse { status, headers: HeaderMap::new(), body: ResponseBody::Whole(body.as_bytes().to_vec()) }
}

fn meanings(statuses: &[(u16, StatusMeaning)]) -> ResponseRules {
    let always = |(status, means): &(u16, StatusMeaning)| (*status, vec![StatusCase::always(*means)]);
    ResponseRules {
        statuses: statuses.iter().map(always).collect(),
        reference_pointer: "/id".to_owned(),
        wait_field: None,
    }
}

fn read(reading: &ProviderResponse) -> Outcome {
    classify(reading, &meanings(&[]), SystemTime::UNIX_EPOCH)
}

fn code_of(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Accepted { .. } => "accepted",
        Outcome::Declined { .. } => "declined",
        Outcome::Throttled { .. } => "throttled",
        Outcome::Busy { .. } => "busy",
        Outcome::Misconfigured { .. } => "misconfigured",
        Outcome::InProgress { .. } => "in progress",
        Outcome::Unknown { .. } | Outcome::Unconfirmed { .. } => "unknown",
        Outcome::Rejected { .. } => "review",
        Outcome::NotSent { .. } | Outcome::LocalFault(_) => "not sent",
        // The sum decides these, after the status.
        Outcome::PartlyAccepted(_) | Outcome::Differs { .. } => "by the sum",
    }
}

#[test]
fn every_status_means_what_the_contract_says() {
    for status in 100..=999_u16 {
        let meant = match status {
            200 | 201 => "accepted",
            202 | 409 => "in progress",
            402 => "declined",
            401 | 403 | 404 | 405 | 407 => "misconfigured",
            408 => "unknown",
            429 => "throttled",
            300..=499 => "review",
            _ => "unknown",
        };
        assert_eq!(code_of(&read(&reading(status, r#"{"id":"ch_1"}"#))), meant, "{status}");
    }
}

#[test]
fn a_success_must_be_readable() {
    let accepted = |reference: Option<&str>| Outcome::Accepted { reference: reference.map(str::to_owned) };
    let unreadable = Outcome::Unknown { cause: UnknownCause::UnreadableResponse(200), retry_after: None };
    let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(256));
    let table = [
        (r#"{"id":"ch_1"}"#, accepted(Some("ch_1"))),
        (r#"{"id":12345678901234567}"#, accepted(Some("12345678901234567"))),
        (r#"{"id":{"deep":1}}"#, accepted(None)),
        (r#"{"id":""}"#, accepted(None)),
        (r#"{"id":"a\u0000b"}"#, accepted(None)),
        (long.as_str(), accepted(None)),
        ("{}", accepted(None)),
        ("", unreadable.clone()),
        ("<html>ok</html>", unreadable.clone()),
        ("\"OK\"", unreadable.clone()),
        ("null", unreadable.clone()),
        (r#"{"id":"ch_1""#, unreadable.clone()),
    ];
    for (body, outcome) in table {
        assert_eq!(read(&reading(200, body)), outcome, "{body}");
    }
    assert_eq!(read(&ProviderResponse { body: ResponseBody::Undecodable, ..reading(200, "") }), unreadable);
    let cause = UnknownCause::ConnectionLost;
    let broken = ProviderResponse { body: ResponseBody::Incomplete(cause), ..reading(200, "") };
    assert_eq!(read(&broken), Outcome::Unknown { cause, retry_after: None });
}

#[test]
fn a_numeric_reference_keeps_its_digits() {
    for digits in ["20250416112233445566778801", "20250416112233445566778802", "1.50", "-0", "1E400"] {
        let outcome = read(&reading(200, &format!("{{\"id\": {digits} }}")));
        assert_eq!(outcome, Outcome::Accepted { reference: Some(digits.to_owned()) });
    }
    let row = ResponseRules {
        statuses: BTreeMap::from([(400, vec![code("20250416112233445566778801", None, StatusMeaning::Declined)])]),
        ..meanings(&[])
    };
    let means = |body: &str| code_of(&classify(&reading(400, body), &row, SystemTime::UNIX_EPOCH));
    assert_eq!(means(r#"{"code":20250416112233445566778801}"#), "declined");
    assert_eq!(means(r#"{"code":20250416112233445566778802}"#), "review");
}

/// ASP.NET and PHP send a byte-order mark with JSON, whatever RFC 8259 says.
#[test]
fn encoding_does_not_change_the_meaning() {
    type Encode = fn(&str) -> Vec<u8>;
    let encodings: [(&str, Encode); 4] = [
        ("application/json", |json| format!("\u{feff}{json}").into_bytes()),
        ("application/json", |json| format!("\u{feff}{json}").encode_utf16().flat_map(u16::to_le_bytes).collect()),
        ("application/json; charset=utf-16", |json| json.encode_utf16().flat_map(u16::to_be_bytes).collect()),
        ("application/json; charset=iso-8859-1", |json| {
            json.replace('}', ",\"name\":\"M").into_bytes().into_iter().chain(*b"\xfcller\"}").collect()
        }),
    ];
    for (content_type, encode) in encodings {
        let read = |status: u16, json: &str| {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, content_type.parse().unwrap())]);
            read(&ProviderResponse { status, headers, body: ResponseBody::Whole(encode(json)) })
        };
        let accepted = Outcome::Accepted { reference: Some("ch_1".to_owned()) };
        assert_eq!(read(200, r#"{"id":"ch_1"}"#), accepted, "{content_type}");
        let reason = "provider answered 402: card_declined".to_owned();
        assert_eq!(read(402, r#"{"code":"card_declined"}"#), Outcome::Declined { reason }, "{content_type}");
        let reason = "provider answered 400: bad_iban".to_owned();
        assert_eq!(read(400, r#"{"code":"bad_iban"}"#), Outcome::Rejected { reason }, "{content_type}");
    }
}

#[test]
fn unread_response_ends_no_payment() {
    for (body, cause) in [
        (ResponseBody::TooLarge, UnknownCause::ResponseTooLarge as fn(u16) -> UnknownCause),
        (ResponseBody::HeadTooLarge, UnknownCause::ResponseTooLarge),
        (ResponseBody::Undecodable, UnknownCause::UnreadableResponse),
        (ResponseBody::Incomplete(UnknownCause::Timeout), |_| UnknownCause::Timeout),
    ] {
        let read = |status| read(&ProviderResponse { body: body.clone(), ..reading(status, "") });
        for status in 100..=999_u16 {
            let outcome = match status {
                401 | 403 | 404 | 405 | 407 => Outcome::Misconfigured { status },
                429 => Outcome::Throttled { retry_after: None },
                200..=202 | 300..=407 | 409..=499 => Outcome::Unknown { cause: cause(status), retry_after: None },
                _ => server_error(status, None),
            };
            assert_eq!(read(status), outcome, "{status} {body:?}");
        }
        let cases = vec![code("locked", None, StatusMeaning::Busy), StatusCase::always(StatusMeaning::Throttled)];
        let row = ResponseRules { statuses: [(429, cases)].into(), ..meanings(&[]) };
        let reading = ProviderResponse { body: body.clone(), ..reading(429, "") };
        let unknown = Outcome::Unknown { cause: cause(429), retry_after: None };
        assert_eq!(classify(&reading, &row, SystemTime::UNIX_EPOCH), unknown, "{body:?}");
        let cases = vec![header("x-locked", None, StatusMeaning::Busy), StatusCase::always(StatusMeaning::Throttled)];
        let row = ResponseRules { statuses: [(429, cases)].into(), ..meanings(&[]) };
        let knows_head = body != ResponseBody::HeadTooLarge;
        let expected = if knows_head { Outcome::Throttled { retry_after: None } } else { unknown };
        assert_eq!(classify(&reading, &row, SystemTime::UNIX_EPOCH), expected, "{body:?}");
    }
}

#[test]
fn retry_after_counts_where_it_is_about_this_response() {
    let wait = Some(Duration::from_secs(9));
    let mut with_wait = reading(429, "");
    with_wait.headers.insert("retry-after", "9".parse().unwrap());
    assert_eq!(read(&with_wait), Outcome::Throttled { retry_after: wait });
    with_wait.status = 503;
    assert_eq!(read(&with_wait), server_error(503, wait));
    for status in [202, 409] {
        with_wait.status = status;
        assert_eq!(read(&with_wait), Outcome::InProgress { retry_after: wait });
    }
    with_wait.status = 500;
    assert_eq!(read(&with_wait), server_error(500, None));
}

#[test]
fn a_row_overrides_the_table() {
    use StatusMeaning as M;
    let row = meanings(&[
        (422, M::Declined),
        (409, M::Accepted),
        (204, M::Accepted),
        (200, M::Review),
        (400, M::Throttled),
        (502, M::Unavailable),
        (404, M::Unknown),
        (403, M::InProgress),
        (402, M::Misconfigured),
        (423, M::Busy),
    ]);
    let table = [
        (422, "declined"),
        (409, "accepted"),
        (204, "accepted"),
        (200, "review"),
        (400, "throttled"),
        (502, "unknown"),
        (404, "unknown"),
        (403, "in progress"),
        (402, "misconfigured"),
        (423, "busy"),
        (429, "throttled"),
    ];
    for (status, meant) in table {
        assert_eq!(code_of(&classify(&reading(status, ""), &row, SystemTime::UNIX_EPOCH)), meant, "{status}");
    }
    let duplicate = classify(&reading(409, r#"{"id":"ch_9"}"#), &row, SystemTime::UNIX_EPOCH);
    assert_eq!(duplicate, Outcome::Accepted { reference: Some("ch_9".to_owned()) });
}

#[test]
fn the_reference_is_found_where_the_row_says() {
    let row = ResponseRules { reference_pointer: "/data/0/ref".to_owned(), ..meanings(&[]) };
    let answer = reading(200, r#"{"id":"no","data":[{"ref":"yes"}]}"#);
    let outcome = classify(&answer, &row, SystemTime::UNIX_EPOCH);
    assert_eq!(outcome, Outcome::Accepted { reference: Some("yes".to_owned()) });
}

#[test]
fn wait_is_read_from_the_configured_field() {
    let wait = |place| Some(WaitField { location: place, unit: WaitUnit::Seconds });
    let read = |wait: Option<WaitField>, status, headers: Headers<'_>, body: &str| {
        let mut answer = reading(status, body);
        answer.headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let row = ResponseRules { wait_field: wait, ..meanings(&[(418, StatusMeaning::Busy)]) };
        classify(&answer, &row, SystemTime::UNIX_EPOCH)
    };
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    let header = || wait(ResponseLocation::Header("X-Reset-After".to_owned()));
    let body = || wait(ResponseLocation::Body("/retry_in".to_owned()));
    let throttled = |retry_after| Outcome::Throttled { retry_after };
    assert_eq!(read(header(), 429, &[("x-reset-after", "20")], ""), throttled(seconds(20)));
    assert_eq!(read(body(), 429, &[], r#"{"retry_in":20}"#), throttled(seconds(20)));
    assert_eq!(read(body(), 418, &[], r#"{"retry_in":20}"#), Outcome::Busy { retry_after: seconds(20) });
    // `Retry-After` is about this response; it precedes a field about the quota.
    assert_eq!(read(header(), 429, &[("x-reset-after", "20"), ("retry-after", "9")], ""), throttled(seconds(9)));
    assert_eq!(read(header(), 429, &[("x-reset-after", "2"), ("retry-after", "9")], ""), throttled(seconds(9)));
    assert_eq!(read(header(), 429, &[("x-reset-after", "20"), ("retry-after", "0")], ""), throttled(seconds(20)));
    assert_eq!(read(header(), 429, &[("retry-after", "0")], ""), throttled(seconds(0)));
    assert_eq!(read(header(), 429, &[], ""), throttled(None));
    assert_eq!(read(None, 429, &[("x-reset-after", "20")], r#"{"retry_in":20}"#), throttled(None));
    // An hour's quota names its end in every answer.
    assert_eq!(read(header(), 503, &[("x-reset-after", "3000")], ""), server_error(503, None));
    assert_eq!(read(header(), 418, &[("x-reset-after", "3000")], ""), Outcome::Busy { retry_after: None });
    let both = [("x-reset-after", "3000"), ("retry-after", "9")];
    assert_eq!(read(header(), 418, &both, ""), Outcome::Busy { retry_after: seconds(9) });
    // A field of the body is about this response, too: the longer wait counts.
    assert_eq!(read(body(), 418, &both, r#"{"retry_in":20}"#), Outcome::Busy { retry_after: seconds(20) });
    assert_eq!(read(body(), 429, &both, r#"{"retry_in":2}"#), throttled(seconds(9)));
    assert_eq!(read(body(), 503, &[], r#"{"retry_in":20}"#), server_error(503, seconds(20)));
    assert_eq!(read(body(), 202, &[], r#"{"retry_in":20}"#), Outcome::InProgress { retry_after: seconds(20) });
    // A row may say that `Retry-After` counts something else.
    let ms =
        Some(WaitField { location: ResponseLocation::Header("RETRY-AFTER".to_owned()), unit: WaitUnit::Milliseconds });
    let headers = [("retry-after", "9000")];
    assert_eq!(read(ms.clone(), 429, &headers, ""), throttled(seconds(9)));
    assert_eq!(read(ms.clone(), 418, &headers, ""), Outcome::Busy { retry_after: seconds(9) });
    assert_eq!(read(ms, 503, &headers, ""), server_error(503, seconds(9)));
}

#[test]
fn reasons_are_short_tokens_not_the_body() {
    let table = [
        (r#"{"code":"card_declined","message":"4242424242424242"}"#, ": card_declined"),
        (r#"{"error":{"code":"expired_card","type":"card_error"}}"#, ": expired_card"),
        (r#"{"error":{"type":"card_error"}}"#, ": card_error"),
        (r#"{"error":"insufficient_funds"}"#, ": insufficient_funds"),
        (r#"{"type":"https://example.com/problem"}"#, ""),
        (r#"{"code":"05"}"#, ": 05"),
        (r#"{"code":"4242424242424242","type":"card_error"}"#, ": card_error"),
        (r#"{"code":"sk_live_abcdefghijkl","type":"card_error"}"#, ": card_error"),
        (r#"{"code":"has spaces and \u001b[31m"}"#, ""),
        (r#"{"code":17}"#, ""),
        (r#"{"message":"secret"}"#, ""),
        ("secret", ""),
    ];
    for (body, tail) in table {
        let reason = format!("provider answered 402{tail}");
        assert_eq!(read(&reading(402, body)), Outcome::Declined { reason }, "{body}");
    }
}

fn header(name: &str, value: Option<&str>, means: StatusMeaning) -> StatusCase {
    let header = HeaderCondition { name: name.to_owned(), value: value.map(str::to_owned) };
    StatusCase { header: Some(header), ..StatusCase::always(means) }
}

fn code(code: &str, at: Option<&str>, means: StatusMeaning) -> StatusCase {
    let code = CodeCondition { code: code.to_owned(), pointer: at.map(str::to_owned) };
    StatusCase { code: Some(code), ..StatusCase::always(means) }
}

/// What Stripe answers when a limit is its own, one object's, or a lock: <https://docs.stripe.com/rate-limits>.
#[test]
fn the_first_case_that_fits_counts() {
    use StatusMeaning as M;
    let cases = vec![
        header("Stripe-Rate-Limited-Reason", Some("resource-specific"), M::Busy),
        header("stripe-rate-limited-reason", None, M::Throttled),
        code("lock_timeout", Some("/error/code"), M::Busy),
        // Without a pointer: where codes usually stand.
        code("idempotency_key_in_use", None, M::InProgress),
        code("704", Some("/errorCode"), M::InProgress),
        code("too_many", Some("/error_codes"), M::Unavailable),
    ];
    let stripe = ResponseRules { statuses: [(429, cases)].into(), ..meanings(&[]) };
    let reason = "Stripe-Rate-Limited-Reason";
    let lock = r#"{"error":{"code":"lock_timeout","type":"invalid_request_error"}}"#;
    let table: [(Headers<'_>, &str, &str); 16] = [
        (&[], "", "throttled"),
        (&[], "not json", "throttled"),
        (&[], r#"{"error":{"code":"rate_limit"}}"#, "throttled"),
        (&[(reason, "resource-specific")], "", "busy"),
        (&[(reason, " Resource-Specific ")], "", "busy"),
        (&[(reason, "global-rate")], "", "throttled"),
        // The order of the cases decides, not that of the answer.
        (&[(reason, "global-rate")], lock, "throttled"),
        // Two values, of which one fits: it is unclear which one counts.
        (&[(reason, "global-rate"), (reason, "resource-specific")], lock, "unknown"),
        (&[], lock, "busy"),
        (&[], r#"{"code":"lock_timeout"}"#, "throttled"),
        (&[], r#"{"code":"idempotency_key_in_use"}"#, "in progress"),
        (&[], r#"{"error":{"type":"idempotency_key_in_use"}}"#, "in progress"),
        (&[], r#"{"errorCode":"704"}"#, "in progress"),
        (&[], r#"{"errorCode":704}"#, "in progress"),
        (&[], r#"{"error_codes":["other","too_many"]}"#, "unknown"),
        (&[], r#"{"error_codes":{"too_many":1}}"#, "throttled"),
    ];
    for (headers, body, meant) in table {
        let mut answer = reading(429, body);
        for (name, value) in headers {
            answer.headers.append(*name, value.parse().unwrap());
        }
        assert_eq!(code_of(&classify(&answer, &stripe, SystemTime::UNIX_EPOCH)), meant, "{headers:?} {body}");
        // The cases are those of their status alone.
        answer.status = 402;
        assert_eq!(code_of(&classify(&answer, &stripe, SystemTime::UNIX_EPOCH)), "declined", "{headers:?} {body}");
    }
}

#[test]
fn all_conditions_of_a_case_must_hold() {
    let case = StatusCase {
        code: code("704", Some("/errorCode"), StatusMeaning::InProgress).code,
        ..header("transient-error", Some("true"), StatusMeaning::InProgress)
    };
    let adyen = ResponseRules { statuses: [(422, vec![case])].into(), ..meanings(&[]) };
    for (transient, body, meant) in [
        (Some("true"), r#"{"errorCode":"704"}"#, "in progress"),
        (Some("false"), r#"{"errorCode":"704"}"#, "review"),
        (None, r#"{"errorCode":"704"}"#, "review"),
        (Some("true"), r#"{"errorCode":"130"}"#, "review"),
    ] {
        let mut answer = reading(422, body);
        if let Some(value) = transient {
            answer.headers.insert("transient-error", value.parse().unwrap());
        }
        assert_eq!(code_of(&classify(&answer, &adyen, SystemTime::UNIX_EPOCH)), meant, "{transient:?} {body}");
    }
}

#[test]
fn busy_response_keeps_its_wait() {
    let row = meanings(&[(429, StatusMeaning::Busy)]);
    let mut answer = reading(429, "");
    assert_eq!(classify(&answer, &row, SystemTime::UNIX_EPOCH), Outcome::Busy { retry_after: None });
    answer.headers.insert("retry-after", "9".parse().unwrap());
    let wait = Some(Duration::from_secs(9));
    assert_eq!(classify(&answer, &row, SystemTime::UNIX_EPOCH), Outcome::Busy { retry_after: wait });
}

/// A case that calls a success accepted needs no readable body; the default does.
#[test]
fn success_without_a_case_must_be_readable() {
    let row = ResponseRules {
        statuses: [(201, vec![header("x-queued", None, StatusMeaning::Accepted)])].into(),
        ..meanings(&[])
    };
    let mut answer = reading(201, "");
    assert_eq!(code_of(&classify(&answer, &row, SystemTime::UNIX_EPOCH)), "unknown");
    answer.headers.insert("x-queued", "1".parse().unwrap());
    assert_eq!(code_of(&classify(&answer, &row, SystemTime::UNIX_EPOCH)), "accepted");
}
