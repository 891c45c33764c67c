//! `enqueue` with a queue that keeps what is published: single payments and files, invalid lines, failed publishes, and queues that lose
//! messages.

use std::collections::BTreeSet;

use sluicegate::cli::Exit;
use sluicegate::domain::provider::ProviderName;
use sluicegate::queue::Destination;
use sluicegate::queue::message::{CardNumbers, Decoded, decode};

use crate::fakes::Engine;
use crate::support::claiming::{Claim, ClaimById as _};

fn file(dir: &tempfile::TempDir, text: &str) -> String {
    let path = dir.path().join("jobs.jsonl");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn published_ids(engine: &Engine) -> BTreeSet<String> {
    engine.state().published.iter().map(|message| message.properties.message_id.clone().unwrap()).collect()
}

#[tokio::test]
async fn enqueued_job_has_exactly_the_given_fields() {
    let engine = Engine::with_providers(&["acme"]).await;
    let line = "enqueue --provider acme --amount 1299 --currency EUR --id pay-1 --account a1 --cost 2 --priority 9 \
                --not-before 2026-01-01T00:00:00Z --idempotency-key k1 --payload {\"order\":7.10}";
    let ran = engine.run(&line.split_whitespace().collect::<Vec<_>>()).await;
    assert_eq!((ran.result.unwrap(), ran.out.as_str()), (Exit::Success, "pay-1\n"));
    assert_eq!(ran.err, "");
    let state = engine.state();
    let [message] = state.published.as_slice() else { panic!("{} published", state.published.len()) };
    assert_eq!(message.destination, Destination::Lane(ProviderName::new("acme").unwrap()));
    assert_eq!(message.properties.content_type.as_deref(), Some("application/json"));
    assert_eq!(
        std::str::from_utf8(&message.body).unwrap(),
        r#"{"v":1,"id":"pay-1","provider":"acme","amount":1299,"currency":"EUR","account":"a1","idempotency_key":"k1","cost":2,"priority":9,"not_before":"2026-01-01T00:00:00Z","payload":{"order":7.10}}"#
    );
    assert_eq!(state.declared.len(), 1);
}

#[tokio::test]
async fn a_warning_names_no_value() {
    let engine = Engine::with_providers(&["acme"]).await;
    let payload = r#"{"card":"4111111111111111"}"#;
    let line = ["enqueue", "--provider", "acme", "--amount", "1", "--currency", "EUR", "--payload", payload];
    let warned = engine.run(&[&["--set", "worker.card_numbers=warn"], &line[..]].concat()).await;
    assert_eq!(warned.result.unwrap(), Exit::Success);
    assert!(warned.err.starts_with("warning: ") && !warned.err.contains("4111"), "{}", warned.err);
    let (refused, exit) = engine.run(&line).await.failure();
    let detail = refused.strip_prefix("card_number: ").unwrap_or_default();
    assert_eq!((warned.err, exit), (format!("warning: {detail}\n"), Exit::Usage));
}

#[tokio::test]
async fn missing_id_is_generated() {
    let engine = Engine::with_providers(&["acme"]).await;
    let line = ["enqueue", "--provider", "acme", "--amount", "1", "--currency", "EUR", "--json"];
    let (first, second) = (engine.run(&line).await.json(), engine.run(&line).await.json());
    assert_ne!(first["id"], second["id"]);
    assert_eq!(first["id"].as_str().unwrap().len(), 36);
    assert_eq!(published_ids(&engine).len(), 2);
}

#[tokio::test]
async fn invalid_job_is_not_published() {
    let engine = Engine::with_providers(&["acme"]).await;
    for (flags, part, code) in [
        ("--provider acme --amount 0 --currency EUR", "bad_amount", Exit::Usage),
        ("--provider nobody --amount 1 --currency EUR", "no provider `nobody`", Exit::Failed),
        ("--provider acme --amount 1 --currency EUR --payload {4111", "--payload is not JSON", Exit::Usage),
        ("--provider acme --amount 1 --currency EUR --id a.b", "bad_id", Exit::Usage),
    ] {
        let line: Vec<&str> = ["enqueue"].into_iter().chain(flags.split_whitespace()).collect();
        let (error, exit) = engine.run(&line).await.failure();
        assert!(error.contains(part) && !error.contains("4111") && exit == code, "{flags}: {exit:?} {error}");
    }
    assert!(engine.state().published.is_empty());
}

#[tokio::test]
async fn valid_lines_are_published_invalid_ones_reported() {
    let engine = Engine::with_providers(&["acme", "other"]).await;
    let dir = tempfile::tempdir().unwrap();
    let mut text = String::new();
    text.push_str("{\"id\":\"a\",\"provider\":\"acme\",\"amount\":1,\"currency\":\"EUR\"}\n\n");
    text.push_str("{\"id\":\"b\",\"provider\":\"nobody\",\"amount\":1,\"currency\":\"EUR\"}\n");
    text.push_str("{\"id\":\"c\",\"amount\":1,\"currency\":\"EUR\"}\n");
    text.push_str("{\"id\":\"d\",\"provider\":\"other\",\"amount\":-4111,\"currency\":\"EUR\"}\n");
    text.push_str("4111111111111111 oops\n");
    text.push_str(&format!("{}\n", "x".repeat(70_000)));
    text.push_str("  {\"id\":\"e\",\"provider\":\"other\",\"amount\":1,\"currency\":\"EUR\"}");
    let file = file(&dir, &text);
    let ran = engine.run(&["enqueue", "--file", &file]).await;
    assert_eq!((ran.result.unwrap(), ran.out.as_str()), (Exit::Failed, "2 published, 5 invalid\n"));
    let numbers: Vec<&str> = ran.err.lines().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(numbers, ["line 3", "line 4", "line 5", "line 6", "line 7"]);
    assert!(!ran.err.contains("4111"), "{}", ran.err);
    assert_eq!(published_ids(&engine), ["a", "e"].map(str::to_owned).into());

    let json = engine.run(&["enqueue", "--file", &file, "--provider", "acme", "--json"]).await.json();
    let bad: Vec<u64> = json["bad"].as_array().unwrap().iter().map(|bad| bad["line"].as_u64().unwrap()).collect();
    assert_eq!((json["published"].as_u64(), bad.as_slice()), (Some(2), [3, 5, 6, 7, 8].as_slice()));
}

#[tokio::test]
async fn endless_line_keeps_the_report() {
    let engine = Engine::with_providers(&["acme"]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = file(&dir, "{\"id\":\"a\",\"amount\":1,\"currency\":\"EUR\"}\n");
    // A sparse file: one line of 65 MiB of zeros.
    std::fs::File::options().write(true).open(&file).unwrap().set_len(65 << 20).unwrap();
    let ran = engine.run(&["enqueue", "--provider", "acme", "--file", &file]).await;
    assert_eq!(ran.out, "1 published, 0 invalid\n");
    assert!(ran.err.contains("run the same file again"), "{}", ran.err);
    let (error, _) = ran.failure();
    assert!(error.to_string().contains("line 2 is longer than"), "{error}");
    assert_eq!(published_ids(&engine), ["a".to_owned()].into());
}

/// With and without a provider on the command line.
#[tokio::test]
async fn non_json_line_reports_its_position() {
    let engine = Engine::with_providers(&["acme"]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = file(&dir, "{\"provider\":\"acme\",\"id\":\"a\",\"amount\":01}\n{\"id\":\"b\"\n{\"provider\":7}\n");
    let ran = engine.run(&["enqueue", "--file", &file]).await;
    assert_eq!(
        ran.err,
        "line 1: malformed: not JSON: line 1, column 39\nline 2: malformed: JSON ends too early: line 1, column 9\n\
         line 3: malformed: is not a JSON object with a text `provider`\n"
    );
}

#[tokio::test]
async fn concurrent_publishes_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let text: String =
        (0..2_000).map(|n| format!("{{\"id\":\"job-{n}\",\"amount\":1,\"currency\":\"EUR\"}}\n")).collect();
    let engine = Engine::with_providers(&["acme"]).await;
    let ran = engine.run(&["enqueue", "--provider", "acme", "--file", &file(&dir, &text)]).await;
    assert_eq!((ran.result.unwrap(), ran.out.as_str()), (Exit::Success, "2000 published, 0 invalid\n"));
    assert_eq!(published_ids(&engine).len(), 2_000);
    let most = engine.state().in_flight_most;
    assert!((2..=256).contains(&most), "{most} at once");
}

#[tokio::test]
async fn a_broker_that_fails_stops_the_rest() {
    let engine = Engine::with_providers(&["acme"]).await;
    engine.state().unconfirmed = vec!["job-3".to_owned()];
    let dir = tempfile::tempdir().unwrap();
    let text: String =
        (0..5_000).map(|n| format!("{{\"id\":\"job-{n}\",\"amount\":1,\"currency\":\"EUR\"}}\n")).collect();
    let ran = engine.run(&["enqueue", "--provider", "acme", "--file", &file(&dir, &text)]).await;
    assert_eq!(ran.result.unwrap(), Exit::Failed);
    assert!(ran.err.contains("line 4: publish not confirmed") && ran.err.contains("same file again"), "{}", ran.err);
    assert!(published_ids(&engine).len() < 4_999, "publishing continued after the failure");

    let (error, _) = engine.run(&["enqueue", "--file", "/nonexistent.jsonl"]).await.failure();
    assert!(error.contains("/nonexistent.jsonl"), "{error}");
}

/// A queue that would lose messages gets none; the other providers' payments are published.
#[tokio::test]
async fn foreign_queue_blocks_only_its_own_lines() {
    let engine = Engine::with_providers(&["acme", "bolt", "crate"]).await;
    engine.state().lanes_different = vec!["bolt".to_owned()];
    let one = |provider| format!("enqueue --provider {provider} --id {provider}-1 --amount 1 --currency EUR");
    let (acme, bolt) = (one("acme"), one("bolt"));
    assert_eq!(engine.run(&acme.split(' ').collect::<Vec<_>>()).await.result.unwrap(), Exit::Success);
    let (error, exit) = engine.run(&bolt.split(' ').collect::<Vec<_>>()).await.failure();
    let expected = "nothing is published to `bolt`: queue `payments.bolt` exists with other arguments";
    assert_eq!((error.as_str(), exit), (expected, Exit::Failed));

    let dir = tempfile::tempdir().unwrap();
    let lanes = ["acme", "bolt", "crate", "bolt"];
    let line =
        |(n, lane)| format!("{{\"id\":\"{lane}-{n}\",\"provider\":\"{lane}\",\"amount\":1,\"currency\":\"EUR\"}}\n");
    let file = file(&dir, &(2..).zip(lanes).map(line).collect::<String>());
    let ran = engine.run(&["enqueue", "--file", &file]).await;
    assert_eq!((ran.result.unwrap(), ran.out.as_str()), (Exit::Failed, "2 published, 0 invalid\n"));
    let lines: Vec<&str> = ran.err.lines().collect();
    let why = "queue `payments.bolt` exists with other arguments";
    assert_eq!(lines[..2], [format!("line 2: {why}"), format!("line 4: {why}")]);
    assert!(lines[2].starts_with("2 not published") && lines[2].contains("run the same file again"), "{}", ran.err);
    assert_eq!(published_ids(&engine), ["acme-1", "acme-2", "crate-4"].map(str::to_owned).into());

    // If every queue is rejected, the fault is not one provider's.
    engine.state().lanes_different = ["acme", "bolt", "crate"].map(str::to_owned).into();
    let (error, _) = engine.run(&["enqueue", "--file", &file]).await.failure();
    assert!(error.contains("broker refuses: queue `payments.crate`"), "{error}");
}

/// A file is published and then compared with the ledger; a single job is compared before.
#[tokio::test]
async fn conflicting_ids_are_named() {
    let engine = Engine::with_providers(&["acme"]).await;
    let first = "enqueue --provider acme --amount 1 --currency EUR --id pay-1";
    let dir = tempfile::tempdir().unwrap();
    for id in ["pay-1", "pay-2"] {
        let body = format!(r#"{{"id":"{id}","amount":1299,"currency":"EUR"}}"#);
        let Decoded { job, hash, .. } =
            decode(body.as_bytes(), &ProviderName::new("acme").unwrap(), CardNumbers::Refuse).unwrap();
        let claim = engine.database.claim(&job, hash, "worker-a").await.unwrap();
        assert!(matches!(claim, Claim::Claimed(_)), "{claim:?}");
    }
    let (error, exit) = engine.run(&first.split(' ').collect::<Vec<_>>()).await.failure();
    assert!(error.contains("nothing is published: conflict: id pay-1 was recorded before"), "{error}");
    assert_eq!((exit, engine.state().published.len()), (Exit::Failed, 0));
    let line = |id: &str, amount: u32| format!("{{\"id\":\"{id}\",\"amount\":{amount},\"currency\":\"EUR\"}}\n");
    // More than one batch, with conflicts in the first and in the last.
    let lines: String = (0..1_200).map(|n| line(&format!("n-{n}"), 1)).collect();
    let path = file(&dir, &format!("{}{lines}{}{}", line("pay-1", 7), line("pay-2", 1299), line("pay-2", 8)));
    let ran = engine.run(&["enqueue", "--provider", "acme", "--file", &path, "--json"]).await;
    assert_eq!(ran.result.as_ref().unwrap(), &Exit::Failed);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let lines: Vec<u64> = report["conflicts"].as_array().unwrap().iter().map(|c| c["line"].as_u64().unwrap()).collect();
    assert_eq!((report["published"].as_u64(), lines), (Some(1_203), vec![1, 1_203]), "{}", ran.err);
    assert!(ran.err.contains("line 1: conflict: id pay-1 was recorded before with other content"), "{}", ran.err);
}
