//! What proves that the database went back, as a table and as random histories of a payment.

use proptest::prelude::*;

use super::*;

fn mark(fence: i64, number: u32, end: End) -> Mark {
    Mark { fence, number, end }
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn id(number: usize) -> JobId {
    JobId::new(format!("p{number}")).unwrap()
}

fn commit(mark: Mark, progress: Progress<&'static str>, at: Duration) -> Commit<&'static str> {
    Commit { provider: ProviderName::new("acme").unwrap(), mark, progress, at }
}

#[test]
fn earlier_row_is_proof_and_later_row_is_none() {
    use End::{Decidable, Final, Open};
    for (remembered, row, is_proof, why) in [
        (mark(7, 2, Open), None, true, "no such payment"),
        (mark(7, 2, Open), Some(mark(7, 2, Open)), false, "the same"),
        (mark(7, 2, Open), Some(mark(6, 2, Open)), true, "a lower token"),
        (mark(7, 2, Open), Some(mark(7, 1, Open)), true, "a lower number"),
        (mark(7, 2, Open), Some(mark(8, 2, Final)), false, "another worker went on"),
        (mark(7, 2, Open), Some(mark(7 + CLAIMS_MAX + 1, 2, Open)), true, "recorded a second time"),
        (mark(7, 2, Final), Some(mark(7, 2, Open)), true, "its end is lost"),
        (mark(7, 2, Final), Some(mark(8, 2, Open)), true, "a payment that ended for good is open"),
        (mark(7, 2, Decidable), Some(mark(7, 2, Open)), true, "no decision keeps the token"),
        (mark(7, 2, Decidable), Some(mark(8, 2, Open)), false, "an operator sends it again"),
    ] {
        assert_eq!(remembered.is_missing_in(row), is_proof, "{why}");
    }
}

#[test]
fn each_finding_has_its_repair() {
    let open = Some(mark(1, 0, End::Open));
    for (progress, row, expected) in [
        (Progress::Recorded, None, Repair::ReportMissing),
        (Progress::Sent, None, Repair::ReportMissing),
        (Progress::Recorded, open, Repair::Nothing),
        (Progress::Sent, open, Repair::MakeUnknown),
        (Progress::Ended("paid"), open, Repair::WriteAgain(&"paid")),
        (Progress::Ended("paid"), Some(mark(1, 0, End::Final)), Repair::Nothing),
        (Progress::Sent, Some(mark(1, 0, End::Decidable)), Repair::Nothing),
    ] {
        assert_eq!(repair(&progress, row), expected, "{progress:?} {row:?}");
    }
}

#[test]
fn lanes_are_held_by_their_retention() {
    for (retention, oldest_lost, held) in [
        (None, None, true),
        (None, Some(s(1)), true),
        (Some(s(600)), None, false),
        (Some(s(600)), Some(s(300)), false),
        (Some(s(600)), Some(s(301)), true),
    ] {
        assert_eq!(must_hold(retention, oldest_lost), held, "{retention:?} {oldest_lost:?}");
    }
}

#[test]
fn memory_forgets_by_age_and_count() {
    let mut memory = CommitMemory::default();
    let sent = |at| commit(mark(1, 1, End::Open), Progress::Sent, at);
    assert!(memory.remember(id(0), sent(s(0))) && memory.remember(id(1), sent(s(1))));
    assert_eq!(memory.marks(REMEMBERED_FOR).len(), 2);
    assert_eq!(memory.marks(REMEMBERED_FOR + s(1)), [(id(1), mark(1, 1, End::Open))]);
    let recorded = commit(mark(0, 0, End::Open), Progress::Recorded, s(1));
    for number in 0..RECORDED_MAX + 5 {
        assert!(memory.remember(id(10 + number), recorded.clone()));
    }
    assert_eq!(memory.marks(s(1)).len(), RECORDED_MAX);
    for number in 0..REMEMBERED_MAX {
        assert!(memory.remember(id(1_000_000 + number), sent(s(1))));
    }
    let marks = memory.marks(s(1));
    // A read makes room for one more.
    assert_eq!((marks.len(), &marks[0].0), (REMEMBERED_MAX - 1, &id(1_000_001)));
}

#[test]
fn contradicted_commit_stays_as_the_proof() {
    let mut memory = CommitMemory::default();
    assert!(memory.remember(id(1), commit(mark(9, 1, End::Open), Progress::Sent, s(0))));
    let ended = commit(mark(9, 1, End::Final), Progress::Ended("paid"), s(1));
    assert!(memory.remember(id(1), ended.clone()));
    // The same worker records the payment once more, because its row is gone.
    assert!(!memory.remember(id(1), commit(mark(1, 0, End::Open), Progress::Recorded, s(2))));
    assert_eq!(memory.commit_of(&id(1)), Some(&ended));
    assert_eq!(memory.forget(&id(1)), Some(ended));
    assert!(memory.marks(s(2)).is_empty());
}

/// One commit about a payment that changes its mark.
fn later(before: Mark, step: u8) -> Mark {
    let Mark { fence, number, end } = before;
    match (end, step % 4) {
        (End::Open, 0) => mark(fence + 1, number, End::Open),
        (End::Open, 1) => mark(fence, number + 1, End::Open),
        (End::Open, 2) => mark(fence, number, End::Final),
        (End::Open, _) => mark(fence, number, End::Decidable),
        (End::Decidable, _) => mark(fence + 1, number, End::Open),
        (End::Final, _) => before,
    }
}

proptest! {
    /// Whatever happens to a payment, no later row contradicts a commit, and each earlier row does.
    #[test]
    fn random_histories_prove_each_loss_and_nothing_else(
        first in 0_i64..1 << 62,
        steps in prop::collection::vec(any::<u8>(), 1..12),
    ) {
        let mut history = vec![mark(first, 0, End::Open)];
        for step in steps {
            let next = later(history[history.len() - 1], step);
            if next != history[history.len() - 1] {
                history.push(next);
            }
        }
        for (at, commit) in history.iter().enumerate() {
            prop_assert!(commit.is_missing_in(None));
            for (row_at, row) in history.iter().enumerate() {
                prop_assert_eq!(commit.is_missing_in(Some(*row)), row_at < at, "{:?} in {:?}", commit, row);
            }
        }
    }
}
