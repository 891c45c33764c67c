//! Stray second answers of a provider or its gateway on a kept-alive connection: they decide no other payment.

use std::time::Duration;

use sluicegate::domain::job::Job;
use sluicegate::domain::outcome::{LookupResult, Outcome, Transmission, UnknownCause};
use sluicegate::domain::provider::{LookupConfig, Provider, RequestShape};
use sluicegate::domain::response::{
    Echo, EchoField, EchoedField, ResponseLocation, StatusCase, StatusMeaning, SumFields,
};
use sluicegate::provider::PaymentProvider as _;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

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

/// A used connection may deliver a copy of an earlier response. So a refusal on it does not prove that nothing was
/// charged.
#[tokio::test]
async fn refusal_on_a_used_connection_is_unknown() {
    let by_order = || echo(EchoField::Id, ResponseLocation::Body("/order".to_owned()));
    for (status, code) in
        [(429, "throttled"), (401, "misconfigured"), (404, "misconfigured"), (405, "misconfigured"), (423, "busy")]
    {
        let refusal = |order: &str| {
            Then::answer(&format!("{status} No"), "retry-after: 7\r\n", &format!(r#"{{"order":"{order}"}}"#))
        };
        for has_echo in [false, true] {
            let script = vec![Then::answer("200 OK", "", r#"{"order":"pay-0"}"#), refusal("pay-1"), Then::ok()];
            let script = if has_echo { script } else { vec![Then::ok(), refusal(""), refusal("")] };
            let server = RawServer::start(script).await;
            let statuses = [(423, vec![StatusCase::always(StatusMeaning::Busy)])].into();
            let row = Provider { statuses, ..row(&server.url()) };
            let provider = provider(&if has_echo { with_echo(row, by_order()) } else { row });
            charge(&provider, &job("pay-0")).await;
            let outcome = charge(&provider, &job("pay-1")).await.outcome;
            assert_eq!(outcome.code(), if has_echo { code } else { "unknown" }, "{outcome:?}");
            if !has_echo {
                assert_eq!(outcome.transmission(), Transmission::NoResponse, "{outcome:?}");
                // A refusal may have a copy too, so its connection serves no other payment.
                let next = charge(&provider, &job("pay-2")).await.outcome;
                assert_eq!((next.code(), server.connections()), (code, 2), "{next:?}");
            }
        }
    }
}

#[tokio::test]
async fn refusal_without_echoed_field_is_unknown() {
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
    let large = Job { payload: Some(payload), ..job("pay-1") };
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
