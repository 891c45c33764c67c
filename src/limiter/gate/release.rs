//! The releases of one limiter call, grouped from the permits that were used or returned unused.
//!
//! It leaves out accounts and references that the settings no longer count, and slots of limits that no longer exist.

use std::sync::Arc;

use tokio::time::Instant;

use super::wait_queue::CountingScope;
use crate::domain::permit_protocol::{EndedPermit, PermitRelease, ReleaseKind, group_releases};
use crate::domain::quota_spec::QuotaSpec;

/// An ended permit whose slots are to be released.
#[derive(Debug)]
pub(crate) struct PendingRelease {
    pub call: u64,
    pub cost: u32,
    pub scope: CountingScope,
    pub kind: PendingReleaseKind,
}

#[derive(Debug)]
pub(crate) enum PendingReleaseKind {
    Used { at: Instant },
    Unused { origins: Arc<[(String, u64)]> },
}

/// The releases of a call that is sent at this instant.
pub(super) fn permit_releases(pending: &[PendingRelease], spec: &QuotaSpec, sent_at: Instant) -> Vec<PermitRelease> {
    let names = spec.provider_counter_names();
    let ended = pending.iter().map(|release| {
        let release_kind = match &release.kind {
            PendingReleaseKind::Used { at } => ReleaseKind::Used { age: sent_at.saturating_duration_since(*at) },
            PendingReleaseKind::Unused { origins } => {
                let origin_of =
                    |name: &&str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
                ReleaseKind::Unused { origins: names.iter().map(origin_of).collect() }
            }
        };
        EndedPermit { call: release.call, holder: &release.scope, cost: release.cost, release_kind }
    });
    group_releases(ended, |scope| (scope.kind(), scope.subjects_to_release(spec)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::provider::{ProviderName, StoreDown};
    use crate::domain::quota_spec::LimitSpec;
    use std::time::Duration;

    #[test]
    fn answers_of_one_millisecond_are_one_release() {
        let spec = QuotaSpec {
            quota: ProviderName::new("q").unwrap(),
            version: 1,
            limits: vec![LimitSpec::sliding_log("a", 10, Duration::from_secs(1))],
            account_rules: Vec::new(),
            pacing: None,
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_secs(1),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let sent_at = Instant::now() + Duration::from_secs(10);
        let answered = |call, age_us| PendingRelease {
            call,
            cost: 1,
            scope: CountingScope::default(),
            kind: PendingReleaseKind::Used { at: sent_at.checked_sub(Duration::from_micros(age_us)).unwrap() },
        };
        let unused = PendingRelease {
            call: 2,
            cost: 3,
            scope: CountingScope::default(),
            kind: PendingReleaseKind::Unused { origins: [("b".into(), 7), ("a".into(), 5)].into() },
        };
        let all = [answered(1, 2_100), unused, answered(1, 2_900), answered(2, 2_500), answered(1, 3_000)];
        let found: Vec<(u64, u32, ReleaseKind)> = permit_releases(&all, &spec, sent_at)
            .into_iter()
            .map(|end| (end.call, end.cost, end.release_kind))
            .collect();
        let used = |us| ReleaseKind::Used { age: Duration::from_micros(us) };
        let expected = [
            (1, 1, used(3_000)),
            (2, 1, used(2_500)),
            (1, 2, used(2_100)),
            (2, 3, ReleaseKind::Unused { origins: vec![5] }),
        ];
        assert_eq!(found, expected);
    }
}
