//! Permits that were used or given back, as the settlements of one call.
//!
//! Refuses to settle for an account or reference that the settings no longer count, and a slot of a limit that they no
//! longer have.

use tokio::time::Instant;

use super::permit::{Settled, SettledFate};
use crate::domain::decision::{Fate, Settlement};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::settlement::{self, Ended};

/// The settlements of a call that departs now.
pub(super) fn settlements(settled: &[Settled], spec: &QuotaSpec, departed: Instant) -> Vec<Settlement> {
    let names: Vec<&str> = spec.provider_limits().into_iter().map(|index| spec.limit_name(index)).collect();
    let ended = settled.iter().map(|one| {
        let fate = match &one.fate {
            SettledFate::Answered { at } => Fate::Used { age: departed.saturating_duration_since(*at) },
            SettledFate::NotSent { origins } => {
                let of = |name: &&str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
                Fate::NotSent { origins: names.iter().map(of).collect() }
            }
        };
        Ended { call: one.call, of: &one.of, cost: one.cost, fate }
    });
    settlement::settlements(ended, |of| (of.kind(), of.subjects_to_settle(spec)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::provider::{ProviderName, StoreDown};
    use crate::domain::quota_spec::LimitSpec;
    use std::time::Duration;

    #[test]
    fn answers_of_one_millisecond_are_one_settlement_with_the_youngest_age() {
        let spec = QuotaSpec {
            quota: ProviderName::new("q").unwrap(),
            version: 1,
            limits: vec![LimitSpec::sliding_log("a", 10, Duration::from_secs(1))],
            account_rules: Vec::new(),
            even: false,
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_secs(1),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let departed = Instant::now() + Duration::from_secs(10);
        let answered = |call, age_us| Settled {
            call,
            cost: 1,
            of: super::super::line::Of::default(),
            fate: SettledFate::Answered { at: departed.checked_sub(Duration::from_micros(age_us)).unwrap() },
        };
        let given_back = Settled {
            call: 2,
            cost: 3,
            of: super::super::line::Of::default(),
            fate: SettledFate::NotSent { origins: [("b".into(), 7), ("a".into(), 5)].into() },
        };
        let all = [answered(1, 2_100), given_back, answered(1, 2_900), answered(2, 2_500), answered(1, 3_000)];
        let found: Vec<(u64, u32, Fate)> =
            settlements(&all, &spec, departed).into_iter().map(|it| (it.call, it.cost, it.fate)).collect();
        let used = |us| Fate::Used { age: Duration::from_micros(us) };
        let expected =
            [(1, 1, used(3_000)), (2, 1, used(2_500)), (1, 2, used(2_100)), (2, 3, Fate::NotSent { origins: vec![5] })];
        assert_eq!(found, expected);
    }
}
