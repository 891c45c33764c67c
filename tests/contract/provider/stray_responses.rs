//! Stray second answers of a provider or its gateway on a kept-alive connection: they decide no other payment.

use std::time::Duration;

use sluicegate::domain::job::Job;
use sluicegate::domain::outcome::{LookupResult, Outcome, UnknownCause};
use sluicegate::domain::provider::{LookupConfig, Provider, RequestShape};
use sluicegate::domain::response::{
    Echo, EchoField, EchoedField, ResponseLocation, StatusCase, StatusMeaning, SumFields,
};
use sluicegate::domain::unconfirmed::ConnectionEvidence;
use sluicegate::provider::{PaymentProvider as _, RequestResult};
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::raw::{RawServer, Then};
use super::{SUM, charge, fake, job, provider, row, unknown};
use crate::support::doubling::{DoublingServer, Stray, answer_to, is_accepted};

const PAYMENTS: usize = 400;

/// Number of outcomes that belong to another payment, and of unknown outcomes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    wrong: usize,
    unknown: usize,
}

async fn count(server: &DoublingServer, stray: Stray, row: &Provider) -> Count {
    let provider = provider(row);
    let mut count = Count::default();
    for number in 0..PAYMENTS {
        match charge(&provider, &job(&format!("pay-{number}"))).await.outcome {
            Outcome::Accepted { reference } => {
                let is_right = is_accepted(number) && reference == Some(format!("ch_{number}"));
                count.wrong += usize::from(!is_right);
            }
            Outcome::Declined { .. } => count.wrong += usize::from(is_accepted(number)),
            Outcome::Unknown { .. } => count.unknown += 1,
            other => panic!("{other:?}"),
        }
        if stray == Stray::OnCall {
            server.send_again();
        }
    }
    count
}

fn echo(field: EchoField, place: ResponseLocation) -> Echo {
    Echo { fields: vec![EchoedField { field, locations: vec![place] }], exempt_statuses: [].into() }
}

fn with_echo(row: Provider, echo: Echo) -> Provider {
    Provider { request: RequestShape { echo, ..RequestShape::default() }, ..row }
}

#[tokio::test]
async fn stray_response_before_request_closes_connection() {
    for stray in [Stray::Glued, Stray::OnCall] {
        let server = DoublingServer::start(stray).await;
        let count = count(&server, stray, &row(&server.url)).await;
        assert_eq!((count, server.connections()), (Count::default(), PAYMENTS), "{stray:?}");
    }
}

/// The arrival time alone cannot distinguish such an answer from the right one.
#[tokio::test]
async fn echo_detects_an_overtaking_stray_response() {
    let places = [
        (EchoField::Id, ResponseLocation::Body("/order/id".to_owned())),
        (EchoField::IdempotencyKey, ResponseLocation::Header("X-Key".to_owned())),
    ];
    for (field, place) in places {
        let server = DoublingServer::start(Stray::Overtaking).await;
        let row = with_echo(row(&server.url), echo(field, place));
        let count = count(&server, Stray::Overtaking, &row).await;
        // Each connection serves one payment, and is closed after the stray answer to the next one.
        assert_eq!(count, Count { wrong: 0, unknown: PAYMENTS / 2 }, "{field:?}");
        assert_eq!(server.connections(), PAYMENTS / 2, "{field:?}");
    }
}

#[tokio::test]
async fn single_use_connections_receive_no_stray_response() {
    for stray in [Stray::Glued, Stray::Overtaking] {
        let server = DoublingServer::start(stray).await;
        let single = Provider { reuse_connections: Some(false), ..row(&server.url) };
        let count = count(&server, stray, &single).await;
        assert_eq!((count, server.connections()), (Count::default(), PAYMENTS), "{stray:?}");
    }
}

/// A used connection may deliver a response to an earlier request. So a refusal on it does not prove that nothing was
/// charged: its slot is held, and the connection is read and takes no other request.
#[tokio::test]
async fn refusal_on_a_used_connection_is_unconfirmed() {
    for (status, code) in [
        (429, "throttled"),
        (401, "misconfigured"),
        (404, "misconfigured"),
        (405, "misconfigured"),
        (423, "busy"),
        (400, "rejected"),
        (422, "rejected"),
    ] {
        let refusal = |order: &str| {
            Then::answer(&format!("{status} No"), "retry-after: 7\r\n", &format!(r#"{{"order":"{order}"}}"#))
        };
        for has_echo in [false, true] {
            let script = vec![Then::answer("200 OK", "", r#"{"order":"pay-0"}"#), refusal("pay-1"), Then::ok()];
            let script = if has_echo { script } else { vec![Then::ok(), refusal(""), refusal("")] };
            let server = RawServer::start(script).await;
            let statuses = [(423, vec![StatusCase::always(StatusMeaning::Busy)])].into();
            let row = Provider { statuses, ..row(&server.url()) };
            let by_order = echo(EchoField::Id, ResponseLocation::Body("/order".to_owned()));
            let provider = provider(&if has_echo { with_echo(row, by_order) } else { row });
            charge(&provider, &job("pay-0")).await;
            let RequestResult { outcome, watch, .. } = charge(&provider, &job("pay-1")).await;
            if has_echo {
                assert!(outcome.code() == code && watch.is_none(), "{outcome:?}");
                continue;
            }
            assert_eq!(outcome.code(), if code == "rejected" { code } else { "unknown" }, "{outcome:?}");
            assert!(watch.is_some(), "{outcome:?}");
            // The connection is not for others, whether it is watched or not.
            let next = charge(&provider, &job("pay-2")).await;
            assert_eq!((next.outcome.code(), server.connections()), (code, 2), "{:?}", next.outcome);
            assert!(next.watch.is_none(), "the first response of a connection is certain");
        }
    }
}

/// What follows a refusal on its connection: nothing, the own response at once or late, or the end.
#[tokio::test]
async fn other_response_after_a_refusal_is_noticed() {
    const REFUSAL: &[u8] = b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    const CLOSING: &[u8] = b"HTTP/1.1 429 Slow\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let own = answer_to(0);
    for (refusal, later, evidence) in [
        (REFUSAL, None, ConnectionEvidence::Silence),
        (CLOSING, None, ConnectionEvidence::Silence),
        (REFUSAL, Some(&b""[..]), ConnectionEvidence::Silence),
        (REFUSAL, Some(&own[..]), ConnectionEvidence::OtherResponse),
        (REFUSAL, Some(REFUSAL), ConnectionEvidence::OtherResponse),
        (REFUSAL, Some(b"HT"), ConnectionEvidence::OtherResponse),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let provider = provider(&row(&format!("http://{}/", listener.local_addr().unwrap())));
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            for answer in [&own[..], refusal] {
                assert!(stream.read(&mut [0; 4_096]).await.unwrap() > 0);
                stream.write_all(answer).await.unwrap();
            }
            stream
        };
        let charges = async {
            charge(&provider, &job("pay-0")).await;
            charge(&provider, &job("pay-1")).await
        };
        let (answer, mut stream) = tokio::join!(charges, serve);
        assert!(matches!(answer.outcome, Outcome::Unconfirmed { status: 429, .. }), "{:?}", answer.outcome);
        let watch = answer.watch.unwrap();
        let deadline = Instant::now() + Duration::from_millis(if later.is_some() { 10_000 } else { 100 });
        let watched = tokio::spawn(watch.evidence_until(deadline));
        match later {
            // An empty one is the end of the connection.
            Some(b"") => drop(stream),
            Some(bytes) => stream.write_all(bytes).await.unwrap(),
            None => {}
        }
        assert_eq!(watched.await.unwrap(), evidence, "{later:?}");
    }
}

#[tokio::test]
async fn refusal_without_echoed_field_is_unconfirmed() {
    let server = RawServer::start(vec![
        Then::answer("200 OK", "", r#"{"order":"pay-0"}"#),
        Then::answer("429 Slow", "retry-after: 7\r\n", "{}"),
    ])
    .await;
    let row = with_echo(row(&server.url()), echo(EchoField::Id, ResponseLocation::Body("/order".to_owned())));
    let provider = provider(&row);
    let codes = [charge(&provider, &job("pay-0")).await, charge(&provider, &job("pay-1")).await]
        .map(|answer| answer.outcome.code());
    assert_eq!(codes, ["accepted", "unknown"]);
}

/// Two answers on a used connection: one of them may be a second answer to the earlier payment.
#[tokio::test]
async fn two_answers_on_a_used_connection_are_unknown() {
    let body = r#"{"id":"ch_1"}"#;
    let twice = format!("HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{body}HTTP/1.1 402 No\r\n\r\n").into_bytes();
    let server = RawServer::start(vec![Then::ok(), Then::Answer(twice), Then::ok()]).await;
    let provider = provider(&row(&server.url()));
    let accepted = Outcome::Accepted { reference: Some("ch_1".to_owned()) };
    for outcome in [accepted.clone(), unknown(UnknownCause::UnreadableResponse(200)), accepted] {
        assert_eq!(charge(&provider, &job("pay-1")).await.outcome, outcome);
    }
    assert_eq!((server.requests().len(), server.connections()), (3, 2));
}

/// The outcome of a request of 900 KB to which the server sends `answer` after the first bytes.
async fn outcome_of_early_response(answer: &[u8]) -> Outcome {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // Small segments and a small buffer: more than half a megabyte stays in the client.
    SockRef::from(&listener).set_tcp_mss(536).unwrap();
    SockRef::from(&listener).set_recv_buffer_size(4_096).unwrap();
    let row = row(&format!("http://{}/", listener.local_addr().unwrap()));
    let provider = provider(&row);
    let payload = format!(r#"{{"x":"{}"}}"#, "x".repeat(900_000));
    let large = Job { payload: Some(payload.into()), ..job("pay-1") };
    let ending = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 100]).await.unwrap();
        stream.write_all(answer).await.unwrap();
        stream
    };
    let (answer, _stream) = tokio::join!(charge(&provider, &large), ending);
    answer.outcome
}

/// Bytes that arrive while a large request is being written are no answer to it.
#[tokio::test]
async fn an_answer_to_half_a_request_is_unknown() {
    assert_eq!(outcome_of_early_response(&answer_to(0)).await, unknown(UnknownCause::ConnectionLost));
}

/// A server may refuse after the head alone. On a new connection the refusal can concern no other request.
#[tokio::test]
async fn early_refusal_on_a_new_connection_is_read() {
    let refusal = b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    let wait = Some(Duration::from_secs(7));
    assert_eq!(outcome_of_early_response(refusal).await, Outcome::Throttled { retry_after: wait });
}

#[tokio::test]
async fn echo_distinguishes_lookups() {
    let state =
        |id: &str| Then::answer("200 OK", "", &format!(r#"{{"state":"succeeded","id":"ch_1","order":"{id}"}}"#));
    let server = RawServer::start(vec![state("pay-1"), state("pay-1"), state("pay-2")]).await;
    let lookup = LookupConfig {
        echo: echo(EchoField::Id, ResponseLocation::Body("/order".to_owned())),
        sum: SumFields::default(),
        ..fake::lookup(&server.url())
    };
    let provider = provider(&Provider { lookup: Some(lookup), ..row(&server.url()) });
    let accepted = LookupResult::Accepted { reference: Some("ch_1".to_owned()) };
    let unknown = LookupResult::Unknown { cause: UnknownCause::NotEchoed(200), retry_after: None };
    for (id, finding) in [("pay-1", accepted.clone()), ("pay-2", unknown), ("pay-2", accepted)] {
        assert_eq!(provider.look_up(&provider.lookup_request(&job(id), SUM).unwrap()).await.outcome, finding, "{id}");
    }
    assert_eq!(server.connections(), 2);
}
