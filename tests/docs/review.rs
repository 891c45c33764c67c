//! The table of decisions is that of the code.

use sluicegate::ledger::operator::Verdict;

use crate::page::{Page, plain};

#[test]
fn every_verdict_is_in_the_table_with_its_states() {
    let rows = Page::read("docs/review.md").table("# Reviews and dead payments", "command");
    let documented: Vec<[String; 3]> =
        rows.iter().map(|row| [&row[0], &row[1], &row[2]].map(|cell| plain(cell).to_owned())).collect();
    let commands = [
        ("jobs resolve ID --as succeeded", Verdict::Succeeded { reference: None }),
        ("jobs resolve ID --as declined", Verdict::Declined),
        ("jobs resolve ID --as resend", Verdict::Resend),
        ("jobs cancel ID", Verdict::Cancel),
        ("dlq replay ID", Verdict::Replay),
        ("dlq discard ID --yes", Verdict::Discard),
    ];
    let meant: Vec<[String; 3]> = commands
        .iter()
        .map(|(command, verdict)| [format!("sluicegate {command}"), verdict.from().to_owned(), verdict.to().to_owned()])
        .collect();
    assert_eq!(documented, meant);
}
