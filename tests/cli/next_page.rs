//! The command of the next page: a shell that runs it again and again sees each row of a list exactly once.

use std::path::Path;
use std::process::Command;

use sluicegate::domain::job::InvalidReason;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};

use crate::jobs::Desk;

/// A reason with all that a shell could read differently.
const REASON: &str = "it's \"$HOME\" `id` \\ * ~ #; & | <é>";

/// First cells of all pages, from this command of a shell on. Each page has at most two rows.
fn follow(dir: &Path, arguments: &str) -> Vec<String> {
    let program = assert_cmd::cargo::cargo_bin("sluicegate");
    let always = "--set database.url=sqlite://ledger.db --set ops.listen=none";
    let mut line = format!("{} {always} {arguments}", program.display());
    let mut cells = Vec::new();
    for _ in 0..20 {
        let mut shell = Command::new("bash");
        shell.env_clear().env("PATH", "/usr/bin:/bin").current_dir(dir).args(["-c", &line]);
        let output = shell.output().unwrap();
        let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{line}: {err}");
        let rows: Vec<&str> = out.lines().skip(1).filter_map(|row| row.trim_start().split("  ").next()).collect();
        assert!(rows.len() <= 2, "{line}: {out}");
        cells.extend(rows.into_iter().map(str::to_owned));
        match err.lines().find_map(|message| message.strip_prefix("next page: ")) {
            Some(next) => next.clone_into(&mut line),
            None => return cells,
        }
    }
    panic!("the pages do not end: {line}")
}

fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_next_pages_lead_to_every_payment() {
    let desk = Desk::open().await;
    // As an argument of its own, each but the first would be an option.
    let ids = ["p1", "-p2", "--json", "--after", "--", "p1-2", "-"];
    for id in ids {
        desk.payment(id, "acme", "dead").await;
    }
    desk.payment("other", "acme", "review").await;
    desk.without_constraints(&format!(
        "UPDATE jobs SET account = '-x', reason = '{}' WHERE state = 'dead'",
        REASON.replace('\'', "''")
    ))
    .await;
    let newest_first: Vec<&str> = ids.into_iter().rev().collect();
    let reason = shell_quoted(REASON);
    for list in [
        "dlq list --limit 2".to_owned(),
        format!("jobs list --state dead,expired --limit 2 --reason {reason}"),
        format!("jobs list --limit=2 --account -x --reason={reason} --provider acme"),
    ] {
        assert_eq!(follow(desk.dir.path(), &list), newest_first, "{list}");
    }
    let ran = desk.run(&["dlq", "list", "--limit", "2", "--json"]).await;
    assert!(ran.err.is_empty() && ran.json()["next"] == "p1-2", "the cursor is a field: {}", ran.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_next_pages_lead_to_every_message_and_change() {
    let desk = Desk::open().await;
    for number in 1..=5 {
        let message = RejectedMessage {
            lane: ProviderName::new("acme").unwrap(),
            job_id: None,
            reason: InvalidReason::Malformed.code(),
            detail: "not JSON".to_owned(),
            body_sha256: [0; 32],
            body_bytes: 1,
            head: number.to_string(),
            stored: StoredMessage::default(),
        };
        desk.database.reject(&message).await.unwrap();
        desk.sql(&format!("UPDATE provider_limits SET max_requests = {number} WHERE provider = 'acme'")).await;
    }
    desk.sql("UPDATE providers SET paused = 1 WHERE name = 'bolt'").await;
    let rejected = follow(desk.dir.path(), "rejected list --provider acme --limit 2");
    assert_eq!(rejected, ["5", "4", "3", "2", "1"]);
    let program = |line: &str| follow(desk.dir.path(), line).len();
    // Each provider and its limit were created.
    assert_eq!(program("limits history acme --limit 2"), 7);
    assert_eq!(program("limits history --limit 2 -- bolt"), 3);
    let all = desk.run(&["limits", "history", "--json"]).await.json();
    assert_eq!(program("limits history --limit 2"), all["changes"].as_array().unwrap().len());
    assert!(all["next"].is_null(), "{all}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_of_next_pages_lead_to_every_batch() {
    let desk = Desk::open().await;
    let ids = ["p1", "p2", "p3", "p4", "p5"];
    for id in ids {
        desk.payment(id, "acme", "review").await;
        let file = desk.file(id);
        let line = ["jobs", "resolve", "--file", &file, "--as", "declined", "--json"];
        let digest = desk.run(&line).await.json()["digest"].as_str().unwrap().to_owned();
        desk.run(&[&line[..], &["--confirm", &digest, "--because", "x"]].concat()).await.json();
    }
    let mut found = follow(desk.dir.path(), "batches list --limit 2");
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), ids.len(), "{found:?}");
}
