//! `jobs list` and `dlq list`: filters, totals and exports.

use serde_json::Value;
use sluicegate::cli::Exit;

use crate::jobs::Desk;

#[tokio::test]
async fn lists_are_filtered_totalled_and_exported() {
    let desk = Desk::open().await;
    for (id, provider, state) in
        [("p1", "acme", "dead"), ("p2", "bolt", "dead"), ("p3", "acme", "review"), ("p4", "acme", "waiting")]
    {
        desk.payment(id, provider, state).await;
    }
    let ids = |json: &Value| -> Vec<String> {
        json["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    };
    let both = desk.run(&["jobs", "list", "--state", "dead,review", "--search", "p", "--json"]).await.json();
    assert_eq!(ids(&both), ["p3", "p2", "p1"]);
    let totals = desk.run(&["jobs", "list", "--state", "dead", "--totals"]).await;
    assert!(totals.out.starts_with("2 payments\n") && totals.out.contains("EUR 25.98"), "{}", totals.out);
    let exported = desk.run(&["jobs", "list", "--provider", "acme", "--export", "csv"]).await;
    let lines: Vec<&str> = exported.out.split_terminator("\r\n").map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(lines, ["\"id\"", "\"p4\"", "\"p3\"", "\"p1\""]);
    let lines = desk.run(&["dlq", "list", "--export", "jsonl"]).await.out;
    assert!(lines.lines().count() == 2 && lines.starts_with("{\"id\":\"p2\""), "{lines}");
    for (flags, words) in [
        (["--min-amount", "5"], "--min-amount: an amount needs its currency"),
        (["--created-from", "soon"], "--created-from: must be an instant like"),
        (["--after", "missing"], "--after: the ledger has no payment `missing`"),
    ] {
        let (error, code) = desk.run(&[&["jobs", "list"], &flags[..]].concat()).await.failure();
        assert!(error.contains(words) && code == Exit::Usage, "{error}");
    }
}
