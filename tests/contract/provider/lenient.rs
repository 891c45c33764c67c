//! Answers of servers that take liberties: compressed unasked, with folded or many headers, or large. What lies beyond the
//! bounds proves nothing, except by a status that refuses the request as such.

use std::io::Write as _;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use sluicegate::domain::outcome::Outcome;
use sluicegate::domain::provider::Provider;
use sluicegate::domain::response::{CodeCondition, StatusCase, StatusMeaning};

use super::raw::{RawServer, Then};
use super::{row, send_one};

const PAID: &str = r#"{"id":"ch_1"}"#;
const BEYOND: &str = "more than 256 headers or 256 KiB";

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// A JSON object of this many bytes with the id of a payment.
fn paid_in(bytes: usize) -> String {
    let empty = r#"{"id":"ch_1","note":""}"#;
    format!(r#"{{"id":"ch_1","note":"{}"}}"#, "x".repeat(bytes - empty.len()))
}

fn answer(status: u16, headers: &str, body: &[u8]) -> Then {
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
    Then::Answer([head.as_bytes(), body].concat())
}

/// Code and detail of the only answer, with the status that was read.
async fn read(row: impl Fn(&str) -> Provider, then: Then) -> (&'static str, String, Option<u16>) {
    let server = RawServer::start(vec![then]).await;
    let answer = send_one(&row(&server.url())).await;
    assert_eq!((server.requests().len(), server.connections()), (1, 1));
    (answer.outcome.code(), answer.outcome.detail(), answer.status)
}

#[tokio::test]
async fn unasked_gzip_is_read_within_the_bounds() {
    let (gz, cut) = (gzip(PAID.as_bytes()), &gzip(PAID.as_bytes())[..20]);
    let twice = gzip(&gz);
    let damaged = [&gz[..gz.len() - 8], &[0; 8]].concat();
    let followed = [&gz[..], b"more"].concat();
    let members = [gzip(br#"{"id":"#), gzip(br#""ch_1"}"#)].concat();
    let (at_bound, bomb) = (gzip(paid_in(256 * 1024).as_bytes()), gzip(paid_in(256 * 1024 + 1).as_bytes()));
    let unreadable = "provider answered 200 with a body that cannot be read";
    for (label, body, code, detail) in [
        ("gzip", &gz[..], "accepted", ""),
        ("X-GZip", &gz, "accepted", ""),
        ("identity, gzip", &gz, "accepted", ""),
        ("gzip", &members, "accepted", ""),
        ("gzip", &at_bound, "accepted", ""),
        ("gzip", &bomb, "unknown", BEYOND),
        ("gzip", cut, "unknown", unreadable),
        ("gzip", &damaged, "unknown", unreadable),
        ("gzip", &followed, "unknown", unreadable),
        ("gzip", PAID.as_bytes(), "unknown", unreadable),
        ("gzip", b"", "unknown", unreadable),
        ("gzip, gzip", &twice, "unknown", unreadable),
        ("deflate", &gz, "unknown", unreadable),
        ("br", PAID.as_bytes(), "unknown", unreadable),
    ] {
        let found = read(row, answer(200, &format!("content-encoding: {label}\r\n"), body)).await;
        assert_eq!((found.0, found.2), (code, Some(200)), "{label} {}", found.1);
        assert!(found.1.contains(detail), "{label} {}", found.1);
    }
    let server = RawServer::start(vec![Then::ok()]).await;
    send_one(&row(&server.url())).await;
    let request = String::from_utf8(server.requests().remove(0)).unwrap();
    assert!(request.contains("\r\nAccept-Encoding: identity\r\n"), "{request}");
}

#[tokio::test]
async fn folded_and_many_headers_and_large_bodies_are_read() {
    let many = "x-filler: 1\r\n".repeat(255);
    for (headers, body) in
        [("x-folded: a\r\n b\r\n\tc\r\n", PAID.to_owned()), (many.as_str(), PAID.to_owned()), ("", paid_in(256 * 1024))]
    {
        let found = read(row, answer(200, headers, body.as_bytes())).await;
        assert_eq!((found.0, found.1.as_str(), found.2), ("accepted", "", Some(200)));
    }
    let server = RawServer::start(vec![answer(429, "retry-after:\r\n 7\r\n", b"")]).await;
    let wait = Some(Duration::from_secs(7));
    assert_eq!(send_one(&row(&server.url())).await.outcome, Outcome::Throttled { retry_after: wait });
}

#[tokio::test]
async fn beyond_the_bounds_only_refusals_count() {
    let many = "x-filler: 1\r\n".repeat(300);
    let long = format!("x-filler: {}\r\n", "x".repeat(500 * 1024));
    let large = paid_in(256 * 1024 + 1);
    for (headers, body) in [(many.as_str(), PAID), (long.as_str(), PAID), ("", large.as_str())] {
        for (status, code) in [
            (200, "unknown"),
            (202, "unknown"),
            (302, "unknown"),
            (400, "unknown"),
            (401, "misconfigured"),
            (402, "unknown"),
            (403, "misconfigured"),
            (409, "unknown"),
            (429, "throttled"),
        ] {
            let (found, detail, read_status) = read(row, answer(status, headers, body.as_bytes())).await;
            assert_eq!((found, read_status), (code, Some(status)), "{status} {detail}");
            assert!(found != "unknown" || detail.contains(BEYOND), "{status} {detail}");
        }
    }
}

/// The row says that the code decides, and the code may be in the part that was not read.
#[tokio::test]
async fn unread_code_leaves_the_outcome_unknown() {
    let by_code = |url: &str| {
        let code = Some(CodeCondition { code: "locked".to_owned(), pointer: None });
        let cases = || {
            let locked = StatusCase { code: code.clone(), ..StatusCase::always(StatusMeaning::Busy) };
            vec![locked, StatusCase::always(StatusMeaning::Throttled)]
        };
        Provider { statuses: [(429, cases())].into(), ..row(url) }
    };
    let large = paid_in(256 * 1024 + 1);
    assert_eq!(read(by_code, answer(429, "", PAID.as_bytes())).await.0, "throttled");
    for (headers, body) in [("", large.as_bytes()), ("content-encoding: br\r\n", b"{}")] {
        assert_eq!(read(by_code, answer(429, headers, body)).await.0, "unknown");
    }
    let cut = Then::Raw(b"HTTP/1.1 402 No\r\ncontent-length: 99\r\n\r\n{\"code\":\"x\"".to_vec());
    assert_eq!(read(row, cut).await.0, "unknown");
}
