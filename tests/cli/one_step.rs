//! Decisions about many payments in one step: `dlq replay` without an id, and `jobs cancel --file`, which scripts rely on.

use std::time::Duration;

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

#[tokio::test]
async fn dead_payments_are_replayed_once_each() {
    let desk = Desk::open().await;
    for number in 0..20 {
        desk.payment(&format!("a{number:02}"), "acme", "dead").await;
    }
    for id in ["b1", "b2"] {
        desk.payment(id, "bolt", "dead").await;
    }
    desk.payment("r1", "bolt", "review").await;
    let dry = desk.run(&["dlq", "replay", "--dry-run", "--json"]).await;
    assert_eq!(exit(&dry), Exit::Success);
    assert_eq!(dry.json()["jobs"], 22);
    let dry = desk.run(&["dlq", "replay", "--dry-run"]).await;
    assert!(
        dry.out.contains("replay: at most 22 payments") && dry.err.contains("nothing was changed"),
        "{}{}",
        dry.out,
        dry.err
    );
    assert_eq!(desk.state("a00").await, "dead");

    let one = desk.run(&["dlq", "replay", "--provider", "bolt", "--json"]).await;
    assert_eq!((exit(&one), one.json()["changed"].as_array().unwrap().len()), (Exit::Success, 2));
    assert_eq!((desk.state("a00").await.as_str(), desk.state("b1").await.as_str()), ("dead", "waiting"));
    let rest = desk.run(&["dlq", "replay", "--yes", "--rate", "1000"]).await;
    assert_eq!((exit(&rest), rest.out.lines().count()), (Exit::Success, 20));
    assert_eq!(desk.state("a00").await, "waiting");
    assert_eq!(desk.state("r1").await, "review");
    let none = desk.run(&["dlq", "list"]).await;
    assert_eq!((none.out.as_str(), none.err.as_str()), ("", "no such payments\n"));
}

#[tokio::test]
async fn replay_keeps_the_requested_rate() {
    let desk = Desk::open().await;
    for number in 0..4 {
        desk.payment(&format!("p{number}"), "acme", "dead").await;
    }
    let began = std::time::Instant::now();
    assert_eq!(exit(&desk.run(&["dlq", "replay", "--yes", "--rate", "10"]).await), Exit::Success);
    // Three intervals after the first; a slow machine takes longer, never less.
    assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
}

#[tokio::test]
async fn listed_payments_are_cancelled_at_once() {
    let desk = Desk::open().await;
    for (id, state) in [("p1", "waiting"), ("p2", "waiting"), ("p3", "review"), ("p4", "waiting")] {
        desk.payment(id, "acme", state).await;
    }
    let file = desk.file("p1\n\n  p2\r\np3\nabsent\np1\np4");
    let ran = desk.run(&["jobs", "cancel", "--file", &file]).await;
    assert_eq!(exit(&ran), Exit::Failed);
    assert_eq!(ran.out, "p1: waiting → cancelled\np2: waiting → cancelled\np4: waiting → cancelled\n");
    let (review, unknown) = ("p3: the job is `review`", "absent: the ledger has no such job");
    assert!(
        ran.err.contains(review) && ran.err.contains(unknown) && ran.err.contains("--provider NAME"),
        "{}",
        ran.err
    );
    for (id, state) in [("p1", "cancelled"), ("p2", "cancelled"), ("p3", "review"), ("p4", "cancelled")] {
        assert_eq!(desk.state(id).await, state);
    }
    let again = desk.run(&["jobs", "cancel", "--file", &file, "--json"]).await.json();
    let refused: Vec<&str> =
        again["refused"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!((refused, again["changed"].as_array().unwrap().len()), (vec!["p1", "p2", "p3", "absent", "p4"], 0));
}
