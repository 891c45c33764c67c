//! The contract's table of answers, row by row.

use super::*;

fn reading(status: u16, body: &str) -> Reading {
    Reading { status, headers: HeaderMap::new(), body: Body::Whole(body.as_bytes().to_vec()) }
}

fn meanings(statuses: &[(u16, StatusMeaning)]) -> Meanings {
    Meanings { statuses: statuses.iter().copied().collect(), reference_pointer: "/id".to_owned() }
}

fn read(reading: &Reading) -> Outcome {
    classify(reading, &meanings(&[]), SystemTime::UNIX_EPOCH)
}

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Accepted { .. } => "accepted",
        Outcome::Declined { .. } => "declined",
        Outcome::Throttled { .. } => "throttled",
        Outcome::Misconfigured { .. } => "misconfigured",
        Outcome::InProgress => "in progress",
        Outcome::Unknown { .. } => "unknown",
        Outcome::Rejected { .. } => "review",
        Outcome::NotSent { .. } => "not sent",
    }
}

#[test]
fn every_status_means_what_the_contract_says() {
    for status in 100..=999_u16 {
        let meant = match status {
            200..=299 => "accepted",
            402 => "declined",
            401 | 403 | 404 | 405 | 407 => "misconfigured",
            408 => "unknown",
            409 => "in progress",
            429 => "throttled",
            300..=499 => "review",
            _ => "unknown",
        };
        assert_eq!(word(&read(&reading(status, r#"{"id":"ch_1"}"#))), meant, "{status}");
    }
}

#[test]
fn a_success_must_be_readable() {
    let accepted = |reference: Option<&str>| Outcome::Accepted { reference: reference.map(str::to_owned) };
    let unreadable = Outcome::Unknown { cause: UnknownCause::UnreadableAnswer(200), retry_after: None };
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
    assert_eq!(read(&Reading { body: Body::TooLarge, ..reading(200, "") }), unreadable);
    let cause = UnknownCause::ConnectionLost;
    let broken = Reading { body: Body::Broken(cause), ..reading(200, "") };
    assert_eq!(read(&broken), Outcome::Unknown { cause, retry_after: None });
}

#[test]
fn other_answers_keep_their_meaning_without_a_body() {
    for body in [Body::TooLarge, Body::Broken(UnknownCause::Timeout)] {
        let outcome = read(&Reading { body, ..reading(402, "") });
        assert_eq!(outcome, Outcome::Declined { reason: "provider answered 402".to_owned() });
    }
}

#[test]
fn the_named_wait_goes_with_429_and_503_only() {
    let wait = Some(Duration::from_secs(9));
    let mut with_wait = reading(429, "");
    with_wait.headers.insert("retry-after", "9".parse().unwrap());
    assert_eq!(read(&with_wait), Outcome::Throttled { retry_after: wait });
    with_wait.status = 503;
    assert_eq!(read(&with_wait), server_error(503, wait));
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
        (429, "throttled"),
    ];
    for (status, meant) in table {
        assert_eq!(word(&classify(&reading(status, ""), &row, SystemTime::UNIX_EPOCH)), meant, "{status}");
    }
    let duplicate = classify(&reading(409, r#"{"id":"ch_9"}"#), &row, SystemTime::UNIX_EPOCH);
    assert_eq!(duplicate, Outcome::Accepted { reference: Some("ch_9".to_owned()) });
}

#[test]
fn the_reference_is_found_where_the_row_says() {
    let row = Meanings { reference_pointer: "/data/0/ref".to_owned(), ..meanings(&[]) };
    let answer = reading(200, r#"{"id":"no","data":[{"ref":"yes"}]}"#);
    let outcome = classify(&answer, &row, SystemTime::UNIX_EPOCH);
    assert_eq!(outcome, Outcome::Accepted { reference: Some("yes".to_owned()) });
}

#[test]
fn reasons_are_short_tokens_and_never_the_body() {
    let table = [
        (r#"{"code":"card_declined","message":"4242424242424242"}"#, ": card_declined"),
        (r#"{"error":{"code":"expired_card","type":"card_error"}}"#, ": expired_card"),
        (r#"{"error":{"type":"card_error"}}"#, ": card_error"),
        (r#"{"error":"insufficient_funds"}"#, ": insufficient_funds"),
        (r#"{"type":"https://example.com/problem"}"#, ""),
        (r#"{"code":"05"}"#, ": 05"),
        (r#"{"code":"4242424242424242","type":"card_error"}"#, ": card_error"),
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
