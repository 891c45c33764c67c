//! Reuse of connections: as long as the provider's keep-alive allows, and not where a lost connection would cost a
//! manual review.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::domain::provider::Provider;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::raw::{RawServer, Then};
use super::{charge, job, provider, row, unknown};

async fn outcomes(row: &Provider, payments: usize) -> Vec<Outcome> {
    let provider = provider(row);
    let mut outcomes = Vec::new();
    for number in 0..payments {
        outcomes.push(charge(&provider, &job(&format!("pay-{number}"))).await.outcome);
    }
    outcomes
}

/// A server that promises keep-alive, answers one request per connection, and closes it when the next one arrives, as
/// if its idle timeout ended just then. It counts connections.
async fn impatient_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4_096]).await;
                let Then::Answer(answer) = Then::ok() else { unreachable!() };
                let _ = stream.write_all(&answer).await;
                let _ = stream.read(&mut [0; 4_096]).await;
            });
        }
    });
    (url, connections)
}

#[tokio::test]
async fn idle_connection_close_causes_no_review() {
    let (url, connections) = impatient_server().await;
    let accepted = Outcome::Accepted { reference: Some("ch_1".to_owned()) };
    let forgetful = Provider { idempotency_retention: None, ..row(&url) };
    assert_eq!(outcomes(&forgetful, 20).await, vec![accepted.clone(); 20]);
    assert_eq!(connections.load(Ordering::SeqCst), 20);
    // A look-up does not allow reuse: after a stray 429 the charge would be sent again, and the provider would not
    // deduplicate it.
    let asked = Provider { lookup: Some(super::fake::lookup(&url)), ..forgetful.clone() };
    assert_eq!(outcomes(&asked, 2).await, vec![accepted.clone(); 2]);
    // A setting in the row takes precedence.
    let reusing = Provider { reuse_connections: Some(true), ..forgetful };
    assert_eq!(outcomes(&reusing, 2).await, [accepted.clone(), unknown(UnknownCause::ConnectionLost)]);
    let single = Provider { reuse_connections: Some(false), ..row(&url) };
    assert_eq!(outcomes(&single, 2).await, vec![accepted; 2]);
}

#[tokio::test]
async fn single_use_connections_send_connection_close() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let single = Provider { reuse_connections: Some(false), ..row(&server.url()) };
    outcomes(&single, 2).await;
    let requests = server.requests().into_iter().map(|bytes| String::from_utf8(bytes).unwrap());
    let announced = requests.filter(|request| request.contains("\r\nConnection: close\r\n")).count();
    assert_eq!((announced, server.connections()), (2, 2));
}

#[tokio::test]
async fn short_keep_alive_disables_reuse() {
    for (keep_alive, connections) in [("timeout=1", 2), ("timeout=60", 1), ("timeout=60, max=0", 2)] {
        let headers = format!("content-type: application/json\r\nkeep-alive: {keep_alive}\r\n");
        let server = RawServer::start(vec![Then::answer("200 OK", &headers, r#"{"id":"ch_1"}"#)]).await;
        outcomes(&row(&server.url()), 2).await;
        assert_eq!(server.connections(), connections, "{keep_alive}");
    }
}

#[tokio::test]
async fn an_old_connection_serves_no_new_request() {
    let server = RawServer::start(vec![Then::ok()]).await;
    let short = Provider { connection_max_age: Duration::ZERO, ..row(&server.url()) };
    outcomes(&short, 3).await;
    assert_eq!(server.connections(), 3);
}
