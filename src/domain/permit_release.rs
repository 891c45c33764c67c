//! What became of permits, grouped as the settlements of one call.
//!
//! What ended alike is one settlement: answers of one millisecond with the age of the youngest, so that a slot is freed no
//! earlier, and returns with the same slots. Refuses to let chance order them: the log takes answers oldest first.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use super::permit_protocol::{CallKind, PermitRelease, ReleaseKind, SlotInstant, Subject};

/// One permit's end. `of`: whose it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedPermit<O> {
    /// The call that granted it.
    pub call: u64,
    pub holder: O,
    pub cost: u32,
    pub release_kind: ReleaseKind,
}

#[derive(PartialEq, Eq, Hash)]
enum ReleaseGroup {
    AgeMs(u128),
    Origins(Vec<SlotInstant>),
}

/// Answers, oldest first, then returns. `counted` says what counts the permits of such a one.
pub fn group_releases<O: Clone + Eq + Hash>(
    ended: impl IntoIterator<Item = EndedPermit<O>>,
    counted: impl Fn(&O) -> (CallKind, Vec<Subject>),
) -> Vec<PermitRelease> {
    let mut places: HashMap<(u64, O, ReleaseGroup), usize> = HashMap::new();
    let mut settlements: Vec<PermitRelease> = Vec::new();
    for EndedPermit { call, holder: of, cost, release_kind: fate } in ended {
        let same = match &fate {
            ReleaseKind::Used { age } => ReleaseGroup::AgeMs(age.as_millis()),
            ReleaseKind::Unused { origins } => ReleaseGroup::Origins(origins.clone()),
        };
        let place = *places.entry((call, of.clone(), same)).or_insert(settlements.len());
        let Some(settlement) = settlements.get_mut(place) else {
            let (kind, subjects) = counted(&of);
            settlements.push(PermitRelease { call, cost, kind, subjects, release_kind: fate });
            continue;
        };
        settlement.cost = settlement.cost.saturating_add(cost);
        if let (ReleaseKind::Used { age: youngest }, ReleaseKind::Used { age }) = (&mut settlement.release_kind, fate) {
            *youngest = age.min(*youngest);
        }
    }
    settlements.sort_by_key(|settlement| Reverse(sort_key(settlement)));
    settlements
}

fn sort_key(settlement: &PermitRelease) -> (bool, Duration, u64) {
    match settlement.release_kind {
        ReleaseKind::Used { age } => (true, age, settlement.call),
        ReleaseKind::Unused { .. } => (false, Duration::ZERO, settlement.call),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(us: u64) -> ReleaseKind {
        ReleaseKind::Used { age: Duration::from_micros(us) }
    }

    fn unused(origin: SlotInstant) -> ReleaseKind {
        ReleaseKind::Unused { origins: vec![origin] }
    }

    #[test]
    fn equal_releases_are_grouped() {
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
                vec![(1, 'a', 1, unused(7)), (1, 'a', 2, unused(7)), (1, 'a', 1, unused(8))],
                vec![(1, 'a', 3, unused(7)), (1, 'a', 1, unused(8))],
            ),
            (
                "returns last",
                vec![(9, 'a', 1, unused(7)), (1, 'a', 1, used(0))],
                vec![(1, 'a', 1, used(0)), (9, 'a', 1, unused(7))],
            ),
            (
                "more than can be counted",
                vec![(1, 'a', u32::MAX, used(1)), (1, 'a', 1, used(1))],
                vec![(1, 'a', u32::MAX, used(1))],
            ),
        ] {
            let ended = ended.into_iter().map(|(call, of, cost, fate)| EndedPermit {
                call,
                holder: of,
                cost,
                release_kind: fate,
            });
            let subject = |of: &char| Subject { key: of.to_string(), limits: Vec::new() };
            let found = group_releases(ended, |of| (CallKind::Charge, vec![subject(of)]));
            let expected: Vec<PermitRelease> = expected
                .into_iter()
                .map(|(call, of, cost, fate)| PermitRelease {
                    call,
                    cost,
                    kind: CallKind::Charge,
                    subjects: vec![subject(&of)],
                    release_kind: fate,
                })
                .collect();
            assert_eq!(found, expected, "{what}");
        }
    }
}
