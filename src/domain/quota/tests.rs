use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::domain::limit::{Algorithm, Scope};
use crate::domain::permit_protocol::{CallKind, CostByKind, PermitRelease, ReleaseKind, Subject};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota_spec::LimitSpec;

const START: Micros = Micros(1_800_000_000_000_000);

fn spec(version: i64, max_requests: u32, window: Duration) -> QuotaSpec {
    QuotaSpec {
        quota: ProviderName::new("p").unwrap(),
        version,
        limits: vec![LimitSpec::sliding_log("limit", max_requests, window)],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(3),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn call(number: u64, permits: u32, releases: Vec<PermitRelease>) -> LimiterCall {
    let requests = vec![PermitRequest::charges(permits, 1)];
    let rebuild = Some(RebuildData { state_epoch: START, ended: Vec::new(), in_flight: CostByKind::default() });
    LimiterCall {
        incarnation: 1,
        number,
        requests,
        releases,
        pause: None,
        rebuild,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: "run".into(),
    }
}

fn release(call: u64, cost: u32, release_kind: ReleaseKind) -> PermitRelease {
    PermitRelease { call, cost, kind: CallKind::Charge, subjects: Vec::new(), release_kind }
}

/// A quota that is warm at once, with `used` calls answered at `START`.
fn used(spec: &QuotaSpec, used: u32) -> Quota {
    let mut quota = Quota::default();
    quota.call(START, spec, &call(1, 0, Vec::new()));
    assert_eq!(quota.call(START, spec, &call(2, used, Vec::new())).permits(), u64::from(used));
    let answered = release(2, used, ReleaseKind::Used { age: Duration::ZERO });
    quota.call(START, spec, &call(3, 0, vec![answered]));
    quota
}

#[test]
fn lowered_then_raised_limit_keeps_its_usage() {
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
fn lowered_limit_waits_for_enough_expired_uses() {
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
    let unused = release(2, 2, ReleaseKind::Unused { origins: vec![0] });
    assert_eq!(quota.call(START, &lowered, &call(3, 5, vec![unused])).permits(), 0, "six in flight");
    let answered = release(2, 6, ReleaseKind::Used { age: Duration::ZERO });
    assert_eq!(quota.call(START, &lowered, &call(4, 5, vec![answered])).permits(), 0, "six uses in this window");
    let over = START.plus(second * 2);
    assert_eq!(quota.call(over, &lowered, &call(5, 9, Vec::new())).permits(), 5);
}

const SECOND: Duration = Duration::from_secs(1);

fn provider_and(own: LimitSpec, version: i64) -> QuotaSpec {
    let mut spec = spec(version, 1_000, SECOND);
    spec.limits.push(own);
    spec
}

fn per_account(max_requests: u32, window: Duration) -> LimitSpec {
    LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", max_requests, window) }
}

/// A call that requests this many permits for one account.
fn account_call(spec: &QuotaSpec, number: u64, permits: u32) -> LimiterCall {
    let subjects = spec.subjects(Some("acc"), None).unwrap();
    LimiterCall {
        requests: vec![PermitRequest { subjects, ..PermitRequest::charges(permits, 1) }],
        ..call(number, 0, Vec::new())
    }
}

#[test]
fn new_account_limit_starts_after_one_window() {
    let minute = 60 * SECOND;
    let mut quota = used(&spec(1, 1_000, SECOND), 5);
    let spec = provider_and(per_account(5, minute), 2);
    let reply = quota.call(START.plus(SECOND), &spec, &account_call(&spec, 4, 5));
    assert_eq!(reply.permits(), 0, "earlier uses of the account were not counted");
    let wait_us = reply.skipped[0].wait_us;
    let due = START.plus(SECOND + Duration::from_micros(wait_us));
    assert_eq!(quota.call(due, &spec, &account_call(&spec, 5, 9)).permits(), 5);
    // A rate alone may change at any time: all was counted.
    let raised = provider_and(per_account(7, minute), 3);
    assert_eq!(quota.call(due, &raised, &account_call(&raised, 6, 9)).permits(), 2);
}

#[test]
fn account_in_flight_is_kept_when_hold_shrinks() {
    let long = QuotaSpec { hold_max: 60 * SECOND, ..provider_and(per_account(1, SECOND), 1) };
    let mut quota = Quota::default();
    quota.call(START, &long, &call(1, 0, Vec::new()));
    assert_eq!(quota.call(START, &long, &account_call(&long, 2, 1)).permits(), 1);
    let short = QuotaSpec { version: 2, hold_max: SECOND, ..long };
    let later = START.plus(10 * SECOND);
    assert_eq!(quota.call(later, &short, &account_call(&short, 3, 1)).permits(), 0, "it may still be in flight");
}

#[test]
fn enforced_shadow_limit_waits_for_uncounted_uses() {
    let window = |version, shadow| {
        let limit =
            LimitSpec { algorithm: Algorithm::SlidingWindow, shadow, ..LimitSpec::sliding_log("w", 10, 60 * SECOND) };
        QuotaSpec { limits: vec![limit, LimitSpec::sliding_log("z", 1_000, SECOND)], ..spec(version, 1, SECOND) }
    };
    let mut quota = Quota::default();
    quota.call(START, &window(1, true), &call(1, 0, Vec::new()));
    quota.call(START, &window(1, true), &call(2, 5, Vec::new()));
    let hundred = START.plus(30 * SECOND);
    assert_eq!(quota.call(hundred, &window(1, true), &call(3, 100, Vec::new())).permits(), 100);
    let enforced = window(2, false);
    let reply = quota.call(START.plus(31 * SECOND), &enforced, &call(4, 1, Vec::new()));
    assert!(reply.refused.unwrap().wait_us >= 59_000_000, "a hundred count until 90 s: {reply:?}");
}

#[test]
fn lengthened_window_can_be_reverted() {
    let mut quota = used(&spec(1, 10, SECOND), 1);
    let day = 86_400 * SECOND;
    assert_eq!(quota.call(START.plus(SECOND), &spec(2, 10, day), &call(4, 1, Vec::new())).permits(), 0);
    let undone = quota.call(START.plus(2 * SECOND), &spec(3, 10, SECOND), &call(5, 1, Vec::new()));
    assert!(undone.refused.unwrap().wait_us < 5_000_000, "a window, the hold and the horizon: {undone:?}");
}

#[test]
fn request_in_flight_during_loss_costs_one_slot() {
    let spec = spec(1, 10, SECOND);
    let mut quota = Quota::default();
    let lost = RebuildData { state_epoch: START, ended: Vec::new(), in_flight: CostByKind::charges(1) };
    quota.call(START, &spec, &LimiterCall { rebuild: Some(lost), ..call(1, 0, Vec::new()) });
    for (window, number) in (2..20).step_by(2).enumerate() {
        let now = START.plus(SECOND * 2 * u32::try_from(window).unwrap());
        let granted = u32::try_from(quota.call(now, &spec, &call(number, 10, Vec::new())).permits()).unwrap();
        assert!(granted >= 9, "window {window}: {granted}");
        let answered = release(number, granted, ReleaseKind::Used { age: Duration::ZERO });
        quota.call(now, &spec, &call(number + 1, 0, vec![answered]));
    }
}

#[test]
fn slots_of_a_grant_log_stay_spread() {
    let window = Duration::from_secs(1);
    let spec = QuotaSpec { grant_jitter: Some(Duration::from_millis(50)), ..spec(1, 100, window) };
    let starts = |reply: &LimiterReply| -> Vec<u64> {
        let grants = reply.grants.iter();
        grants.flat_map(|grant| std::iter::repeat_n(reply.now.0 + grant.wait_us, grant.permits as usize)).collect()
    };
    let mut quota = Quota::default();
    quota.call(START, &spec, &call(1, 0, Vec::new()));
    // Two calls in the same millisecond: the second continues after the first.
    let mut first = starts(&quota.call(START, &spec, &call(2, 60, Vec::new())));
    first.extend(starts(&quota.call(START, &spec, &call(3, 60, Vec::new()))));
    assert_eq!(first.len(), 100);
    let most_together = |starts: &[u64]| starts.chunk_by(|a, b| a == b).map(<[u64]>::len).max();
    // The next call may use the millisecond in which the first one ended.
    assert!(most_together(&first) <= Some(4), "{first:?}");
    assert!(first.is_sorted() && first[99] - first[0] >= 48_000, "{first:?}");
    let padded_us = spec.limits[0].padded_window_us() + 50_000;
    let next_window = starts(&quota.call(Micros(first[99] + padded_us - 100_000), &spec, &call(4, 100, Vec::new())));
    assert_eq!(next_window.len(), 100);
    for (first, next) in first.iter().zip(&next_window) {
        let late_us = next.checked_sub(first + padded_us).unwrap();
        assert!(late_us < 1_000, "{late_us} us");
    }
}

/// History of a limit, and the time from its last step to the check.
#[derive(Clone, Debug)]
struct LimitHistory {
    algorithms: Vec<Algorithm>,
    steps: Vec<HistoryStep>,
    /// Whether the last calls were answered.
    answered: bool,
    idle_ms: u64,
}

#[derive(Clone, Debug)]
struct HistoryStep {
    gap_ms: u64,
    permits: u32,
    cost: u32,
    answers: bool,
    pause_ms: Option<u64>,
    max_requests: Option<u32>,
}

fn histories() -> impl Strategy<Value = LimitHistory> {
    let algorithm = prop::sample::select(Algorithm::WITH_WINDOW.to_vec());
    let rarely = |values: std::ops::Range<u64>| prop_oneof![9 => Just(None), 1 => values.prop_map(Some)];
    let step = (0..400_u64, 0..9_u32, 1..4_u32, any::<bool>(), rarely(1..900), rarely(1..20)).prop_map(
        |(gap_ms, permits, cost, answers, pause_ms, max)| {
            let max_requests = max.and_then(|max| u32::try_from(max).ok());
            HistoryStep { gap_ms, permits, cost, answers, pause_ms, max_requests }
        },
    );
    let algorithms = prop::collection::vec(algorithm, 1..3);
    (algorithms, prop::collection::vec(step, 1..30), any::<bool>(), 0..700_u64)
        .prop_map(|(algorithms, steps, answered, idle_ms)| LimitHistory { algorithms, steps, answered, idle_ms })
}

fn limits_of(algorithms: &[Algorithm], max_requests: u32) -> Vec<LimitSpec> {
    let limit = |(at, algorithm): (usize, &Algorithm)| LimitSpec {
        algorithm: *algorithm,
        ..LimitSpec::sliding_log(format!("limit-{at}"), max_requests, SECOND * u32::try_from(at + 1).unwrap())
    };
    algorithms.iter().enumerate().map(limit).collect()
}

/// Runs a history; returns the quota, its settings, the number of the next call, and the instant of the last.
fn run_history(history: &LimitHistory) -> (Quota, QuotaSpec, u64, Micros) {
    let mut spec = QuotaSpec { limits: limits_of(&history.algorithms, 7), ..spec(1, 7, SECOND) };
    let (mut quota, mut now, mut number) = (Quota::default(), START, 1);
    quota.call(now, &spec, &call(number, 0, Vec::new()));
    let mut open: Vec<(u64, u32)> = Vec::new();
    let mut steps = history.steps.clone();
    if history.answered {
        let last = HistoryStep { gap_ms: 5, permits: 0, cost: 1, answers: true, pause_ms: None, max_requests: None };
        steps.push(last);
    }
    for step in &steps {
        now = now.plus(Duration::from_millis(step.gap_ms));
        number += 1;
        if let Some(max_requests) = step.max_requests {
            (spec.limits, spec.version) = (limits_of(&history.algorithms, max_requests), spec.version + 1);
        }
        let answers = if step.answers { std::mem::take(&mut open) } else { Vec::new() };
        let used = |(call, uses): (u64, u32)| release(call, uses, ReleaseKind::Used { age: Duration::ZERO });
        let releases = answers.into_iter().map(used).collect();
        let requests = vec![PermitRequest::charges(step.permits, step.cost)];
        let pause = step.pause_ms.map(Duration::from_millis);
        let reply = quota.call(now, &spec, &LimiterCall { requests, pause, ..call(number, 0, releases) });
        open.push((number, u32::try_from(reply.permits()).unwrap() * step.cost));
        open.retain(|(_, uses)| *uses > 0);
    }
    (quota, spec, number + 1, now)
}

proptest! {
    #[test]
    fn retry_after_is_when_the_next_permit_starts(history in histories()) {
        let (quota, spec, number, last) = run_history(&history);
        let idle = if history.answered { Duration::from_millis(history.idle_ms) } else { Duration::ZERO };
        let now = last.plus(idle);
        let usages = quota.usage(now, &spec, None);
        let retry_us = usages.iter().map(|usage| usage.retry_us).max().unwrap();
        let due_us = now.0 + retry_us;
        let next_start_us = |at_us: u64| {
            let reply = quota.clone().call(Micros(at_us), &spec, &call(number, 1, Vec::new()));
            reply.grants.first().map(|grant| reply.now.0 + grant.wait_us)
        };
        let horizon_us = micros_up(BOOKING_HORIZON);
        let before_us = [0, 1, horizon_us, horizon_us + 1, retry_us / 2, retry_us];
        let asked_at = before_us.map(|before_us| due_us.saturating_sub(before_us));
        for at_us in asked_at.into_iter().filter(|at_us| *at_us >= now.0) {
            let start_us = next_start_us(at_us);
            let is_early = start_us.is_some_and(|start_us| start_us < due_us);
            prop_assert!(!is_early, "asked at {at_us}: {start_us:?} before {due_us}");
        }
        // Two fixed windows, or one with another algorithm, may agree on a later start than each allows.
        let agree = history.algorithms.len() == 1 || !history.algorithms.contains(&Algorithm::FixedWindow);
        if history.answered && agree {
            prop_assert_eq!(next_start_us(due_us), Some(due_us), "{:?}", usages);
        }
    }

    #[test]
    fn limit_is_unused_at_reset_after(history in histories()) {
        let history = LimitHistory { answered: true, ..history };
        let (quota, spec, _, last) = run_history(&history);
        let now = last.plus(Duration::from_millis(history.idle_ms));
        for usage in quota.usage(now, &spec, None) {
            let used_in = |us: u64| quota.usage(Micros(now.0 + us), &spec, None)[usage.index].used;
            prop_assert!(usage.reset_us >= usage.retry_us);
            prop_assert_eq!(used_in(usage.reset_us), 0);
            // A pause, or a booked start beyond a lowered limit, may end later than the last use.
            if usage.reset_us > usage.retry_us {
                prop_assert!(used_in(usage.reset_us - 1) > 0, "{:?}", usage);
            }
        }
    }
}

#[test]
fn retry_after_covers_cold_start_pause_and_block() {
    let retry_us = |quota: &Quota, spec: &QuotaSpec, subject: Option<&Subject>| {
        let usages = quota.usage(START, spec, subject);
        usages.iter().map(|usage| usage.retry_us).collect::<Vec<_>>()
    };
    let (one, mut quota) = (spec(1, 10, SECOND), Quota::default());
    assert_eq!(retry_us(&quota, &one, None), [one.cold_start_us()], "without a state");
    quota.call(START, &one, &LimiterCall { rebuild: None, ..call(1, 0, Vec::new()) });
    assert_eq!(retry_us(&quota, &one, None), [one.cold_start_us()], "cold");
    let paused = LimiterCall { pause: Some(7 * SECOND), ..call(2, 0, Vec::new()) };
    quota.call(START, &one, &paused);
    assert_eq!(retry_us(&quota, &one, None), [7_000_000]);
    let resumed = QuotaSpec { resumed_at: 5, ..one.clone() };
    assert_eq!(retry_us(&quota, &resumed, None), [0], "an operator has ended the pause");
    // A new limit of accounts has not counted earlier uses of accounts.
    let two = provider_and(per_account(5, 60 * SECOND), 2);
    let two = QuotaSpec { resumed_at: 5, ..two };
    quota.call(START, &two, &call(3, 0, Vec::new()));
    let account = two.subjects(Some("acc"), None).unwrap().remove(0);
    let held_us = two.count_delay_max_us() + two.subject_counters(&account)[0].window_us;
    assert_eq!(retry_us(&quota, &two, Some(&account)), [0, held_us]);
    let reply = quota.call(START, &two, &account_call(&two, 4, 1));
    assert_eq!(reply.skipped[0].wait_us, held_us, "the same wait as for a payment of the account");
}

#[test]
fn idle_references_are_dropped_by_their_own_window() {
    let mut spec = spec(1, 1_000_000, 720 * 3_600 * SECOND);
    let own = LimitSpec::sliding_log("own", 5, 60 * SECOND);
    spec.limits.push(LimitSpec { scope: Scope::Reference, ..own });
    let mut quota = used(&spec, 0);
    for number in 0..2_000 {
        let subjects = spec.subjects(None, Some(&format!("r{number}"))).unwrap();
        let requests = vec![PermitRequest { subjects, ..PermitRequest::charges(1, 1) }];
        let now = START.plus(SECOND * u32::try_from(number).unwrap());
        assert_eq!(quota.call(now, &spec, &LimiterCall { requests, ..call(10 + number, 0, Vec::new()) }).permits(), 1);
    }
    // One a second; each is kept for a minute and some seconds. They are dropped when half of all can be dropped.
    let kept = quota.state.unwrap().subjects.len();
    assert!(kept <= 2 * 70 + 65, "{kept} references are kept");
}
