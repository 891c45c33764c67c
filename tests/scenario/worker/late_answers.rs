//! Responses that arrive after another worker has taken over the job: they cannot be recorded, so the log must report
//! them.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tracing::subscriber::DefaultGuard;

use super::bench::{Bench, row};
use super::script::{Act, accepted, timeout};

/// A buffer with the log lines.
#[derive(Clone, Default)]
pub(super) struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    pub fn lines_with(&self, text: &str) -> Vec<String> {
        let bytes = self.0.lock().unwrap();
        String::from_utf8_lossy(&bytes).lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    fn line_with(&self, text: &str) -> Option<String> {
        self.lines_with(text).into_iter().next()
    }
}

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Captures all later log lines of this thread.
pub(super) fn capture_log() -> (Page, DefaultGuard) {
    let page = Page::default();
    let writer = page.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    (page, tracing::subscriber::set_default(lines))
}

#[tokio::test]
async fn response_after_lost_lease_is_logged() {
    let (page, _guard) = capture_log();
    let bench = Bench::open(&[row("acme")]).await;
    // The job looks as if another worker had taken it over while the request was in flight.
    for (name, event) in [("begun", "UPDATE OF state"), ("recorded", "INSERT")] {
        let trigger = format!(
            "CREATE TRIGGER taken_over_{name} AFTER {event} ON jobs WHEN NEW.state = 'sending' \
                 BEGIN UPDATE jobs SET fence = fence + 1 WHERE id = NEW.id; END"
        );
        bench.sql(&trigger).await;
    }
    for (id, answer, parts) in [
        ("paid", accepted(), ["ERROR", "outcome=\"accepted\"", "reference=\"ch_paid\""].as_slice()),
        ("silent", timeout(), ["WARN", "outcome=\"unknown\""].as_slice()),
    ] {
        bench.script.plan(id, [Act::Answer(answer)]);
        let body = json!({ "id": id, "amount": 1, "currency": "EUR", "payload": { "note": "nobody's business" } });
        bench.publish("acme", &body.to_string()).await;
        let about = format!("job={id} outcome=");
        bench.until("the response is logged", async || page.line_with(&about).is_some()).await;
        let line = page.line_with(&about).unwrap();
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains("business"), "{line}");
        assert_eq!(bench.job(id).await.unwrap().state, "sending");
    }
}
