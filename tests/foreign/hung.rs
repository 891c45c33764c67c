//! Secrets in files that block or never end: opening a FIFO waits for a writer for ever, and so does reading a
//! terminal.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::embedded::Embedded;
use crate::support::process::{Server, free_port};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");

#[tokio::test]
async fn hanging_secret_stops_only_its_lane() {
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
    let dir = embedded.dir.clone();
    let hostile = [fifo.as_path(), Path::new("/dev/ptmx"), Path::new("/dev/zero"), &dir];
    let hung: Vec<String> = (0..hostile.len()).map(|number| format!("hung-{number}")).collect();
    let secret = |file: &Path| format!("headers = {{ Authorization = \"Bearer ${{file:{}}}\" }}", file.display());
    let rows: String = hung.iter().zip(hostile).map(|(name, file)| row(name, &secret(file))).collect();
    embedded.grant(&hostile);
    // `apply` warns about these files and does not block either.
    embedded.apply(&format!("{rows}{}", row("good", "")));
    let payments = |prefix: &str| -> Vec<_> {
        (0..20).map(|n| json!({ "id": format!("{prefix}-{n}"), "amount": 1, "currency": "EUR" })).collect()
    };
    for name in &hung {
        embedded.enqueue(name, &payments(name));
    }
    embedded.start();
    embedded.enqueue("good", &payments("good"));
    assert_eq!(embedded.await_finished(20).await["succeeded"], 20);
    // An earlier caller may have installed the same provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let answer = reqwest::Client::new().get(embedded.ops_url("livez")).timeout(Duration::from_secs(20)).send().await;
    assert_eq!(answer.unwrap().status(), 200);
    let waiting = "SELECT DISTINCT provider, wait_detail FROM jobs WHERE provider <> 'good' AND state = 'waiting' AND wait_detail IS NOT NULL";
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let reasons: Vec<(String, String)> = loop {
        let rows: Vec<(String, String)> = embedded.rows(waiting).await;
        if hung.iter().all(|name| rows.iter().any(|(provider, _)| provider == name)) {
            break rows;
        }
        assert!(std::time::Instant::now() < deadline, "the other payments have no reason to wait yet: {rows:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    for (provider, reason) in reasons {
        assert!(reason.contains("not a regular file"), "{provider}: {reason}");
    }
    embedded.stop();
}
