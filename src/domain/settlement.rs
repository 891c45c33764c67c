//! What became of permits, grouped as the settlements of one call.
//!
//! What ended alike is one settlement: answers of one millisecond with the age of the youngest, so that a slot is freed no
//! earlier, and returns with the same slots. Refuses to let chance order them: the log takes answers oldest first.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use super::decision::{CallKind, Fate, Settlement, SlotInstant, Subject};

/// One permit's end. `of`: whose it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended<O> {
    /// The call that granted it.
    pub call: u64,
    pub of: O,
    pub cost: u32,
    pub fate: Fate,
}

#[derive(PartialEq, Eq, Hash)]
enum Same {
    AgeMs(u128),
    Origins(Vec<SlotInstant>),
}

/// Answers, oldest first, then returns. `counted` says what counts the permits of such a one.
pub fn settlements<O: Clone + Eq + Hash>(
    ended: impl IntoIterator<Item = Ended<O>>,
    counted: impl Fn(&O) -> (CallKind, Vec<Subject>),
) -> Vec<Settlement> {
    let mut places: HashMap<(u64, O, Same), usize> = HashMap::new();
    let mut settlements: Vec<Settlement> = Vec::new();
    for Ended { call, of, cost, fate } in ended {
        let same = match &fate {
            Fate::Used { age } => Same::AgeMs(age.as_millis()),
            Fate::NotSent { origins } => Same::Origins(origins.clone()),
        };
        let place = *places.entry((call, of.clone(), same)).or_insert(settlements.len());
        let Some(settlement) = settlements.get_mut(place) else {
            let (kind, subjects) = counted(&of);
            settlements.push(Settlement { call, cost, kind, subjects, fate });
            continue;
        };
        settlement.cost = settlement.cost.saturating_add(cost);
        if let (Fate::Used { age: youngest }, Fate::Used { age }) = (&mut settlement.fate, fate) {
            *youngest = age.min(*youngest);
        }
    }
    settlements.sort_by_key(|settlement| Reverse(order(settlement)));
    settlements
}

fn order(settlement: &Settlement) -> (bool, Duration, u64) {
    match settlement.fate {
        Fate::Used { age } => (true, age, settlement.call),
        Fate::NotSent { .. } => (false, Duration::ZERO, settlement.call),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(us: u64) -> Fate {
        Fate::Used { age: Duration::from_micros(us) }
    }

    fn back(origin: SlotInstant) -> Fate {
        Fate::NotSent { origins: vec![origin] }
    }

    #[test]
    fn what_ended_alike_is_settled_together() {
        // What ended, as call, whose, cost and fate; then the settlements.
        for (what, ended, expected) in [
            (
                "one millisecond, the youngest age",
                vec![(1, 'a', 1, used(2_900)), (1, 'a', 2, used(2_100))],
                vec![(1, 'a', 3, used(2_100))],
            ),
            (
                "another millisecond, oldest first",
                vec![(1, 'a', 1, used(2_999)), (1, 'a', 1, used(3_000))],
                vec![(1, 'a', 1, used(3_000)), (1, 'a', 1, used(2_999))],
            ),
            (
                "of two calls",
                vec![(1, 'a', 1, used(2_100)), (2, 'a', 1, used(2_500))],
                vec![(2, 'a', 1, used(2_500)), (1, 'a', 1, used(2_100))],
            ),
            (
                "of two",
                vec![(1, 'a', 1, used(2_100)), (1, 'b', 1, used(2_100))],
                vec![(1, 'a', 1, used(2_100)), (1, 'b', 1, used(2_100))],
            ),
            (
                "equal returns",
                vec![(1, 'a', 1, back(7)), (1, 'a', 2, back(7)), (1, 'a', 1, back(8))],
                vec![(1, 'a', 3, back(7)), (1, 'a', 1, back(8))],
            ),
            (
                "returns last",
                vec![(9, 'a', 1, back(7)), (1, 'a', 1, used(0))],
                vec![(1, 'a', 1, used(0)), (9, 'a', 1, back(7))],
            ),
            (
                "more than can be counted",
                vec![(1, 'a', u32::MAX, used(1)), (1, 'a', 1, used(1))],
                vec![(1, 'a', u32::MAX, used(1))],
            ),
        ] {
            let ended = ended.into_iter().map(|(call, of, cost, fate)| Ended { call, of, cost, fate });
            let subject = |of: &char| Subject { key: of.to_string(), limits: Vec::new() };
            let found = settlements(ended, |of| (CallKind::Charge, vec![subject(of)]));
            let expected: Vec<Settlement> = expected
                .into_iter()
                .map(|(call, of, cost, fate)| Settlement {
                    call,
                    cost,
                    kind: CallKind::Charge,
                    subjects: vec![subject(&of)],
                    fate,
                })
                .collect();
            assert_eq!(found, expected, "{what}");
        }
    }
}
