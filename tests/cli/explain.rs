//! `jobs explain` without a running process: it answers from the ledger, and its output states that.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

const ALONE: [&str; 4] = ["--set", "ops.listen=none", "jobs", "explain"];

fn line<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    [&ALONE[..], rest].concat()
}

#[tokio::test]
async fn a_payment_is_explained_from_the_ledger_alone() {
    let desk = Desk::open().await;
    desk.payment("w1", "acme", "waiting").await;
    desk.payment("w2", "acme", "waiting").await;
    let ran = desk.run(&line(&["w2"])).await;
    assert_eq!(exit(&ran), Exit::Success, "{}", ran.err);
    assert!(ran.err.contains("explained from the ledger alone"), "{}", ran.err);
    assert!(ran.out.starts_with("w2 of acme is `waiting`: in the backlog of lane acme, and no worker"), "{}", ran.out);
    assert!(
        ran.out.contains("about 1 ahead of it; estimated start unknown: no running worker was asked"),
        "{}",
        ran.out
    );
    let shown = |out: &str| -> Vec<String> {
        out.lines().skip(3).filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect()
    };
    assert!(ran.out.lines().any(|line| line.trim_start().starts_with("2 checks  passed")), "{}", ran.out);
    assert!(shown(&ran.out).len() < sluicegate::domain::explain::CHECKS.len(), "{}", ran.out);
    let ran = desk.run(&line(&["w2", "--all"])).await;
    assert_eq!(shown(&ran.out), sluicegate::domain::explain::CHECKS);

    desk.sql("UPDATE providers SET paused = 1 WHERE name = 'acme'").await;
    let ran = desk.run(&line(&["w2", "--json"])).await;
    let explained: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(
        (explained["explained_from"].as_str(), explained["blocked_at"]["check"].as_str()),
        (Some("ledger"), Some("provider"))
    );
    assert!(explained["summary"].as_str().unwrap().contains("`sluicegate provider resume acme`"), "{explained}");
}

#[tokio::test]
async fn payment_of_the_backlog_gets_its_place() {
    let desk = Desk::open().await;
    for id in ["first", "second", "third"] {
        desk.payment(id, "acme", "waiting").await;
    }
    let in_an_hour = "CAST(unixepoch('subsec') * 1000 AS INTEGER) + 3600000";
    desk.sql(&format!("UPDATE flows SET blocked_until = {in_an_hour}, blocked_reason = 'rejected_streak'")).await;
    let explained = desk.run(&line(&["second", "--json"])).await.json();
    let place = &explained["backlog"];
    let shown = (&place["position"], &place["waiting"], &place["account"], &place["priority"]);
    assert_eq!(shown, (&2.into(), &3.into(), &serde_json::Value::Null, &0.into()), "{explained}");
    assert_eq!(place["blocked"]["text"], "the provider rejected several payments in a row");
    let at = &explained["blocked_at"];
    assert_eq!((&at["check"], &at["starts_at"]), (&"account".into(), &serde_json::Value::Null), "{explained}");
    assert_eq!(at["start_unknown"], "no running worker was asked");
    let ran = desk.run(&line(&["second"])).await;
    let place = "it is the 2nd of 3 waiting payments without an account with priority 0, blocked until ";
    assert!(ran.out.replace('\n', " ").contains(place), "{}", ran.out);
}

/// The commands that an explanation names can be run.
#[tokio::test]
async fn explained_commands_can_be_run() {
    let desk = Desk::open().await;
    for (id, state) in [("r1", "review"), ("d1", "dead")] {
        desk.payment(id, "acme", state).await;
        let ran = desk.run(&line(&[id])).await;
        let named = ran.out.split('`').find(|part| part.starts_with("sluicegate ")).unwrap().to_owned();
        let words: Vec<&str> = named.split_whitespace().skip(1).collect();
        let done = desk.run(&words).await;
        assert_eq!(exit(&done), Exit::Success, "{named}: {}", done.err);
        assert_ne!(desk.state(id).await, state, "{named}");
    }
    let ran = desk.run(&line(&["r1"])).await;
    assert!(ran.out.contains("is `succeeded`: charged"), "{}", ran.out);
}

#[tokio::test]
async fn unknown_id_was_never_recorded_or_is_rejected() {
    let desk = Desk::open().await;
    let ran = desk.run(&line(&["absent"])).await;
    assert_eq!(exit(&ran), Exit::Failed);
    assert!(ran.out.contains("the ledger has no job absent: it was never recorded"), "{}", ran.out);
    desk.sql(
        "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes) \
         VALUES (1795269801000, 'acme', 'odd', 'bad_amount', 'amount must be above 0', zeroblob(32), 7)",
    )
    .await;
    let ran = desk.run(&line(&["odd"])).await;
    assert!(ran.out.contains("can never be a job (bad_amount: amount must be above 0)"), "{}", ran.out);
}
