//! A whole worker and a provider that sends stray responses: each payment's ledger row matches its own response.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::embedded::Embedded;
use crate::support::doubling::{DoublingServer, Stray, is_accepted};

const PAYMENTS: usize = 400;

fn row(url: &str) -> String {
    format!(
        "[[provider]]\nname = \"doubling\"\nurl = \"{url}\"\nidempotency_retention_s = 86400\nbackoff_base_ms = 50\n\
         max_attempts = 100\n\n[provider.request]\necho = {{ id = \"/order/id\", idempotency_key = {{ header = \"X-Key\" }} }}\n\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 2000\nwindow_ms = 1000\n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_response_finishes_another_payment() {
    let server = DoublingServer::start(Stray::Mixed).await;
    let mut embedded = Embedded::new(&[]);
    embedded.apply(&row(&server.url));
    let message = |number| json!({"id": format!("pay-{number}"), "amount": 1_299, "currency": "EUR"});
    embedded.enqueue("doubling", &(0..PAYMENTS).map(message).collect::<Vec<_>>());
    embedded.start();
    embedded.await_finished(PAYMENTS as u64).await;
    embedded.stop();
    let jobs: Vec<(String, String, String)> =
        embedded.rows("SELECT id, state, coalesce(provider_reference, '') FROM jobs").await;
    assert_eq!(jobs.len(), PAYMENTS);
    for (id, state, reference) in &jobs {
        let number: usize = id.strip_prefix("pay-").unwrap().parse().unwrap();
        let right =
            if is_accepted(number) { ("succeeded", format!("ch_{number}")) } else { ("declined", String::new()) };
        assert_eq!((state.as_str(), reference), (right.0, &right.1), "{id}");
    }
    let log = embedded.log_text();
    let lines = log.lines().filter(|line| line.contains("provider sent an unexpected response"));
    let lines: Vec<&str> = lines.collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| !line.contains("card_declined")), "{lines:#?}");
    assert!(lines.len() < 10, "more than a line a minute: {lines:#?}");
}

/// What a provider sends, on a used connection, to a payment's first request.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// A stray one. The payment is charged, and its own response follows.
    StrayThenOwn,
    TwoStraysThenOwn,
    /// Both in one piece.
    StrayWithOwn,
    /// A true one: nothing was charged, and nothing follows.
    True,
}

/// A provider that deduplicates, and answers as [`Refusal`] says.
struct RefusingProvider {
    url: String,
    /// Charges and refusals by payment.
    seen: Arc<Mutex<BTreeMap<usize, Seen>>>,
}

#[derive(Debug, Default)]
struct Seen {
    charges: usize,
    refused: bool,
}

impl RefusingProvider {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (url, seen) = (format!("http://{}/", listener.local_addr().unwrap()), Arc::default());
        let shared = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(Self::serve(stream, Arc::clone(&shared)));
            }
        });
        Self { url, seen }
    }

    async fn serve(mut stream: TcpStream, seen: Arc<Mutex<BTreeMap<usize, Seen>>>) -> Option<()> {
        let mut is_used = false;
        loop {
            let mut request = Vec::new();
            let number = loop {
                if stream.read_buf(&mut request).await.ok()? == 0 {
                    return None;
                }
                if let Some(number) = number_of(&request) {
                    break number;
                }
            };
            let body = format!(r#"{{"id":"ch_{number}"}}"#);
            let own = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let locked = "HTTP/1.1 423 Locked\r\ncontent-length: 0\r\n\r\n".to_owned();
            let pieces = {
                let mut seen = seen.lock().unwrap();
                let seen = seen.entry(number).or_default();
                let refusal = [Refusal::StrayThenOwn, Refusal::TwoStraysThenOwn, Refusal::StrayWithOwn, Refusal::True];
                match refusal[number % 4] {
                    refusal if is_used && !seen.refused && seen.charges == 0 => {
                        seen.refused = true;
                        seen.charges += usize::from(!matches!(refusal, Refusal::True));
                        match refusal {
                            Refusal::StrayThenOwn => vec![locked, own],
                            Refusal::TwoStraysThenOwn => vec![locked.clone(), locked, own],
                            Refusal::StrayWithOwn => vec![locked + &own],
                            Refusal::True => vec![locked],
                        }
                    }
                    _ => {
                        seen.charges = seen.charges.max(1);
                        vec![own]
                    }
                }
            };
            for (nth, piece) in pieces.into_iter().enumerate() {
                // A second response arrives when the first was read.
                tokio::time::sleep(Duration::from_millis(if nth > 0 { 20 } else { 0 })).await;
                stream.write_all(piece.as_bytes()).await.ok()?;
            }
            is_used = true;
        }
    }
}

fn number_of(request: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(request);
    let (_, behind) = text.strip_suffix('}')?.split_once(r#""id":"pay-"#)?;
    behind.split_once('"')?.0.parse().ok()
}

/// Every payment that was charged ends as succeeded, whatever refusal came before, although a refused one expires before
/// it may be sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_stray_refusal_hides_a_charge() {
    let provider = RefusingProvider::start().await;
    let mut embedded = Embedded::new(&[]);
    embedded.apply(&format!(
        "[[provider]]\nname = \"refusing\"\nurl = \"{}\"\nidempotency_retention_s = 86400\nbackoff_base_ms = 16000\n\
         timeout_ms = 1000\nworkers = 4\nmax_attempts = 100\nstatuses = {{ 423 = \"busy\" }}\n\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 2000\nwindow_ms = 1000\n",
        provider.url
    ));
    embedded.start();
    let expires_at = (jiff::Timestamp::now() + Duration::from_secs(8)).to_string();
    let message =
        |number| json!({"id": format!("pay-{number}"), "amount": 1_299, "currency": "EUR", "expires_at": expires_at});
    embedded.enqueue("refusing", &(0..PAYMENTS).map(message).collect::<Vec<_>>());
    embedded.await_finished(PAYMENTS as u64).await;
    embedded.stop();
    let jobs: Vec<(String, String, String)> =
        embedded.rows("SELECT id, state, coalesce(provider_reference, '') FROM jobs").await;
    let seen = provider.seen.lock().unwrap();
    let stray = seen.iter().filter(|(number, seen)| seen.refused && *number % 4 != 3).count();
    assert!(jobs.len() == PAYMENTS && stray > 10, "{stray} stray refusals for {} payments", jobs.len());
    for (id, state, reference) in &jobs {
        let number: usize = id.strip_prefix("pay-").unwrap().parse().unwrap();
        let charges = seen.get(&number).map_or(0, |seen| seen.charges);
        let wanted = if charges > 0 { ("succeeded", format!("ch_{number}")) } else { ("expired", String::new()) };
        assert!(
            charges <= 1 && (state.as_str(), reference) == (wanted.0, &wanted.1),
            "{id}: {state}, {charges} charges"
        );
    }
}
