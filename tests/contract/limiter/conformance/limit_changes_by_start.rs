//! Changes of limits that count starts. Usage is carried over as far as the new numbers can express it. A limit whose
//! usage is unknown grants nothing for a window.

use sluicegate::domain::limit::Algorithm;

use super::algorithms::{STARTS, limit, only};
use super::*;
use crate::limiter::oracle::Oracle;

on_every_limiter!(
    lowered_and_raised_limits_keep_usage,
    shorter_window_keeps_usage,
    longer_window_or_new_algorithm_waits_for_history,
    a_bucket_keeps_its_level_in_permits,
    reopened_limit_keeps_usage,
    changed_rate_keeps_booked_starts,
    lowered_burst_keeps_excess_usage,
    drain_time_overflow_keeps_usage,
);

fn before_us(spec: &QuotaSpec) -> u64 {
    micros_up(BOOKING_HORIZON + spec.hold_max)
}

/// A caller whose limit is half used, and its definition with the same uses.
async fn half_used(limiter: &Arc<dyn Limiter>, quota: &str, limit: LimitSpec) -> (Caller, Oracle) {
    let quota = ProviderName::new(quota).unwrap();
    let mut oracle = Oracle::new(limit.clone());
    let mut caller = Caller::warm(limiter, QuotaSpec { quota, ..only(limit) }).await;
    let reply = caller.call(&[1, 1, 1]).await;
    oracle.holds(&reply, &[1, 1, 1]);
    (caller, oracle)
}

async fn change(caller: &mut Caller, oracle: &mut Oracle, limit: LimitSpec, costs: &[u32]) -> (LimiterReply, usize) {
    caller.spec = QuotaSpec { version: caller.spec.version + 1, limits: vec![limit.clone()], ..caller.spec.clone() };
    let reply = caller.call(costs).await;
    oracle.change(limit, reply.now.0, before_us(&caller.spec));
    let granted = oracle.holds(&reply, costs);
    (reply, granted)
}

/// A window so long that no use stops to count during the test.
fn long(algorithm: Algorithm) -> LimitSpec {
    LimitSpec { window: Duration::from_secs(5_400), offset: Duration::ZERO, ..limit(algorithm) }
}

async fn lowered_and_raised_limits_keep_usage(limiter: Arc<dyn Limiter>) {
    for algorithm in STARTS {
        let limit = long(algorithm);
        let (mut caller, mut oracle) =
            half_used(&limiter, algorithm.name().replace('_', "-").as_str(), limit.clone()).await;
        for (max_requests, burst) in [(2, 2), (10, 9), (3, 1), (6, 3)] {
            let burst = limit.burst.map(|_| burst);
            let (reply, granted) =
                change(&mut caller, &mut oracle, LimitSpec { max_requests, burst, ..limit.clone() }, &[1; 9]).await;
            assert!(granted < 9, "{algorithm:?}, {max_requests} allowed: {reply:?}");
        }
    }
}

async fn shorter_window_keeps_usage(limiter: Arc<dyn Limiter>) {
    let algorithm = Algorithm::SlidingWindow;
    let from = LimitSpec { window: Duration::from_secs(60), ..limit(algorithm) };
    let (mut caller, mut oracle) = half_used(&limiter, "shorter", from).await;
    let (reply, granted) = change(&mut caller, &mut oracle, limit(algorithm), &[1; 9]).await;
    let due_us = promised_us(&reply);
    assert!(granted >= 3 && due_us < reply.now.0 + 1_300_000, "{reply:?}");
    until_us(&caller, due_us).await;
    let reply = caller.call(&[1; 3]).await;
    assert!(oracle.holds(&reply, &[1; 3]) > 0);
}

async fn longer_window_or_new_algorithm_waits_for_history(limiter: Arc<dyn Limiter>) {
    let hour = Duration::from_secs(3_600);
    let longer = |algorithm| LimitSpec { window: hour * 3, ..long(algorithm) };
    let moved = LimitSpec { offset: hour / 4, ..long(Algorithm::FixedWindow) };
    let changes = [
        ("a", long(Algorithm::SlidingWindow), longer(Algorithm::SlidingWindow)),
        ("b", long(Algorithm::FixedWindow), longer(Algorithm::FixedWindow)),
        ("c", long(Algorithm::FixedWindow), moved),
        ("d", long(Algorithm::SlidingWindow), long(Algorithm::FixedWindow)),
        ("e", long(Algorithm::FixedWindow), long(Algorithm::TokenBucket)),
        ("f", long(Algorithm::Gcra), long(Algorithm::SlidingWindow)),
    ];
    for (quota, from, to) in changes {
        let (mut caller, mut oracle) = half_used(&limiter, quota, from.clone()).await;
        let (reply, granted) = change(&mut caller, &mut oracle, to.clone(), &[1]).await;
        assert_eq!(granted, 0, "{from:?} to {to:?}: {reply:?}");
        assert!(refused(&reply).exact && refused(&reply).wait_us >= before_us(&caller.spec), "{reply:?}");
    }
}

async fn a_bucket_keeps_its_level_in_permits(limiter: Arc<dyn Limiter>) {
    let changes = [
        ("slower", Algorithm::TokenBucket, 2, 4),
        ("faster", Algorithm::TokenBucket, 60, 4),
        ("another", Algorithm::Gcra, 6, 3),
        ("smaller", Algorithm::TokenBucket, 6, 1),
        ("larger", Algorithm::Gcra, 12, 40),
    ];
    for (quota, algorithm, max_requests, burst) in changes {
        let (mut caller, mut oracle) = half_used(&limiter, quota, long(Algorithm::TokenBucket)).await;
        let to = LimitSpec { algorithm, max_requests, burst: Some(burst), ..long(algorithm) };
        let (reply, granted) = change(&mut caller, &mut oracle, to, &[1; 50]).await;
        // Three of four were used.
        let capacity = burst + u32::from(algorithm == Algorithm::Gcra);
        assert_eq!(u64::from(capacity.saturating_sub(3)), reply.permits(), "{quota}: {granted} {reply:?}");
    }
}

async fn reopened_limit_keeps_usage(limiter: Arc<dyn Limiter>) {
    for algorithm in STARTS {
        let limit = long(algorithm);
        let (mut caller, mut oracle) =
            half_used(&limiter, algorithm.name().replace('_', "-").as_str(), limit.clone()).await;
        let closed = LimitSpec { max_requests: 0, ..limit.clone() };
        let (reply, granted) = change(&mut caller, &mut oracle, closed, &[1]).await;
        assert_eq!((granted, reply.remaining), (0, 0));
        let (reply, granted) = change(&mut caller, &mut oracle, limit.clone(), &[1; 9]).await;
        let left = usize::try_from(limit.cost_max()).unwrap() - 3;
        assert_eq!(granted, left, "{algorithm:?}: {reply:?}");
    }
}

/// Starts are booked ahead, so a bucket may hold more than its capacity.
async fn changed_rate_keeps_booked_starts(limiter: Arc<dyn Limiter>) {
    let rate = |max_requests| LimitSpec {
        max_requests,
        window: Duration::from_secs(1),
        burst: Some(0),
        ..limit(Algorithm::Gcra)
    };
    for (quota, even) in [("burst", false), ("even", true)] {
        let (quota, mut oracle) = (ProviderName::new(quota).unwrap(), Oracle::new(rate(100)));
        let mut caller = Caller::warm(
            &limiter,
            QuotaSpec { quota, pacing: even.then_some(sluicegate::domain::provider::Pacing::Even), ..only(rate(100)) },
        )
        .await;
        let reply = caller.call(&[1; 60]).await;
        assert_eq!(oracle.holds(&reply, &[1; 60]), 26, "one start every 10 ms of the booking horizon of 250 ms");
        let (first_us, booked) = (reply.now.0, reply.permits());
        let (reply, granted) = change(&mut caller, &mut oracle, rate(125), &[1; 60]).await;
        let within_us = reply.now.0 + micros_up(BOOKING_HORIZON) - first_us;
        let most = within_us / 8_000 + 1;
        assert!(
            booked + u64::try_from(granted).unwrap() <= most.max(booked),
            "{granted} more granted, {most} allowed in all: {reply:?}"
        );
    }
}

async fn lowered_burst_keeps_excess_usage(limiter: Arc<dyn Limiter>) {
    let of = |max_requests, burst| LimitSpec { max_requests, burst: Some(burst), ..long(Algorithm::TokenBucket) };
    let (mut caller, mut oracle) = half_used(&limiter, "lowered", of(6, 4)).await;
    for (max_requests, burst, granted) in [(6, 1, 0), (2, 1, 0), (6, 4, 1)] {
        let (reply, got) = change(&mut caller, &mut oracle, of(max_requests, burst), &[1; 5]).await;
        assert_eq!(got, granted, "three are used: {reply:?}");
    }
}

async fn drain_time_overflow_keeps_usage(limiter: Arc<dyn Limiter>) {
    let month = Duration::from_secs(31 * 86_400);
    let of = |max_requests| {
        let burst = (max_requests > 1).then_some(1_000_000);
        LimitSpec { max_requests, window: month, burst, ..limit(Algorithm::TokenBucket) }
    };
    let wants = |permits, cost| [PermitRequest::charges(permits, cost)];
    for (quota, slower) in [("closed", 0), ("slow", 1)] {
        let quota = ProviderName::new(quota).unwrap();
        let mut caller = Caller::warm(&limiter, QuotaSpec { quota, ..only(of(1_000_000)) }).await;
        assert_eq!(caller.ask(&wants(10, 1_000)).await.permits(), 10);
        caller.spec = QuotaSpec { version: 2, limits: vec![of(slower)], ..caller.spec };
        let reply = caller.ask(&wants(1, 1)).await;
        let refusal = refused(&reply);
        assert_eq!((reply.permits(), reply.remaining), (0, 0), "{reply:?}");
        assert!(refusal.wait_us >= micros_up(month) && reply.reset_us > micros_up(365 * month / 31), "{reply:?}");
        // The drain time exceeds the number range, so the count of uses is unknown from here on.
        caller.spec = QuotaSpec { version: 3, limits: vec![of(1_000_000)], ..caller.spec };
        let reply = caller.ask(&wants(1_000, 1_000)).await;
        let held_us = before_us(&caller.spec) + caller.spec.provider_counters()[0].window_us;
        assert_eq!((reply.permits(), refused(&reply).wait_us), (0, held_us), "{reply:?}");
    }
}
