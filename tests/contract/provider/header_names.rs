//! The spelling of header names, as a raw server reads them.

use std::collections::BTreeMap;

use sluicegate::domain::provider::{Provider, RequestShape};

use super::raw::{RawServer, Then};
use super::{charge, job, provider, row};

/// Names of a request's headers, as they were sent.
fn header_names(request: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(request);
    let head = text.split("\r\n\r\n").next().unwrap();
    let mut names: Vec<String> = head.lines().skip(1).map(|line| line.split(':').next().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Some servers compare header names with regard to case, and would not deduplicate by another spelling.
#[tokio::test]
async fn header_names_are_in_title_case_or_as_the_row_spells() {
    let usual = ["Accept", "Accept-Encoding", "Content-Length", "Content-Type", "Host", "User-Agent"];
    let of_row = ["authorization", "X-API-Key", "Prefer"].map(|name| (name.to_owned(), "one".to_owned()));
    for (key_header, headers, added) in [
        (None, BTreeMap::new(), vec!["Idempotency-Key"]),
        (Some("PayPal-Request-Id"), of_row.into(), vec!["PayPal-Request-Id", "Prefer", "X-API-Key", "authorization"]),
    ] {
        let server = RawServer::start(vec![Then::ok()]).await;
        let request = RequestShape { key_header: key_header.map(str::to_owned), ..RequestShape::default() };
        let provider = provider(&Provider { request, headers, ..row(&server.url()) });
        // The second request is on the same connection.
        for id in ["pay-1", "pay-2"] {
            charge(&provider, &job(id)).await;
        }
        let mut wanted = [usual.to_vec(), added].concat();
        wanted.sort_unstable();
        assert_eq!(server.connections(), 1);
        for request in server.requests() {
            assert_eq!(header_names(&request), wanted);
        }
    }
}
