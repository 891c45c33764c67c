//! A whole worker and a provider that sends every response twice: each payment's ledger row matches its own response.

use serde_json::json;

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
