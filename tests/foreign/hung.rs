//! A secret that is a FIFO: opening one waits for a writer, for ever.

use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::embedded::Embedded;
use crate::support::process::{Server, free_port};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");

#[tokio::test]
async fn a_secret_that_hangs_stops_its_own_lane_alone() {
    let mut embedded = Embedded::new(&[]);
    let fifo = embedded.dir.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let fake = [PROGRAM, "fake-provider", "--listen", listen.as_str(), "--limit", "1000/1s"];
    let provider = Server::start(&fake, &[], &embedded.dir.join("fake.log"), None, "");
    provider.await_port(port);
    let row = |name: &str, headers: &str| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"http://{listen}/charges\"\nidempotency_retention_s = 86400\n\
             {headers}\n[[provider.limit]]\nname = \"all\"\nmax_requests = 1000\nwindow_ms = 1000\n"
        )
    };
    let secret = format!("headers = {{ Authorization = \"Bearer ${{file:{}}}\" }}", fifo.display());
    embedded.grant(fifo.to_str().unwrap());
    // This names the file and does not hang either.
    embedded.apply(&format!("{}{}", row("hung", &secret), row("good", "")));
    let payments = |prefix: &str| -> Vec<_> {
        (0..20).map(|n| json!({ "id": format!("{prefix}-{n}"), "amount": 1, "currency": "EUR" })).collect()
    };
    embedded.enqueue("hung", &payments("hung"));
    embedded.start();
    embedded.enqueue("good", &payments("good"));
    assert_eq!(embedded.settled(20).await["succeeded"], 20);
    // Whoever was first has installed the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let answer = reqwest::Client::new().get(embedded.ops_url("livez")).timeout(Duration::from_secs(20)).send().await;
    assert_eq!(answer.unwrap().status(), 200);
    let waiting = "SELECT DISTINCT state, reason FROM jobs WHERE provider = 'hung' AND reason IS NOT NULL";
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let waiting: Vec<(String, String)> = loop {
        let rows = embedded.rows(waiting).await;
        if !rows.is_empty() {
            break rows;
        }
        assert!(std::time::Instant::now() < deadline, "nothing says why the other payments wait");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    for (state, reason) in waiting {
        assert!(state == "waiting" && reason.contains("not a regular file"), "{state}: {reason}");
    }
    embedded.stop();
}
