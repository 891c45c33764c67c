use std::time::Duration;

use super::*;
use crate::domain::decision::{CallKind, Fate, Settlement};
use crate::domain::provider::{ProviderName, StoreDown};
use crate::domain::quota_spec::LimitSpec;

const START: Micros = Micros(1_800_000_000_000_000);

fn spec(version: i64, max_requests: u32, window: Duration) -> QuotaSpec {
    QuotaSpec {
        quota: ProviderName::new("p").unwrap(),
        version,
        limits: vec![LimitSpec::sliding_log("limit", max_requests, window)],
        account_rules: Vec::new(),
        even: false,
        grant_jitter: None,
        hold_max: Duration::from_secs(3),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        handover: Duration::ZERO,
    }
}

fn call(number: u64, wants: u32, settlements: Vec<Settlement>) -> Call {
    let wants = vec![Want::charges(wants, 1)];
    let rebuild = Some(Rebuild { born: START, ended: Vec::new(), open: 0 });
    Call { incarnation: 1, number, wants, settlements, pause: None, rebuild, distrust: None, run_id: "run".into() }
}

fn settlement(call: u64, cost: u32, fate: Fate) -> Settlement {
    Settlement { call, cost, kind: CallKind::Charge, subjects: Vec::new(), fate }
}

/// A quota that is warm at once, with `used` calls answered at `START`.
fn used(spec: &QuotaSpec, used: u32) -> Quota {
    let mut quota = Quota::default();
    quota.call(START, spec, &call(1, 0, Vec::new()));
    assert_eq!(quota.call(START, spec, &call(2, used, Vec::new())).permits(), u64::from(used));
    let answered = settlement(2, used, Fate::Used { age: Duration::ZERO });
    quota.call(START, spec, &call(3, 0, vec![answered]));
    quota
}

#[test]
fn a_limit_that_is_lowered_and_raised_again_has_forgotten_nothing() {
    let hour = Duration::from_secs(3_600);
    for lowered in [0, 1, 50, 99] {
        let mut quota = used(&spec(1, 100, hour), 100);
        let minute = START.plus(Duration::from_secs(60));
        assert_eq!(quota.call(minute, &spec(2, lowered, hour), &call(4, 10, Vec::new())).permits(), 0);
        let later = minute.plus(Duration::from_secs(60));
        assert_eq!(quota.call(later, &spec(3, 100, hour), &call(5, 10, Vec::new())).permits(), 0, "{lowered}");
        assert_eq!(quota.call(START.plus(hour * 2), &spec(3, 100, hour), &call(6, 200, Vec::new())).permits(), 100);
    }
}

#[test]
fn a_lowered_limit_waits_until_enough_uses_are_over() {
    let second = Duration::from_secs(1);
    let mut quota = used(&spec(1, 10, second), 10);
    let lowered = spec(2, 4, second);
    let refused = quota.call(START, &lowered, &call(4, 1, Vec::new())).refused.unwrap();
    assert!(refused.exact);
    let due = START.plus(Duration::from_micros(refused.wait_us));
    let reply = quota.call(due, &lowered, &call(5, 10, Vec::new()));
    assert_eq!(reply.permits(), 4, "all ten uses are over, and four may begin");
}

#[test]
fn calls_in_flight_count_against_a_lowered_limit() {
    let second = Duration::from_secs(1);
    let mut quota = Quota::default();
    quota.call(START, &spec(1, 10, second), &call(1, 0, Vec::new()));
    assert_eq!(quota.call(START, &spec(1, 10, second), &call(2, 8, Vec::new())).permits(), 8);
    let lowered = spec(2, 5, second);
    let given_back = settlement(2, 2, Fate::NotSent { origins: vec![0] });
    assert_eq!(quota.call(START, &lowered, &call(3, 5, vec![given_back])).permits(), 0, "six in flight");
    let answered = settlement(2, 6, Fate::Used { age: Duration::ZERO });
    assert_eq!(quota.call(START, &lowered, &call(4, 5, vec![answered])).permits(), 0, "six uses in this window");
    let over = START.plus(second * 2);
    assert_eq!(quota.call(over, &lowered, &call(5, 9, Vec::new())).permits(), 5);
}
