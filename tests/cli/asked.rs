//! What is done only when somebody says which: payments that the ledger has not seen, the dead of every provider, lists of one.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

#[tokio::test]
async fn a_payment_that_the_ledger_does_not_know_is_cancelled_ahead_at_its_provider() {
    let desk = Desk::open().await;
    let ran = desk.run(&["jobs", "cancel", "p1"]).await;
    assert_eq!(exit(&ran), Exit::Failed);
    assert!(ran.err.contains("p1: the ledger has no such job") && ran.err.contains("--provider"), "{}", ran.err);
    let nobody = desk.run(&["jobs", "cancel", "p1", "--provider", "amce"]).await;
    assert!(nobody.failure().0.contains("there is no provider `amce`"));
    let ran =
        desk.run(&["jobs", "cancel", "p1", "--provider", "acme", "--because", "charged before the restore"]).await;
    assert_eq!((exit(&ran), ran.out.as_str()), (Exit::Fine, "p1: waiting → cancelled\n"), "{}", ran.err);
    assert_eq!(desk.state("p1").await, "cancelled");
    let file = desk.file("p2\np1\np3\n");
    let ran = desk.run(&["jobs", "cancel", "--file", &file, "--provider", "acme", "--json"]).await;
    assert_eq!((exit(&ran), ran.json()["changed"].as_array().unwrap().len()), (Exit::Failed, 2));
}

#[tokio::test]
async fn whoever_replays_all_of_every_provider_at_a_terminal_is_asked() {
    let desk = Desk::open().await;
    let ran = desk.run(&["dlq", "replay"]).await;
    assert_eq!((exit(&ran), ran.err.as_str()), (Exit::Fine, "no dead payments: nothing to replay\n"));
    for (id, provider) in [("a1", "acme"), ("a2", "acme"), ("b1", "bolt")] {
        desk.payment(id, provider, "dead").await;
    }
    let no = desk.run_answered("\n", &["dlq", "replay"]).await;
    assert_eq!((exit(&no), desk.queued("acme").await.len()), (Exit::Failed, 0));
    assert!(no.err.contains("Replay all 3 dead payments (acme 2, bolt 1)? [y/N] "), "{}", no.err);
    let none = desk.run(&["dlq", "replay", "--provider", "gone"]).await;
    assert!(none.failure().0.contains("there is no provider `gone`: `sluicegate provider list`"));
    let yes = desk.run_answered("y\n", &["dlq", "replay", "--rate", "1000"]).await;
    assert_eq!((exit(&yes), yes.out.lines().count()), (Exit::Fine, 3), "{}", yes.err);
    // A script is not asked.
    desk.payment("a3", "acme", "dead").await;
    let script = desk.run(&["dlq", "replay", "--rate", "1000"]).await;
    assert_eq!((exit(&script), script.out.lines().count()), (Exit::Fine, 1), "{}", script.err);
}

#[tokio::test]
async fn a_list_of_a_provider_that_is_none_says_so() {
    let desk = Desk::open().await;
    for command in [["jobs", "list"], ["dlq", "list"]] {
        let ran = desk.run(&[command[0], command[1], "--provider", "nix"]).await;
        assert!(ran.failure().0.contains("there is no provider `nix`"), "{command:?}");
        let ran = desk.run(&[command[0], command[1], "--provider", "acme"]).await;
        assert_eq!((exit(&ran), ran.err.as_str()), (Exit::Fine, "no such payments\n"));
    }
}
