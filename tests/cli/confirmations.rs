//! Confirmations: actions on unrecorded payments, on all dead payments and on lists need an explicit choice.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

#[tokio::test]
async fn unrecorded_payment_can_be_precancelled() {
    let desk = Desk::open().await;
    let ran = desk.run(&["jobs", "cancel", "p1"]).await;
    assert_eq!(exit(&ran), Exit::Failed);
    assert!(ran.err.contains("p1: the ledger has no such job") && ran.err.contains("--provider"), "{}", ran.err);
    let nobody = desk.run(&["jobs", "cancel", "p1", "--provider", "amce"]).await;
    assert!(nobody.failure().0.contains("there is no provider `amce`"));
    let ran =
        desk.run(&["jobs", "cancel", "p1", "--provider", "acme", "--because", "charged before the restore"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Success, "p1: waiting → cancelled\n"), "{}", ran.err);
    assert_eq!(desk.state("p1").await, "cancelled");
    let file = desk.file("p2\np1\np3\n");
    let ran = desk.run(&["jobs", "cancel", "--file", &file, "--provider", "acme", "--json"]).await;
    assert_eq!((exit(&ran), ran.json()["changed"].as_array().unwrap().len()), (Exit::Failed, 2));
}

#[tokio::test]
async fn replay_of_everything_asks_for_confirmation() {
    let desk = Desk::open().await;
    let ran = desk.run(&["dlq", "replay"]).await;
    assert_eq!((exit(&ran), ran.err.as_str()), (Exit::Success, "no dead payments: nothing to replay\n"));
    for (id, provider) in [("a1", "acme"), ("a2", "acme"), ("b1", "bolt")] {
        desk.payment(id, provider, "dead").await;
    }
    let no = desk.run_answered("\n", &["dlq", "replay"]).await;
    assert_eq!(exit(&no), Exit::Failed);
    assert!(no.err.contains("Replay 3 dead payments of all providers? [y/N] "), "{}", no.err);
    let none = desk.run(&["dlq", "replay", "--provider", "gone"]).await;
    assert!(none.failure().0.contains("there is no provider `gone`: `sluicegate provider list`"));
    let yes = desk.run_answered("y\n", &["dlq", "replay", "--rate", "1000"]).await;
    assert_eq!((exit(&yes), yes.out.lines().count()), (Exit::Success, 3), "{}", yes.err);
    // A script without a terminal is not asked.
    desk.payment("a3", "acme", "dead").await;
    let script = desk.run(&["dlq", "replay", "--rate", "1000"]).await;
    assert_eq!((exit(&script), script.out.lines().count()), (Exit::Success, 1), "{}", script.err);
}

#[tokio::test]
async fn list_names_an_unknown_provider() {
    let desk = Desk::open().await;
    for command in [["jobs", "list"], ["dlq", "list"]] {
        let ran = desk.run(&[command[0], command[1], "--provider", "nix"]).await;
        assert!(ran.failure().0.contains("there is no provider `nix`"), "{command:?}");
        let ran = desk.run(&[command[0], command[1], "--provider", "acme"]).await;
        assert_eq!((exit(&ran), ran.err.as_str()), (Exit::Success, "no such payments\n"));
    }
}

/// An operator's text about a payment is stored whole or rejected.
#[tokio::test]
async fn operator_input_is_never_truncated() {
    use clap::Parser as _;
    let desk = Desk::open().await;
    desk.payment("p1", "acme", "review").await;
    let (long, because) = ("x".repeat(256), "x".repeat(501));
    for line in [
        &["jobs", "resolve", "p1", "--as", "declined", "--reference", "ch_1"][..],
        &["jobs", "resolve", "p1", "--as", "resend", "--reference", "ch_1"],
        &["jobs", "resolve", "p1", "--as", "succeeded", "--reference", &long],
        &["jobs", "resolve", "p1", "--as", "succeeded", "--reference", " "],
        &["jobs", "resolve", "p1", "--as", "succeeded", "--reference", "ch\u{1b}1"],
        &["jobs", "resolve", "p1", "--as", "succeeded", "--because", &because],
        &["jobs", "cancel", "p1", "--because", &because],
        &["dlq", "discard", "p1", "--yes", "--because", &because],
        &["dlq", "replay", "p1", "--because", &because],
        &["provider", "pause", "acme", "--because", &because],
        &["limits", "set", "acme", "per-second", "5/1s", "--because", &because],
        &["provider", "apply", "file", "--because", &because],
    ] {
        let refused = match sluicegate::cli::Cli::try_parse_from(["sluicegate"].iter().chain(line)) {
            Err(error) => (error.exit_code(), error.to_string()),
            Ok(_) => {
                let (error, exit) = desk.run(line).await.failure();
                (i32::from(exit.code()), error)
            }
        };
        assert_eq!(refused.0, 2, "{line:?}: {}", refused.1);
        let words = ["--reference", "--because"].iter().find(|flag| line.contains(*flag)).unwrap();
        assert!(refused.1.contains(words) && !refused.1.contains('\u{1b}'), "{line:?}: {}", refused.1);
    }
    assert_eq!(desk.state("p1").await, "review");
    let line = ["jobs", "resolve", "p1", "--as", "succeeded", "--reference", &long[1..], "--because", &because[1..]];
    assert_eq!(exit(&desk.run(&line).await), Exit::Success);
    assert_eq!(desk.run(&["jobs", "show", "p1", "--json"]).await.json()["provider_reference"], long[1..]);
}

/// A payment that an operator has resolved has no unknown outcome any more.
#[tokio::test]
async fn resolved_payment_shows_no_unknown_outcome() {
    let desk = Desk::open().await;
    desk.payment("p1", "acme", "review").await;
    desk.sql("UPDATE jobs SET maybe_charged = 1 WHERE id = 'p1'").await;
    assert!(desk.run(&["jobs", "show", "p1"]).await.out.contains("yes: it may have been charged"));
    assert_eq!(exit(&desk.run(&["jobs", "resolve", "p1", "--as", "declined"]).await), Exit::Success);
    let shown = desk.run(&["jobs", "show", "p1"]).await.out;
    assert!(shown.contains("declined") && !shown.contains("outcome unknown"), "{shown}");
}
