//! Answers with contradictory values where one is needed: their outcome is unknown, even if one of the values would be
//! convenient.

use std::time::Duration;

use sluicegate::domain::outcome::{LookupResult, Outcome, UnknownCause};
use sluicegate::domain::provider::{LookupConfig, LookupMethod, LookupUrl, Provider, WhenNotFound};
use sluicegate::domain::response::{CodeCondition, Echo, HeaderCondition, StatusCase, StatusMeaning, SumFields};
use sluicegate::provider::PaymentProvider as _;

use super::raw::{RawServer, Then};
use super::{SUM, job, provider, row, send_one, unknown};

fn unreadable(status: u16) -> Outcome {
    unknown(UnknownCause::UnreadableResponse(status))
}

fn accepted() -> Outcome {
    Outcome::Accepted { reference: Some("ch_1".to_owned()) }
}

fn case(header: Option<(&str, &str)>, code: Option<&str>, means: StatusMeaning) -> StatusCase {
    let header = header.map(|(name, value)| HeaderCondition { name: name.to_owned(), value: Some(value.to_owned()) });
    let code = code.map(|code| CodeCondition { code: code.to_owned(), pointer: Some("/result/code".to_owned()) });
    StatusCase { header, code, means }
}

/// A row that reads codes of 200 and 402, and a header of 400.
fn reads_codes(url: &str) -> Provider {
    let codes = || {
        vec![
            case(None, Some("declined"), StatusMeaning::Declined),
            case(None, Some("busy"), StatusMeaning::Busy),
            case(None, Some("done"), StatusMeaning::Accepted),
        ]
    };
    let retry = vec![case(Some(("x-final", "yes")), None, StatusMeaning::Declined)];
    Provider { statuses: [(200, codes()), (402, codes()), (400, retry)].into(), ..row(url) }
}

/// The outcome of the only answer.
async fn outcome(row: impl Fn(&str) -> Provider, answer: Then) -> Outcome {
    let server = RawServer::start(vec![answer]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!((server.requests().len(), server.connections()), (1, 1));
    answer.outcome
}

#[tokio::test]
async fn duplicate_required_key_is_unknown() {
    for body in [
        r#"{"id":"ch_1","id":"ch_2"}"#,
        r#"{"id":"ch_1","id":"ch_1"}"#,
        r#"{"id":"ch_1","\u0069d":"ch_2"}"#,
        r#"{"id":null,"id":"ch_1"}"#,
    ] {
        assert_eq!(outcome(row, Then::answer("200 OK", "", body)).await, unreadable(200), "{body}");
    }
    let twice = [
        r#"{"id":"ch_1","result":{"code":"done","code":"declined"}}"#,
        r#"{"id":"ch_1","result":{"code":"declined","code":"done"}}"#,
        r#"{"id":"ch_1","result":{"code":"declined"},"result":{"code":"done"}}"#,
        r#"{"id":"ch_1","result":{},"result":{"code":"other"}}"#,
    ];
    for body in twice {
        for (status, read) in [("200 OK", 200), ("402 No", 402)] {
            assert_eq!(outcome(reads_codes, Then::answer(status, "", body)).await, unreadable(read), "{status} {body}");
        }
    }
    let twice = Then::answer("400 No", "x-final: yes\r\nx-final: no\r\n", "{}");
    assert_eq!(outcome(reads_codes, twice).await, unreadable(400));
}

#[tokio::test]
async fn duplicate_unused_keys_are_allowed() {
    for body in [
        r#"{"note":1,"note":2,"id":"ch_1"}"#,
        r#"{"id":"ch_1","more":{"id":"a","id":"b"}}"#,
        r#"{"id":"ch_1","more":[{"x":1,"x":2}],"more":2}"#,
    ] {
        assert_eq!(outcome(row, Then::answer("200 OK", "", body)).await, accepted(), "{body}");
    }
    // The status alone decides here.
    for (status, means) in [("402 No", "declined"), ("429 Slow", "throttled")] {
        let found = outcome(row, Then::answer(status, "", r#"{"code":"a","code":"b","id":1,"id":2}"#)).await;
        match found {
            Outcome::Declined { reason } => assert_eq!((reason.as_str(), means), ("provider answered 402", "declined")),
            Outcome::Throttled { .. } => assert_eq!(means, "throttled"),
            other => panic!("{status}: {other:?}"),
        }
    }
    let same = Then::answer("400 No", "x-final: yes\r\nx-final: YES\r\n", "{}");
    assert!(matches!(outcome(reads_codes, same).await, Outcome::Declined { .. }));
}

/// One of the two lengths ends inside the next answer, so the connection cannot be reused.
#[tokio::test]
async fn conflicting_lengths_are_unknown_and_close_connection() {
    let body = r#"{"id":"ch_1"}"#;
    for lengths in [
        "content-length: 13\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 13",
        "transfer-encoding: chunked\r\ncontent-length: 24",
        "transfer-encoding: identity\r\ncontent-length: 13",
    ] {
        for (status, read) in [("200 OK", 200), ("402 No", 402), ("409 Conflict", 409)] {
            let head = format!("HTTP/1.1 {status}\r\n{lengths}\r\n\r\n");
            let bytes = format!("{head}d\r\n{body}\r\n0\r\n\r\n").into_bytes();
            let server = RawServer::start(vec![Then::Answer(bytes)]).await;
            let provider = provider(&row(&server.url()));
            for connections in 1..=2 {
                let frozen = provider.freeze(&job("pay-1"), SUM).await.unwrap();
                let answer = provider.send(&job("pay-1"), &frozen).await;
                assert_eq!((answer.outcome, answer.status), (unreadable(read), Some(read)), "{head}");
                assert_eq!((server.requests().len(), server.connections()), (connections, connections), "{head}");
            }
        }
    }
    let chunked = Then::Answer(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nd\r\n{\"id\":\"ch_1\"}\r\n0\r\n\r\n".to_vec(),
    );
    assert_eq!(outcome(row, chunked).await, accepted());
    // The same length twice is one length, see <https://www.rfc-editor.org/rfc/rfc9110#section-8.6>.
    assert_eq!(outcome(row, Then::answer("200 OK", "content-length: 13\r\n", body)).await, accepted());
}

#[tokio::test]
async fn wrong_content_encoding_is_unknown() {
    let body = r#"{"id":"ch_1"}"#;
    for label in ["gzip", "GZip", "x-gzip", "deflate", "br", "zstd", "compress", "identity, gzip", "gzip, identity"] {
        let answer = Then::answer("200 OK", &format!("content-encoding: {label}\r\n"), body);
        assert_eq!(outcome(row, answer).await, unreadable(200), "{label}");
    }
    let split = Then::answer("200 OK", "content-encoding: identity\r\ncontent-encoding: gzip\r\n", body);
    assert_eq!(outcome(row, split).await, unreadable(200));
    let framed = b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\nd\r\n{\"id\":\"ch_1\"}\r\n0\r\n\r\n";
    assert_eq!(outcome(row, Then::Answer(framed.to_vec())).await, unreadable(200));
    // Labels that browsers ignore too.
    for label in ["identity", "utf-8", "none", ""] {
        let answer = Then::answer("200 OK", &format!("content-encoding: {label}\r\n"), body);
        assert_eq!(outcome(row, answer).await, accepted(), "{label}");
    }
}

#[tokio::test]
async fn ambiguous_lookup_response_is_unknown() {
    let found = async |answer: Then| {
        let server = RawServer::start(vec![answer]).await;
        let lookup = LookupConfig {
            url: LookupUrl::parse(&format!("{}charges?id=${{job:id}}", server.url())).unwrap(),
            method: LookupMethod::Get,
            state: "/state".to_owned(),
            accepted: vec!["paid".to_owned()],
            declined: vec!["failed".to_owned()],
            in_progress: vec!["open".to_owned()],
            reference: "/id".to_owned(),
            sum: SumFields {
                amount: Some("/amount".to_owned()),
                currency: Some("/currency".to_owned()),
                ..SumFields::default()
            },
            echo: Echo::default(),
            not_found: WhenNotFound::Resend,
            give_up_after: Duration::from_secs(60),
        };
        let provider = provider(&Provider { lookup: Some(lookup), ..row(&server.url()) });
        provider.look_up(&provider.lookup_request(&job("pay-1"), SUM).unwrap()).await.outcome
    };
    let unreadable =
        |status| LookupResult::Unknown { cause: UnknownCause::UnreadableResponse(status), retry_after: None };
    let whole = r#"{"state":"paid","id":"ch_1","amount":1299,"currency":"EUR"#;
    for body in [
        format!(r#"{whole}","state":"failed"}}"#),
        format!(r#"{whole}","amount":1}}"#),
        format!(r#"{whole}","currency":"USD"}}"#),
        format!(r#"{whole}","id":"ch_2"}}"#),
    ] {
        assert_eq!(found(Then::answer("200 OK", "", &body)).await, unreadable(200), "{body}");
    }
    let plain = format!("{whole}\"}}");
    let gzip = Then::answer("200 OK", "content-encoding: gzip\r\n", &plain);
    assert_eq!(found(gzip).await, unreadable(200));
    // `not found` would cause a second charge.
    for (status, read) in [("200 OK", 200), ("404 Not Found", 404)] {
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n");
        let bytes = format!("{head}{:x}\r\n{plain}\r\n0\r\n\r\n", plain.len()).into_bytes();
        assert_eq!(found(Then::Answer(bytes)).await, unreadable(read), "{head}");
    }
    let accepted = LookupResult::Accepted { reference: Some("ch_1".to_owned()) };
    assert_eq!(found(Then::answer("200 OK", "", &format!(r#"{whole}","note":1,"note":2}}"#))).await, accepted);
}
