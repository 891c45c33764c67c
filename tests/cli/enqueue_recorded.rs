//! `enqueue` without a broker: payments are recorded in the ledger, by the rules of their providers' rows.

use serde_json::{Value, json};
use sluicegate::cli::Exit;

use crate::fakes::Ran;
use crate::jobs::Desk;

fn line(id: &str, provider: &str, amount: i64) -> String {
    format!("{}\n", json!({ "id": id, "provider": provider, "amount": amount, "currency": "EUR" }))
}

async fn enqueue(desk: &Desk, text: &str, flags: &[&str]) -> Ran {
    let file = desk.file(text);
    desk.run(&[&["enqueue", "--file", &file], flags].concat()).await
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|line| line["line"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn file_is_recorded_once() {
    let desk = Desk::open().await;
    let text: String =
        (0..1_500).map(|n| line(&format!("p{n}"), if n % 2 == 0 { "acme" } else { "bolt" }, 1)).collect();
    let first = enqueue(&desk, &text, &[]).await;
    assert_eq!(
        (first.result.unwrap(), first.out.as_str(), first.err.as_str()),
        (Exit::Success, "1500 recorded, 0 invalid\n", "")
    );
    assert_eq!(desk.state("p1499").await, "waiting");
    let again = enqueue(&desk, &text, &[]).await;
    let known = "0 recorded, 1500 already known, 0 invalid\n";
    assert_eq!((again.result.unwrap(), again.out.as_str(), again.err.as_str()), (Exit::Success, known, ""));
    // The lines of one account are in their order.
    let in_order = "SELECT group_concat(id) FROM (SELECT id FROM jobs WHERE provider = 'acme' ORDER BY seq LIMIT 3)";
    assert_eq!(desk.text(in_order).await, "p0,p2,p4");
    // Each is counted in its flow.
    assert_eq!(desk.text("SELECT CAST(sum(waiting) AS text) FROM flows").await, "1500");
}

#[tokio::test]
async fn conflicts_and_invalid_lines_are_named() {
    let desk = Desk::open().await;
    desk.sql("UPDATE providers SET \"require\" = '[\"account\"]' WHERE name = 'bolt'").await;
    let text = [
        line("a", "acme", 1),
        line("b", "unknown", 1),
        line("a", "acme", 2),
        line("c", "bolt", 1),
        "{".to_owned() + "\n",
        line("a", "bolt", 1),
        line("d", "acme", 1),
    ];
    let ran = enqueue(&desk, &text.concat(), &["--json"]).await;
    assert_eq!(ran.result.as_ref().unwrap(), &Exit::Failed);
    let report = ran.json();
    assert_eq!((&report["recorded"], &report["known"]), (&2.into(), &0.into()), "{report:#}");
    assert_eq!((numbers(&report["bad"]), numbers(&report["conflicts"])), (vec![2, 4, 5, 6], vec![3]), "{report:#}");
    assert!(ran.err.contains("line 3: conflict: id: recorded before with other content"), "{}", ran.err);
    assert!(ran.err.contains("line 4: missing_account: "), "{}", ran.err);
    let plain = enqueue(&desk, &text.concat(), &[]).await.out;
    assert_eq!(plain, "0 recorded, 2 already known, 4 invalid, 1 in conflict\n");
}

#[tokio::test]
async fn one_payment_is_recorded_known_or_in_conflict() {
    let desk = Desk::open().await;
    let pay = async |amount: &str, flags: &[&str]| {
        let line = ["enqueue", "--provider", "acme", "--id", "p1", "--currency", "EUR", "--amount", amount];
        desk.run(&[&line, flags].concat()).await
    };
    let first = pay("1", &["--json"]).await.json();
    assert_eq!(first, json!({ "id": "p1", "provider": "acme", "known": false }));
    assert_eq!(pay("1", &["--json"]).await.json()["known"], true);
    let again = pay("1", &[]).await;
    assert_eq!((again.result.unwrap(), again.out.as_str()), (Exit::Success, "p1\n"));
    assert!(again.err.contains("p1 is already known"), "{}", again.err);
    let (error, exit) = pay("2", &[]).await.failure();
    assert!(error.starts_with("nothing is recorded: conflict: id: recorded before"), "{error}");
    assert_eq!(exit, Exit::Failed);
}

/// The row of one provider cannot be used: its payments could not be judged.
#[tokio::test]
async fn unusable_row_closes_only_its_own_lane() {
    let desk = Desk::open().await;
    desk.sql("DELETE FROM provider_limits WHERE provider = 'bolt'").await;
    let ran = enqueue(&desk, &[line("a", "acme", 1), line("b", "bolt", 1)].concat(), &[]).await;
    assert_eq!((ran.result.as_ref().unwrap(), ran.out.as_str()), (&Exit::Failed, "1 recorded, 0 invalid\n"));
    assert!(ran.err.contains("line 2: its provider row is invalid: "), "{}", ran.err);
    assert!(ran.err.contains("1 not recorded, because their provider rows cannot be used"), "{}", ran.err);
    let one = ["enqueue", "--provider", "bolt", "--amount", "1", "--currency", "EUR"];
    let (error, exit) = desk.run(&one).await.failure();
    assert!(error.starts_with("nothing is recorded for `bolt`: its provider row is invalid"), "{error}");
    assert_eq!(exit, Exit::Failed);
}

/// A payment of a refused account is recorded like any other. A worker ends it, and names the rule.
#[tokio::test]
async fn refused_and_scheduled_payments_are_recorded() {
    let desk = Desk::open().await;
    desk.sql("INSERT INTO account_overrides (provider, account, rule) VALUES ('acme', 'mallory', 'refuse')").await;
    let refused = json!({ "id": "r", "amount": 1, "currency": "EUR", "account": "mallory" });
    let later = json!({ "id": "l", "amount": 1, "currency": "EUR", "not_before": "2999-01-01T00:00:00Z" });
    let ran = enqueue(&desk, &format!("{refused}\n{later}\n"), &["--provider", "acme"]).await;
    assert_eq!(ran.out, "2 recorded, 0 invalid\n");
    let waits = "SELECT group_concat(id || ' ' || state || ' ' || backlog) FROM (SELECT * FROM jobs ORDER BY id)";
    assert_eq!(desk.text(waits).await, "l waiting 0,r waiting 1");
}
