//! Answers that come when another has taken the job over: they cannot be written down, so a person must be told.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::bench::{Bench, row};
use super::script::{Act, accepted, timeout};

/// What was logged.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    fn line_with(&self, text: &str) -> Option<String> {
        let bytes = self.0.lock().unwrap();
        String::from_utf8_lossy(&bytes).lines().find(|line| line.contains(text)).map(str::to_owned)
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

#[tokio::test]
async fn an_answer_that_cannot_be_written_down_is_told() {
    let page = Page::default();
    let writer = page.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _told = tracing::subscriber::set_default(lines);
    let bench = Bench::open(&[row("acme")]).await;
    // As if another had taken it over while the request was on the wire.
    for (name, event) in [("begun", "UPDATE OF state"), ("recorded", "INSERT")] {
        let trigger = format!(
            "CREATE TRIGGER taken_over_{name} AFTER {event} ON jobs WHEN NEW.state = 'sending' \
                 BEGIN UPDATE jobs SET fence = fence + 1 WHERE id = NEW.id; END"
        );
        bench.sql(&trigger).await;
    }
    for (id, answer, says) in [
        ("paid", accepted(), ["ERROR", "outcome=\"accepted\"", "reference=\"ch_paid\""].as_slice()),
        ("silent", timeout(), ["WARN", "outcome=\"unknown\""].as_slice()),
    ] {
        bench.script.plan(id, [Act::Answer(answer)]);
        let body = json!({ "id": id, "amount": 1, "currency": "EUR", "payload": { "note": "nobody's business" } });
        bench.publish("acme", &body.to_string()).await;
        let about = format!("job={id} outcome=");
        bench.until("it is told", async || page.line_with(&about).is_some()).await;
        let line = page.line_with(&about).unwrap();
        assert!(says.iter().all(|said| line.contains(said)) && !line.contains("business"), "{line}");
        assert_eq!(bench.job(id).await.unwrap().state, "sending");
    }
}
