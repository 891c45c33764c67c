//! The kept answers as tables, and as random histories of a ledger that refuses some or all.

use proptest::prelude::*;

use super::*;

const WORKERS: usize = 4;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Writes each kept answer that is due, until none is; the ledger answers.
fn write_due(kept: &mut KeptAnswers, now: Duration, accepts: impl Fn(Ticket, KeptWrite) -> bool) -> Vec<KeptWrite> {
    let mut written = Vec::new();
    for ticket in kept.kept.keys().copied().collect::<Vec<_>>() {
        if let KeptStep::Write(write) = kept.next(ticket, now) {
            written.push(write);
            match accepts(ticket, write) {
                true => kept.accept(Some(ticket), now),
                false => {
                    kept.refuse(ticket, now);
                }
            }
        }
    }
    written
}

#[test]
fn lane_begins_nothing_while_no_answer_is_accepted() {
    let mut kept = KeptAnswers::default();
    assert_eq!(kept.admit(WORKERS, 0, s(0)), Admission::Free);
    let tickets = [kept.keep(s(0)), kept.keep(s(0))];
    assert_eq!(kept.gate(WORKERS, s(1)), LaneGate::Closed(s(30)));
    // One is written at a time, the one that was tried least.
    assert_eq!(kept.next(tickets[0], s(1)), KeptStep::Write(KeptWrite::Answer));
    assert_eq!(kept.next(tickets[1], s(1)), KeptStep::Wait(None));
    assert_eq!(kept.refuse(tickets[0], s(1)), KeptStage::Retried);
    assert!(matches!(kept.next(tickets[1], s(1)), KeptStep::Wait(Some(at)) if at > s(1)));
    assert_eq!(kept.next(tickets[1], s(7)), KeptStep::Write(KeptWrite::Answer));
    kept.accept(Some(tickets[1]), s(7));
    // The other one may follow at once, and one payment is the next probe.
    assert_eq!(kept.next(tickets[0], s(7)), KeptStep::Write(KeptWrite::Answer));
    let Admission::Probe(probe) = kept.admit(WORKERS, 0, s(7)) else { panic!("{kept:?}") };
    assert_eq!(kept.admit(WORKERS, 0, s(7)), Admission::Refused);
    kept.end_probe(probe);
    assert!(matches!(kept.admit(WORKERS, 0, s(7)), Admission::Probe(_)), "its request was not sent");
    kept.accept(None, s(8));
    assert_eq!((kept.gate(WORKERS, s(8)), kept.count()), (LaneGate::Open, 1));
}

#[test]
fn failed_probe_doubles_the_wait_for_the_next() {
    let mut kept = KeptAnswers::default();
    let mut now = s(0);
    kept.keep(now);
    kept.keep(now);
    let mut waits = Vec::new();
    for _ in 0..7 {
        let LaneGate::Closed(until) = kept.gate(100, now) else { panic!("{kept:?}") };
        waits.push((until - now).as_secs());
        now = until;
        assert!(matches!(kept.admit(100, 0, now), Admission::Probe(_)));
        kept.keep(now);
    }
    assert_eq!(waits, [30, 60, 120, 240, 480, 900, 900]);
    kept.accept(None, now);
    kept.keep(now);
    assert_eq!(kept.gate(100, now), LaneGate::Open, "a single refusal");
    kept.keep(now);
    assert_eq!(kept.gate(100, now), LaneGate::Closed(now + s(30)));
}

#[test]
fn answer_is_written_as_review_after_three_refusals_beside_others() {
    for (others, review_is_accepted, expected) in [
        (false, false, KeptStage::Retried),
        (true, true, KeptStage::Review),
        (true, false, KeptStage::Aside(KeptWrite::Answer)),
    ] {
        let mut kept = KeptAnswers::default();
        let poison = kept.keep(s(0));
        let mut stages = Vec::new();
        for second in 1..20 {
            if others {
                kept.accept(None, s(second * 10));
            }
            let KeptStep::Write(write) = kept.next(poison, s(second * 10)) else { panic!("{kept:?}") };
            if write == KeptWrite::Review && review_is_accepted {
                break;
            }
            stages.push(kept.refuse(poison, s(second * 10)));
            if matches!(stages.last(), Some(KeptStage::Aside(_))) {
                break;
            }
        }
        assert_eq!(stages.last(), Some(&expected), "{stages:?}");
        assert_eq!(others, kept.gate(WORKERS, s(500)) == LaneGate::Open, "the lane goes on: {kept:?}");
    }
}

#[test]
fn answer_set_aside_is_written_as_both_in_turn() {
    let mut kept = KeptAnswers::default();
    let poison = kept.keep(s(0));
    for second in 1..=3 {
        kept.accept(None, s(second * 10));
        kept.next(poison, s(second * 10));
        kept.refuse(poison, s(second * 10));
    }
    let mut writes = Vec::new();
    for second in 4..20 {
        writes.extend(write_due(&mut kept, s(second * 10), |_, _| false));
    }
    let (answer, review) = (KeptWrite::Answer, KeptWrite::Review);
    assert_eq!(writes[..4], [answer, review, answer, review]);
    assert_eq!(kept.gate(WORKERS, s(200)), LaneGate::Open);
    // As many as the lane has workers close it: its memory is bounded.
    for _ in 1..WORKERS {
        kept.keep(s(200));
        kept.accept(None, s(200));
    }
    assert_eq!(kept.admit(WORKERS, 0, s(200)), Admission::Refused);
}

#[test]
fn lane_goes_on_after_the_last_kept_answer_is_forgotten() {
    let mut kept = KeptAnswers::default();
    let tickets = [kept.keep(s(0)), kept.keep(s(0))];
    assert_eq!(kept.next(tickets[0], s(1)), KeptStep::Write(KeptWrite::Answer));
    tickets.into_iter().for_each(|ticket| kept.forget(ticket, s(1)));
    assert!(matches!(kept.admit(WORKERS, 0, s(1)), Admission::Probe(_)));
}

/// What the ledger accepts during a step of a random history.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ledger {
    All,
    Nothing,
    /// All but every fifth answer, which it never accepts.
    AllButSome,
}

proptest! {
    /// No answer is lost, no payment becomes a review while nothing else is accepted, the memory is bounded, and the
    /// lane is open again once the ledger accepts everything.
    #[test]
    fn random_histories_keep_every_answer(
        steps in prop::collection::vec((prop::sample::select(vec![Ledger::All, Ledger::Nothing, Ledger::AllButSome]), 1..40_u64, 0..6_usize), 1..60)
    ) {
        let mut kept = KeptAnswers::default();
        let (mut now, mut in_flight, mut begun, mut accepted) = (s(0), Vec::new(), 0_u64, 0_u64);
        let ends = std::iter::repeat_n((Ledger::All, 60, 2), 4);
        for (ledger, seconds, requests) in steps.into_iter().chain(ends) {
            for _ in 0..requests {
                let is_open = kept.gate(WORKERS, now) == LaneGate::Open;
                if in_flight.len() == WORKERS {
                    break;
                }
                match kept.admit(WORKERS, in_flight.len(), now) {
                    Admission::Free => prop_assert!(is_open),
                    Admission::Probe(_) => prop_assert!(!is_open),
                    Admission::Refused => continue,
                }
                begun += 1;
                in_flight.push(begun);
            }
            let accepts = |number: u64| match ledger {
                Ledger::All => true,
                Ledger::Nothing => false,
                Ledger::AllButSome => !number.is_multiple_of(5),
            };
            for number in in_flight.drain(..) {
                if accepts(number) {
                    kept.accept(None, now);
                    accepted += 1;
                } else {
                    kept.keep(now);
                }
            }
            for _ in 0..seconds {
                now += s(1);
                let before = kept.count();
                let reviews = write_due(&mut kept, now, |ticket, _| accepts(ticket.0));
                accepted += (before - kept.count()) as u64;
                prop_assert!(ledger != Ledger::Nothing || kept.count() == before);
                prop_assert!(accepted > 0 || !reviews.contains(&KeptWrite::Review));
            }
            prop_assert!(kept.count() <= WORKERS, "{} answers", kept.count());
        }
        prop_assert_eq!((kept.count() as u64, accepted), (0, begun));
        prop_assert_eq!(kept.gate(WORKERS, now), LaneGate::Open);
    }
}
