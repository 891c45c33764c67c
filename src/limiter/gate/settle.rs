//! Permits that were used or given back, as the settlements of one call.
//!
//! Answers of the same call and millisecond are one settlement, with the age of the youngest: a slot is freed no earlier.
//! Refuses to settle for an account or reference that the settings no longer count.

use std::collections::HashMap;

use tokio::time::Instant;

use super::permit::{Settled, SettledFate};
use crate::domain::decision::{Fate, Settlement, SlotInstant};
use crate::domain::quota_spec::QuotaSpec;

/// What permits must have in common to be settled together.
#[derive(PartialEq, Eq, Hash)]
struct Alike<'a> {
    call: u64,
    of: &'a super::line::Of,
    fate: Same,
}

#[derive(PartialEq, Eq, Hash)]
enum Same {
    AgeMs(u128),
    Origins(Vec<SlotInstant>),
}

/// The settlements of a call that departs now, oldest answer first, so that each enters the log at its own instant.
pub(super) fn settlements(settled: &[Settled], spec: &QuotaSpec, departed: Instant) -> Vec<Settlement> {
    let names: Vec<&str> = spec.provider_limits().into_iter().map(|index| spec.limit_name(index)).collect();
    let mut alike: HashMap<Alike<'_>, Settlement> = HashMap::new();
    for one in settled {
        let (same, fate) = match &one.fate {
            SettledFate::Answered { at } => {
                let age = departed.saturating_duration_since(*at);
                (Same::AgeMs(age.as_millis()), Fate::Used { age })
            }
            SettledFate::NotSent { origins } => {
                let of = |name: &&str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
                let origins: Vec<SlotInstant> = names.iter().map(of).collect();
                (Same::Origins(origins.clone()), Fate::NotSent { origins })
            }
        };
        let settlement = alike.entry(Alike { call: one.call, of: &one.of, fate: same }).or_insert_with(|| Settlement {
            call: one.call,
            cost: 0,
            kind: one.of.kind(),
            subjects: one.of.subjects_to_settle(spec),
            fate: fate.clone(),
        });
        settlement.cost = settlement.cost.saturating_add(one.cost);
        if let (Fate::Used { age: youngest }, Fate::Used { age }) = (&mut settlement.fate, fate) {
            *youngest = age.min(*youngest);
        }
    }
    let mut settlements: Vec<Settlement> = alike.into_values().collect();
    settlements.sort_by_key(|settlement| std::cmp::Reverse(order(settlement)));
    settlements
}

/// Answers by age, then returns; calls in their order.
fn order(settlement: &Settlement) -> (std::time::Duration, u64) {
    match settlement.fate {
        Fate::Used { age } => (age, settlement.call),
        Fate::NotSent { .. } => (std::time::Duration::ZERO, settlement.call),
    }
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
