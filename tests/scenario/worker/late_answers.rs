//! Responses that arrive after another worker has taken over the job: they cannot be recorded, so the log must report
//! them.

use serde_json::json;

use super::bench::{Bench, row};
use super::script::{Act, accepted, timeout};
use crate::captured_log::capture_log;

#[tokio::test]
async fn response_after_lost_lease_is_logged() {
    let (log, _guard) = capture_log();
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
        bench.until("the response is logged", async || !log.lines_with(&about).is_empty()).await;
        let line = &log.lines_with(&about)[0];
        assert!(parts.iter().all(|part| line.contains(part)) && !line.contains("business"), "{line}");
        assert_eq!(bench.job(id).await.unwrap().state, "sending");
    }
}
