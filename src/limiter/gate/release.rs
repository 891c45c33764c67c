//! Permits that were used or given back, as the settlements of one call.
//!
//! Refuses to settle for an account or reference that the settings no longer count, and a slot of a limit that they no
//! longer have.

use tokio::time::Instant;

use super::permit::{PendingRelease, PendingReleaseKind};
use crate::domain::permit_protocol::{PermitRelease, ReleaseKind};
use crate::domain::permit_release::{self, EndedPermit};
use crate::domain::quota_spec::QuotaSpec;

/// The settlements of a call that departs now.
pub(super) fn permit_releases(settled: &[PendingRelease], spec: &QuotaSpec, departed: Instant) -> Vec<PermitRelease> {
    let names: Vec<&str> = spec.provider_limits().into_iter().map(|index| spec.limit_name(index)).collect();
    let ended = settled.iter().map(|one| {
        let fate = match &one.kind {
            PendingReleaseKind::Used { at } => ReleaseKind::Used { age: departed.saturating_duration_since(*at) },
            PendingReleaseKind::Unused { origins } => {
                let of = |name: &&str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
                ReleaseKind::Unused { origins: names.iter().map(of).collect() }
            }
        };
        EndedPermit { call: one.call, holder: &one.scope, cost: one.cost, release_kind: fate }
    });
    permit_release::group_releases(ended, |of| (of.kind(), of.subjects_to_release(spec)))
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
            even_pacing: false,
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_secs(1),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let departed = Instant::now() + Duration::from_secs(10);
        let answered = |call, age_us| PendingRelease {
            call,
            cost: 1,
            scope: super::super::wait_queue::CountingScope::default(),
            kind: PendingReleaseKind::Used { at: departed.checked_sub(Duration::from_micros(age_us)).unwrap() },
        };
        let given_back = PendingRelease {
            call: 2,
            cost: 3,
            scope: super::super::wait_queue::CountingScope::default(),
            kind: PendingReleaseKind::Unused { origins: [("b".into(), 7), ("a".into(), 5)].into() },
        };
        let all = [answered(1, 2_100), given_back, answered(1, 2_900), answered(2, 2_500), answered(1, 3_000)];
        let found: Vec<(u64, u32, ReleaseKind)> =
            permit_releases(&all, &spec, departed).into_iter().map(|it| (it.call, it.cost, it.release_kind)).collect();
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
