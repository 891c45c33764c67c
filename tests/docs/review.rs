//! The table of resolutions in docs/review.md: commands and states are those of the code.

use sluicegate::ledger::operator::{Charge, JobResolution};

use crate::page::{Page, plain};

#[test]
fn every_resolution_is_documented_with_states() {
    let rows = Page::read("docs/review.md").table("# Reviews and dead payments", "command");
    let documented: Vec<[String; 3]> =
        rows.iter().map(|row| [&row[0], &row[1], &row[2]].map(|cell| plain(cell).to_owned())).collect();
    let commands = [
        ("jobs resolve ID --as succeeded", JobResolution::Succeeded(Charge::default())),
        ("jobs resolve ID --as declined", JobResolution::Declined),
        ("jobs resolve ID --as resend", JobResolution::Resend),
        ("jobs cancel ID", JobResolution::Cancel),
        ("dlq replay ID", JobResolution::Replay),
        ("dlq discard ID --yes", JobResolution::Discard),
    ];
    let meant: Vec<[String; 3]> = commands
        .iter()
        .map(|(command, verdict)| {
            [format!("sluicegate {command}"), verdict.required_state().to_owned(), verdict.resulting_state().to_owned()]
        })
        .collect();
    assert_eq!(documented, meant);
}
