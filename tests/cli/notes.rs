//! `jobs assign` and `jobs comment`: notes on a payment, shown by `jobs show`.

use sluicegate::cli::Exit;

use crate::jobs::{Desk, exit};

#[tokio::test]
async fn notes_are_shown_with_their_payment() {
    let desk = Desk::open().await;
    desk.payment("p1", "acme", "review").await;
    let assigned = desk.run(&["jobs", "assign", "p1", "--to", "bob"]).await;
    assert_eq!((exit(&assigned), assigned.err.as_str()), (Exit::Success, "p1: assigned to bob\n"));
    let json = desk.run(&["jobs", "comment", "p1", "--text", "-- asked them", "--json"]).await.json();
    assert_eq!(json, serde_json::json!({ "id": "p1", "comment": "-- asked them" }));
    let shown = desk.run(&["jobs", "show", "p1"]).await.out;
    for part in ["notes\n", "assigned to bob", "-- asked them"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let shown = desk.run(&["jobs", "show", "p1", "--json"]).await.json();
    assert_eq!((&shown["assigned_to"], &shown["notes"][1]["kind"]), (&"bob".into(), &"comment".into()));
    assert!(desk.run(&["jobs", "assign", "p1", "--none"]).await.err.contains("assigned to no one"));
    assert_eq!(desk.run(&["jobs", "show", "p1", "--json"]).await.json()["assigned_to"], serde_json::Value::Null);
}

#[tokio::test]
async fn only_reviews_are_assigned() {
    let desk = Desk::open().await;
    desk.payment("p1", "acme", "dead").await;
    let (error, exit) = desk.run(&["jobs", "assign", "p1", "--to", "bob"]).await.failure();
    assert_eq!(exit, Exit::Failed);
    assert!(error.contains("the job is `dead`; only a job that is `review` can be assigned"), "{error}");
    let (error, _) = desk.run(&["jobs", "comment", "nobody", "--text", "x"]).await.failure();
    assert!(error.contains("nobody: the ledger has no such job"), "{error}");
}
