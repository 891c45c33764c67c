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
}

/// Rows that a batch has, or no batch.
async fn batches(desk: &Desk) -> Vec<serde_json::Value> {
    desk.run(&["batches", "list", "--json"]).await.json()["batches"].as_array().unwrap().clone()
}

/// A list is a set like any other: it is shown, and its digest begins the batch. Only `cancel` also works in one step.
#[tokio::test]
async fn list_decides_nothing_without_its_digest() {
    let desk = desk().await;
    for id in ["w1", "w2"] {
        desk.payment(id, "bolt", "waiting").await;
    }
    for (ids, line, jobs) in [
        ("w1\n\n  w2\r\nw1\nr1\n", &["jobs", "cancel"][..], 2),
        ("r1\nr2\nd1\n", &["jobs", "resolve", "--as", "succeeded"], 2),
        ("r3\nr3", &["jobs", "resolve", "--as", "declined"], 1),
    ] {
        let file = desk.file(ids);
        let line = [line, &["--file", file.as_str()]].concat();
        let before = batches(&desk).await.len();
        let (show, code) = match line[1] {
            "cancel" => (&["--dry-run", "--json"][..], Exit::Success),
            _ => (&["--json"][..], Exit::Failed),
        };
        let shown = desk.run(&[&line[..], show].concat()).await;
        let preview = shown.json();
        assert_eq!((exit(&shown), &preview["jobs"]), (code, &jobs.into()), "{line:?}");
        assert!(shown.err.contains("nothing was changed; to do it, use `--confirm"), "{}", shown.err);
        assert_eq!(batches(&desk).await.len(), before);
        let digest = preview["digest"].as_str().unwrap();
        let confirm = ["--confirm", digest, "--because", "as agreed", "--rate", "20/1m", "--json"];
        // The list that is confirmed is another one.
        desk.file(&format!("{ids}\nd1\nr1\nw1\nr3\n").replacen("w2", "", 1).replacen("r2", "", 1));
        if jobs == 2 {
            let other = desk.run(&[&line[..], &confirm].concat()).await;
            assert!(other.failure().0.contains("have changed since the preview"), "{:?}", other.failure());
        }
        desk.file(ids);
        let batch = desk.run(&[&line[..], &confirm].concat()).await;
        assert!(exit(&batch) == Exit::Success && batch.err.contains("no worker runs"), "{}", batch.err);
        let batch = batch.json();
        assert_eq!((&batch["jobs"], &batch["rate"]), (&jobs.into(), &"20/1m".into()), "{line:?}");
    }
    // A worker decides, not the command.
    for (id, state) in [("w1", "waiting"), ("w2", "waiting"), ("r1", "review"), ("r3", "review")] {
        assert_eq!(desk.state(id).await, state);
    }
}

/// One invalid line rejects the list, whatever the other lines say.
#[tokio::test]
async fn invalid_line_rejects_the_list() {
    let desk = desk().await;
    let long = "x".repeat(2_000);
    for (ids, words) in [
        ("r1\nno id\nr2\n".to_owned(), ": line 2: an id "),
        (format!("r1\n\n{long}\n"), ": line 3: an id "),
        ("r1,r2\n".to_owned(), ": line 1: an id "),
        ("\n \n".to_owned(), ": no line has an id: "),
        ("p\n".repeat(20_001), ": line 20001: the list has more than 20000 ids: split it: "),
    ] {
        let file = desk.file(&ids);
        for line in
            [&["jobs", "resolve", "--as", "declined"][..], &["jobs", "cancel"], &["jobs", "cancel", "--dry-run"]]
        {
            let ran = desk.run(&[line, &["--file", file.as_str()]].concat()).await;
            let (error, code) = ran.failure();
            assert!(code == Exit::Failed && error.starts_with(&file) && error.contains(words), "{error}");
            assert!(error.ends_with("nothing was changed") && !error.contains("no id\n"), "{error}");
        }
    }
    let ran = desk.run(&["jobs", "cancel", "--file", "/nonexistent"]).await;
    assert!(ran.failure().0.contains("/nonexistent"), "{:?}", ran.failure());
    assert_eq!(batches(&desk).await.len(), 0);
}

/// Dead payments without an id are a set too.
#[tokio::test]
async fn dead_payments_are_replayed_after_a_confirmation() {
    let desk = Desk::open().await;
    let none = desk.run(&["dlq", "replay", "--dry-run"]).await;
    assert!(exit(&none) == Exit::Success && none.err.contains("would change no payment"), "{}", none.err);
    for (id, provider) in [("a1", "acme"), ("a2", "acme"), ("b1", "bolt")] {
        desk.payment(id, provider, "dead").await;
    }
    desk.payment("r1", "bolt", "review").await;
    let gone = desk.run(&["dlq", "replay", "--provider", "gone"]).await;
    assert!(gone.failure().0.contains("there is no provider `gone`"), "{:?}", gone.failure());
    let all = desk.run(&["dlq", "replay", "--dry-run", "--json"]).await;
    assert_eq!((exit(&all), &all.json()["jobs"]), (Exit::Success, &3.into()));
    let line = ["dlq", "replay", "--provider", "acme", "--rate", "20", "--json"];
    let shown = desk.run(&[&line[..], &["--dry-run"]].concat()).await;
    let preview = shown.json();
    assert_eq!((exit(&shown), &preview["jobs"], &preview["decision"]), (Exit::Success, &2.into(), &"replay".into()));
    assert_eq!((desk.state("a1").await.as_str(), batches(&desk).await.len()), ("dead", 0));
    let digest = preview["digest"].as_str().unwrap();
    let begun = desk.run(&[&line[..], &["--confirm", digest, "--because", "acme is back"]].concat()).await.json();
    assert_eq!((&begun["jobs"], &begun["rate"]), (&2.into(), &"20/1s".into()));
}

/// Ids that the ledger does not know are in no batch: the command cancels them ahead of their messages, with the digest
/// of all.
#[tokio::test]
async fn list_with_a_provider_cancels_unknown_ids_ahead() {
    let desk = desk().await;
    for (id, provider) in [("w1", "acme"), ("w2", "bolt")] {
        desk.payment(id, provider, "waiting").await;
    }
    let file = desk.file("w1\nw2\nnew1\nnew2\nr1\n");
    let plain = desk.run(&["jobs", "cancel", "--file", &file, "--dry-run", "--json"]).await;
    let refused = |shown: &serde_json::Value, code: &str| {
        shown["not_applicable"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["refusal"] == code)
            .map(|row| row["jobs"].clone())
    };
    let shown = plain.json();
    assert_eq!((&shown["jobs"], refused(&shown, "no_such_job")), (&2.into(), Some(2.into())));
    assert!(plain.err.contains("add --provider NAME"), "{}", plain.err);
    let line = ["jobs", "cancel", "--file", file.as_str(), "--provider", "acme"];
    let shown = desk.run(&[&line[..], &["--dry-run", "--json"]].concat()).await.json();
    assert_eq!((&shown["jobs"], &shown["unknown"]), (&1.into(), &2.into()));
    let refusals = ["no_such_job", "other_provider", "wrong_state"].map(|code| refused(&shown, code));
    assert_eq!(refusals, [None, Some(1.into()), Some(1.into())]);
    let text = desk.run(&[&line[..], &["--dry-run"]].concat()).await;
    assert!(text.out.contains("2 ids that the ledger does not know: cancelled before"), "{}", text.out);
    let digest = shown["digest"].as_str().unwrap();
    let confirm = [&line[..], &["--confirm", digest, "--because", "wrong batch", "--json"]].concat();
    // A payment that became known meanwhile, or another provider, is another set.
    let bolt: Vec<&str> = confirm.iter().map(|word| if *word == "acme" { "bolt" } else { *word }).collect();
    desk.file("w1\nw2\nnew1\nr1\n");
    for changed in [&bolt, &confirm] {
        let ran = desk.run(changed).await;
        assert!(ran.failure().0.contains("have changed since the preview"), "{:?}", ran.failure());
    }
    assert!(desk.run(&["jobs", "show", "new1"]).await.failure().0.contains("no such job"));
    desk.file("w1\nw2\nnew1\nnew2\nr1\n");
    let ran = desk.run(&confirm).await;
    let begun = ran.json();
    assert_eq!((exit(&ran), &begun["batch"]["jobs"]), (Exit::Success, &1.into()), "{}", ran.err);
    assert_eq!(begun["ahead"]["changed"], serde_json::json!(["new1", "new2"]));
    assert_eq!((desk.state("new1").await.as_str(), desk.state("w1").await.as_str()), ("cancelled", "waiting"));
    // Only unknown ids: there is no batch.
    desk.file("new3\n");
    let digest = desk.run(&[&line[..], &["--dry-run", "--json"]].concat()).await.json()["digest"].clone();
    let ran = desk.run(&[&line[..], &["--confirm", digest.as_str().unwrap(), "--because", "x"]].concat()).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "new3: waiting → cancelled\n"), "{}", ran.err);
    assert_eq!(batches(&desk).await.len(), 1);
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
