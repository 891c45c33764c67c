//! Decisions in bulk by commands: a dry run names count, sum and digest, the digest begins a batch, and a changed set is
//! refused. A resend needs the id a second time.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

async fn desk() -> Desk {
    let desk = Desk::open().await;
    for (id, provider, state) in
        [("r1", "acme", "review"), ("r2", "acme", "review"), ("r3", "bolt", "review"), ("d1", "acme", "dead")]
    {
        desk.payment(id, provider, state).await;
    }
    desk
}

const RESOLVE: [&str; 6] = ["jobs", "resolve", "--filter", "state=review&provider=acme", "--as", "resend"];

#[tokio::test]
async fn digest_of_the_dry_run_begins_the_batch() {
    let desk = desk().await;
    let dry = desk.run(&[&RESOLVE[..], &["--dry-run", "--json"]].concat()).await;
    let preview = dry.json();
    assert_eq!((exit(&dry), &preview["jobs"], &preview["at_most"]), (Exit::Success, &2.into(), &true.into()));
    let digest = preview["digest"].as_str().unwrap();
    let text = desk.run(&[&RESOLVE[..], &["--dry-run"]].concat()).await;
    assert!(text.out.contains("resend: at most 2 payments") && text.out.contains(digest), "{}", text.out);
    assert!(text.err.contains(&format!("--confirm {digest}")), "{}", text.err);
    // Without a confirmation nothing happens.
    let none = desk.run(&RESOLVE).await;
    assert_eq!((exit(&none), desk.state("r1").await.as_str()), (Exit::Failed, "review"));
    let silent = desk.run(&[&RESOLVE[..], &["--confirm", digest]].concat()).await;
    assert!(silent.failure().0.contains("--because: is missing"), "{:?}", silent.failure());
    let confirmed = [&RESOLVE[..], &["--confirm", digest, "--because", "ticket 4711", "--json"]].concat();
    let ran = desk.run(&confirmed).await;
    assert!(exit(&ran) == Exit::Success && ran.err.contains("no worker runs: the batch waits"), "{}", ran.err);
    let batch = ran.json();
    assert_eq!((&batch["state"], &batch["remaining"], &batch["rate"]), (&"running".into(), &2.into(), &"50/1s".into()));
    let again = desk.run(&confirmed).await;
    assert!(again.failure().0.contains("already"), "{:?}", again.failure());
    let id = batch["id"].as_str().unwrap();
    let shown = desk.run(&["batches", "show", id]).await;
    assert!(shown.out.contains("ticket 4711") && shown.err.contains("no worker runs"), "{} {}", shown.out, shown.err);
    let stopped = desk.run(&["batches", "stop", id, "--json"]).await.json();
    assert_eq!((&stopped["state"], &stopped["remaining"]), (&"stopped".into(), &2.into()));
    let list = desk.run(&["batches", "list", "--json"]).await.json();
    assert_eq!(list["batches"][0]["id"], id);
}

#[tokio::test]
async fn changed_set_is_refused() {
    let desk = desk().await;
    let digest = desk.run(&[&RESOLVE[..], &["--dry-run", "--json"]].concat()).await.json()["digest"].clone();
    desk.payment("r4", "acme", "review").await;
    let digest = digest.as_str().unwrap();
    let ran = desk.run(&[&RESOLVE[..], &["--confirm", digest, "--because", "seen"]].concat()).await;
    assert!(ran.failure().0.contains("have changed since the preview"), "{:?}", ran.failure());
    let list = desk.run(&["batches", "list", "--json"]).await.json();
    assert_eq!(list["batches"], serde_json::json!([]));
}

#[tokio::test]
async fn every_decision_has_a_filter_and_a_file() {
    let desk = desk().await;
    desk.payment("w1", "bolt", "waiting").await;
    let file = desk.file("r1\nr2\nnobody\n");
    for (line, jobs) in [
        (&["jobs", "resolve", "--file", file.as_str(), "--as", "declined"][..], 2),
        (&["jobs", "resolve", "--filter", "", "--as", "succeeded"], 3),
        (&["jobs", "cancel", "--filter", "provider=bolt"], 1),
        (&["jobs", "cancel", "w1"], 1),
        (&["dlq", "replay", "--filter", "provider=acme"], 1),
        (&["dlq", "discard", "--filter", "?provider=acme"], 1),
    ] {
        let dry = desk.run(&[line, &["--dry-run", "--json"]].concat()).await;
        assert_eq!((exit(&dry), &dry.json()["jobs"]), (Exit::Success, &jobs.into()), "{line:?}");
    }
    for (filter, words) in
        [("colour=red", "unknown field `colour`"), ("state=lost", "`state`: must be"), ("id=a&id=b", "given twice")]
    {
        let ran = desk.run(&["jobs", "cancel", "--filter", filter, "--dry-run"]).await;
        let (error, code) = ran.failure();
        assert!(code == Exit::Usage && error.contains("--filter: ") && error.contains(words), "{filter}: {error}");
    }
    let bad = desk.file("r1\nno id\n");
    let ran = desk.run(&["jobs", "resolve", "--file", &bad, "--as", "resend", "--dry-run"]).await;
    assert!(ran.failure().0.starts_with("line 2: an id"), "{:?}", ran.failure());
}

/// A payment that is sent again may be charged again.
#[tokio::test]
async fn resend_needs_the_id_again() {
    let desk = desk().await;
    let line = ["jobs", "resolve", "r1", "--as", "resend"];
    let script = desk.run(&line).await;
    let (error, code) = script.failure();
    assert!(code == Exit::Usage && error.contains("--confirm r1"), "{error}");
    let other = desk.run(&[&line[..], &["--confirm", "r2"]].concat()).await;
    assert!(other.failure().0.contains("not the id of the payment"), "{:?}", other.failure());
    let typo = desk.run_answered("r2\n", &line).await;
    assert!(typo.failure().0.contains("not the id") && typo.err.contains("Type its id"), "{}", typo.err);
    assert_eq!(desk.state("r1").await, "review");
    let typed = desk.run_answered("r1\n", &line).await;
    assert_eq!((exit(&typed), desk.state("r1").await.as_str()), (Exit::Success, "waiting"));
    let script = desk.run(&["jobs", "resolve", "r2", "--as", "resend", "--confirm", "r2"]).await;
    assert_eq!((exit(&script), desk.state("r2").await.as_str()), (Exit::Success, "waiting"));
    // A file is a set: its digest confirms it.
    let file = desk.file("r3\n");
    let ran = desk.run(&["jobs", "resolve", "--file", &file, "--as", "resend"]).await;
    assert_eq!((exit(&ran), desk.state("r3").await.as_str()), (Exit::Failed, "review"));
}
