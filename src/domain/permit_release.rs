//! Releases of ended permits, grouped for one call to the limiter.
//!
//! Permits that ended alike are one release. Responses of one millisecond share the age of the youngest, so that no
//! slot is freed too early. Unused permits share their slots' instants. The order does not depend on chance: the log
//! takes responses oldest first.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use super::permit_protocol::{CallKind, PermitRelease, ReleaseKind, SlotInstant, Subject};

/// One ended permit; `O` identifies its holder.
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

/// Groups the releases: responses first, oldest first, then unused permits. `counted` returns the kind and subjects of
/// a holder.
pub fn group_releases<O: Clone + Eq + Hash>(
    ended: impl IntoIterator<Item = EndedPermit<O>>,
    counted: impl Fn(&O) -> (CallKind, Vec<Subject>),
) -> Vec<PermitRelease> {
    let mut indices: HashMap<(u64, O, ReleaseGroup), usize> = HashMap::new();
    let mut releases: Vec<PermitRelease> = Vec::new();
    for EndedPermit { call, holder, cost, release_kind } in ended {
        let group = match &release_kind {
            ReleaseKind::Used { age } => ReleaseGroup::AgeMs(age.as_millis()),
            ReleaseKind::Unused { origins } => ReleaseGroup::Origins(origins.clone()),
        };
        let index = *indices.entry((call, holder.clone(), group)).or_insert(releases.len());
        let Some(release) = releases.get_mut(index) else {
            let (kind, subjects) = counted(&holder);
            releases.push(PermitRelease { call, cost, kind, subjects, release_kind });
            continue;
        };
        release.cost = release.cost.saturating_add(cost);
        let group_kind = &mut release.release_kind;
        if let (ReleaseKind::Used { age: youngest }, ReleaseKind::Used { age }) = (group_kind, release_kind) {
            *youngest = age.min(*youngest);
        }
    }
    releases.sort_by_key(|release| Reverse(sort_key(release)));
    releases
}

fn sort_key(release: &PermitRelease) -> (bool, Duration, u64) {
    match release.release_kind {
        ReleaseKind::Used { age } => (true, age, release.call),
        ReleaseKind::Unused { .. } => (false, Duration::ZERO, release.call),
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
        // Ended permits as call, holder, cost and release kind; then the expected releases.
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
            let ended = ended.into_iter().map(|(call, holder, cost, release_kind)| EndedPermit {
                call,
                holder,
                cost,
                release_kind,
            });
            let subject = |holder: &char| Subject { key: holder.to_string(), limits: Vec::new() };
            let found = group_releases(ended, |holder| (CallKind::Charge, vec![subject(holder)]));
            let expected: Vec<PermitRelease> = expected
                .into_iter()
                .map(|(call, holder, cost, release_kind)| PermitRelease {
                    call,
                    cost,
                    kind: CallKind::Charge,
                    subjects: vec![subject(&holder)],
                    release_kind,
                })
                .collect();
            assert_eq!(found, expected, "{what}");
        }
    }
}
