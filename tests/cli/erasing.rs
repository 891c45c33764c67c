//! `jobs erase`: payments that are erased, payments that are kept for now, and the required reason. The ledger's
//! contract tests cover each column, on both databases.

use clap::Parser as _;
use serde_json::Value;
use sluicegate::cli::{Cli, Exit};

use super::jobs::{Desk, exit};

#[tokio::test]
async fn account_erasure_reports_what_remains() {
    let desk = Desk::open().await;
    for (id, state) in [("p1", "declined"), ("p2", "review"), ("p3", "waiting")] {
        desk.payment(id, "acme", state).await;
    }
    desk.without_constraints(
        "UPDATE jobs SET account = 'acct_1'; UPDATE event_cursors SET position = (SELECT max(sequence) FROM events)",
    )
    .await;
    let erase = ["jobs", "erase", "--account", "acct_1", "--because", "ticket 4711"];
    let with = |flag: &'static str| erase.iter().copied().chain([flag]).collect::<Vec<_>>();
    let rehearsed = desk.run(&with("--dry-run")).await;
    assert_eq!(rehearsed.out, "1 payment would be erased\n");
    assert!(rehearsed.err.contains("left: 1 payment in review"), "{}", rehearsed.err);
    let erased = desk.run(&with("--json")).await;
    let json = erased.json();
    assert_eq!((&json["erased"], &json["left"]["open"], &json["left"]["review"]), (&1.into(), &1.into(), &1.into()));
    let details = desk.run(&["jobs", "show", "p1", "--json"]).await.json();
    assert_eq!((&details["account"], &details["audit"][0]["erased"]), (&Value::Null, &true.into()));
    assert_eq!(details["audit"][0]["because"], "ticket 4711");
    let shown = desk.run(&["jobs", "show", "p1"]).await.out;
    assert!(shown.contains("erased; ticket 4711"), "{shown}");
    assert_eq!(exit(&erased), Exit::Failed);
    // A payment with a request within the last 32 days keeps its account. Only a later call erases it.
    desk.payment("p4", "acme", "declined").await;
    let request = "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, counted, account) \
                   SELECT id, 7, provider, created_at, created_at, 'declined', 1, 'acct_2' FROM jobs WHERE id = 'p4'";
    let set = "UPDATE jobs SET account = 'acct_2' WHERE id = 'p4'; UPDATE event_cursors SET position = (SELECT max(sequence) FROM events)";
    desk.without_constraints(&format!("{set}; {request}")).await;
    let erase = ["jobs", "erase", "--account", "acct_2", "--because", "ticket 4711"];
    let erased = desk.run(&erase).await;
    assert_eq!((exit(&erased), erased.out.as_str()), (Exit::Failed, "1 payment erased\n"));
    desk.without_constraints("UPDATE attempts SET began_at = began_at - 33 * 86400000").await;
    assert_eq!(exit(&desk.run(&erase).await), Exit::Success);
    assert!(
        Cli::try_parse_from(["sluicegate", "jobs", "erase", "--account", "acct_1"]).is_err(),
        "accepted without a reason"
    );
}
