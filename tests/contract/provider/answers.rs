//! Malformed and endless answers: each yields one outcome after one request, with bounded memory and time.

use std::time::{Duration, Instant};

use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::domain::provider::Provider;

use super::raw::{RawServer, Then};
use super::{row, send_one, unknown};

const ACCEPTED: &str = r#"{"id":"ch_1"}"#;

fn accepted() -> Outcome {
    Outcome::Accepted { reference: Some("ch_1".to_owned()) }
}

/// Head, body, outcome, and the status that was read.
fn table() -> Vec<(&'static str, &'static [u8], Outcome, Option<u16>)> {
    let whole = ACCEPTED.as_bytes();
    let lost = unknown(UnknownCause::ConnectionLost);
    let bare = Outcome::Accepted { reference: None };
    let unreadable = |status| unknown(UnknownCause::UnreadableResponse(status));
    let failed = |status| unknown(UnknownCause::ServerError(status));
    let no_wait = Outcome::Throttled { retry_after: None };
    let wait = |seconds| Outcome::Throttled { retry_after: Some(Duration::from_secs(seconds)) };
    let review = |status: u16| Outcome::Rejected { reason: format!("provider answered {status}") };
    vec![
        // Lengths that contradict each other or the body.
        ("200 OK\r\ncontent-length: 13\r\ncontent-length: 2", whole, lost.clone(), None),
        ("200 OK\r\ncontent-length: -1", whole, lost.clone(), None),
        ("200 OK\r\ncontent-length: 99999999999999999999999", whole, lost.clone(), None),
        ("200 OK\r\ncontent-length: 18446744073709551615", whole, lost.clone(), None),
        ("200 OK\r\ncontent-length: 5", whole, unreadable(200), Some(200)),
        ("200 OK\r\ntransfer-encoding: chunked", b"zz\r\n", lost.clone(), Some(200)),
        ("200 OK\r\ntransfer-encoding: chunked", b"ffffffffffffffffff\r\nx", lost.clone(), Some(200)),
        ("200 OK\r\ntransfer-encoding: chunked", b"fffffffffffffff\r\n{}", lost.clone(), Some(200)),
        // Encodings that the request did not allow, and that the body does not have.
        ("200 OK\r\ncontent-encoding: gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03", unreadable(200), Some(200)),
        ("200 OK\r\ncontent-encoding: zip-of-death", whole, accepted(), Some(200)),
        ("200 OK\r\ncontent-type: text/html", b"<html>ok</html>", unreadable(200), Some(200)),
        ("200 OK", b"\xff\xfe{\0}\0", bare.clone(), Some(200)),
        ("200 OK", b"\xff\xfe\0\0", unreadable(200), Some(200)),
        ("200 OK", b"\xef\xbb\xbf {}\r\n", bare, Some(200)),
        ("200 OK", b"", unreadable(200), Some(200)),
        ("201 Created", whole, accepted(), Some(201)),
        ("201 Created", b"", unreadable(201), Some(201)),
        ("202 Accepted", whole, Outcome::InProgress { retry_after: None }, Some(202)),
        ("202 Accepted", b"", Outcome::InProgress { retry_after: None }, Some(202)),
        ("203 Non-Authoritative Information", whole, failed(203), Some(203)),
        ("204 No Content", b"", failed(204), Some(204)),
        ("206 Partial Content", whole, failed(206), Some(206)),
        ("207 Multi-Status", whole, failed(207), Some(207)),
        ("226 IM Used", whole, failed(226), Some(226)),
        // Statuses.
        ("101 Switching Protocols", b"", failed(101), Some(101)),
        ("302 Found\r\nlocation: \u{ff}http://[", b"", review(302), Some(302)),
        ("304 Not Modified", b"", review(304), Some(304)),
        ("418 I'm a teapot", b"short and stout", review(418), Some(418)),
        ("599 ?", b"", failed(599), Some(599)),
        ("999 ?", b"", failed(999), Some(999)),
        ("099 ?", whole, lost.clone(), None),
        ("1000 ?", whole, lost.clone(), None),
        ("two hundred", whole, lost.clone(), None),
        // Headers.
        ("200 OK\r\nno colon here", whole, lost.clone(), None),
        ("200 OK\r\nbad name: x", whole, lost.clone(), None),
        ("200 OK\r\nx-bytes: \u{ff}\u{fe}", whole, accepted(), Some(200)),
        ("429 Slow\r\nretry-after: soon", b"", wait(0), Some(429)),
        ("429 Slow\r\nretry-after: \u{663}", b"", wait(0), Some(429)),
        ("429 Slow\r\nretry-after:", b"", wait(0), Some(429)),
        ("429 Slow\r\nretry-after: 6.0", b"", wait(6), Some(429)),
        ("429 Slow\r\nretry-after: 6s\r\nretry-after: 2", b"", wait(6), Some(429)),
        ("429 Slow\r\nratelimit: limit=, r=99999999999999", b"", no_wait, Some(429)),
    ]
}

#[tokio::test]
async fn every_odd_response_has_one_outcome() {
    for (head, body, outcome, status) in table() {
        let bytes = [b"HTTP/1.1 ", head.as_bytes(), b"\r\n\r\n", body].concat();
        let server = RawServer::start(vec![Then::Raw(bytes)]).await;
        let answer = send_one(&row(&server.url())).await;
        assert_eq!((answer.outcome, answer.status), (outcome, status), "{head}");
        assert_eq!((server.requests().len(), server.connections()), (1, 1), "{head}");
    }
    for (bytes, outcome) in [
        (&b"HTTP/9.9 200 OK\r\ncontent-length: 13\r\n\r\n{\"id\":\"ch_1\"}"[..], None),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
        (b"HTTP/1.0 200 OK\r\n\r\n{\"id\":\"ch_1\"}", Some(accepted())),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\nHTTP/1.1 200 OK\r\n\r\n{\"id\":\"ch_1\"}", Some(accepted())),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"id\":\"ch_1\"}HTTP/1.1 402 No\r\n\r\n", Some(accepted())),
    ] {
        let server = RawServer::start(vec![Then::Raw(bytes.to_vec())]).await;
        let outcome = outcome.unwrap_or(unknown(UnknownCause::ConnectionLost));
        assert_eq!(send_one(&row(&server.url())).await.outcome, outcome, "{}", String::from_utf8_lossy(bytes));
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn redirect_to_another_host_is_not_followed() {
    for (status, meant) in [("301 Moved", 301), ("307 Temporary", 307), ("308 Permanent", 308)] {
        let other = RawServer::start(vec![Then::ok()]).await;
        let location = format!("location: {}\r\n", other.url());
        let server = RawServer::start(vec![Then::answer(status, &location, "")]).await;
        let answer = send_one(&row(&server.url())).await;
        assert_eq!(answer.outcome, Outcome::Rejected { reason: format!("provider answered {meant}") });
        assert_eq!((server.requests().len(), other.connections()), (1, 0));
    }
}

/// An endless answer ends at the total timeout, and only little of it is read.
#[tokio::test]
async fn endless_responses_end_at_the_timeout() {
    let second = Duration::from_secs(1);
    let at_once = Duration::ZERO;
    let ok: &[u8] = b"HTTP/1.1 200 OK\r\n";
    let (timeout, lost) = (unknown(UnknownCause::Timeout), unknown(UnknownCause::ConnectionLost));
    let too_large = unknown(UnknownCause::ResponseTooLarge(200));
    for (what, then, outcome, status) in [
        (
            "a byte a second",
            Then::Repeat(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b" ", second),
            &timeout,
            Some(200),
        ),
        ("a head of a byte a second", Then::Repeat(b"H", b"T", second), &timeout, None),
        ("informational answers", Then::Repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n", at_once), &timeout, None),
        ("header after header", Then::Repeat(ok, b"x-filler: 1\r\n", at_once), &too_large, Some(200)),
        ("one header", Then::Repeat(b"HTTP/1.1 200 OK\r\nx: ", &[b'x'; 16_384], at_once), &too_large, Some(200)),
        ("a status line", Then::Repeat(b"HTTP/1.1 200 ", &[b'x'; 16_384], at_once), &too_large, Some(200)),
        (
            "chunk extensions",
            Then::Repeat(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", &[b'x'; 16_384], at_once),
            &lost,
            Some(200),
        ),
        (
            "chunks of one byte",
            Then::Repeat(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", at_once),
            &too_large,
            Some(200),
        ),
    ] {
        let server = RawServer::start(vec![then]).await;
        let started = Instant::now();
        let answer = send_one(&Provider { timeout: 3 * second, ..row(&server.url()) }).await;
        assert!(started.elapsed() < Duration::from_secs(30), "{what}: {:?}", started.elapsed());
        let expected = (outcome.clone(), status);
        // A slow machine may reach the timeout before any bound.
        assert!((answer.outcome.clone(), answer.status) == expected || answer.outcome == timeout, "{what}: {answer:?}");
        assert_eq!((server.requests().len(), server.connections()), (1, 1), "{what}");
        let written = server.flooded().await;
        assert!(written < 32 * 1024 * 1024, "{what}: {written} bytes");
    }
}
