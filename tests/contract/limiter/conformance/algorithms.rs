//! The algorithms that count starts, each against its definition, on every limiter: grants, exact waits of refusals,
//! remaining and reset. The definition is evaluated at the instants in the replies. So a slow machine changes the
//! questions and not the outcome.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::provider::Pacing;
use sluicegate::domain::quota::Quota;
use sluicegate::domain::quota_spec::PACING;

use super::*;
use crate::limiter::oracle::{Oracle, Says};

on_every_limiter!(
    a_sliding_window_keeps_to_its_definition,
    a_fixed_window_keeps_to_its_definition,
    a_token_bucket_keeps_to_its_definition,
    gcra_keeps_to_its_definition,
    fixed_window_follows_the_calendar,
    closed_limits_grant_nothing_and_name_a_wait,
    a_start_that_was_not_sent_stays_counted,
    even_starts_of_all_callers_keep_their_distance,
    even_pacing_ignores_a_limit_named_pacing,
    burst_starts_of_all_callers_are_spaced,
    starts_are_booked_no_further_ahead_than_asked,
);

pub(super) const STARTS: [Algorithm; 4] =
    [Algorithm::SlidingWindow, Algorithm::FixedWindow, Algorithm::TokenBucket, Algorithm::Gcra];

/// A limit of 6 per 900 ms; algorithms with a burst admit four at once.
pub(super) fn limit(algorithm: Algorithm) -> LimitSpec {
    let burst = match algorithm {
        Algorithm::TokenBucket => Some(4),
        Algorithm::Gcra => Some(3),
        _ => None,
    };
    let offset = if algorithm == Algorithm::FixedWindow { Duration::from_millis(350) } else { Duration::ZERO };
    LimitSpec { algorithm, burst, offset, ..LimitSpec::sliding_log("all", 6, Duration::from_millis(900)) }
}

pub(super) fn only(limit: LimitSpec) -> QuotaSpec {
    QuotaSpec { limits: vec![limit], ..spec(&[]) }
}

/// Two callers alternate until the limit was full several times. A refused permit is requested again at its promised
/// start, or up to the booking horizon before it.
async fn keeps_to_its_definition(limiter: Arc<dyn Limiter>, limit: LimitSpec) {
    let mut oracle = Oracle::new(limit.clone());
    let first = Caller::warm(&limiter, only(limit)).await;
    let mut callers = [first.clone(), Caller::new(&limiter, first.spec.clone())];
    let asked: [&[u32]; 6] = [&[1, 1], &[2, 1, 1], &[1, 1, 1], &[3, 1], &[1; 9], &[4]];
    let (mut granted, mut exact) = (0, 0);
    for (turn, costs) in asked.iter().chain(&asked[..3]).enumerate() {
        let reply = callers[turn % 2].call(costs).await;
        granted += oracle.holds(&reply, costs);
        if let Some(refusal) = reply.refused.filter(|refusal| refusal.exact) {
            exact += 1;
            // Within the booking horizon it is booked for the promised start.
            let ahead_us = [0, 100_000, micros_up(BOOKING_HORIZON)][turn % 3];
            until_us(&first, (reply.now.0 + refusal.wait_us).saturating_sub(ahead_us)).await;
        }
    }
    assert!(granted >= 12 && exact >= 3, "{granted} permits, {exact} exact refusals");
}

async fn a_sliding_window_keeps_to_its_definition(limiter: Arc<dyn Limiter>) {
    keeps_to_its_definition(limiter, limit(Algorithm::SlidingWindow)).await;
}

async fn a_fixed_window_keeps_to_its_definition(limiter: Arc<dyn Limiter>) {
    keeps_to_its_definition(limiter, limit(Algorithm::FixedWindow)).await;
}

async fn a_token_bucket_keeps_to_its_definition(limiter: Arc<dyn Limiter>) {
    keeps_to_its_definition(limiter, limit(Algorithm::TokenBucket)).await;
}

async fn gcra_keeps_to_its_definition(limiter: Arc<dyn Limiter>) {
    keeps_to_its_definition(limiter, limit(Algorithm::Gcra)).await;
}

/// The embedded limiter and every server agree on where a window begins: at its offset from midnight UTC.
async fn fixed_window_follows_the_calendar(limiter: Arc<dyn Limiter>) {
    let wall_us = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::try_from(now.as_micros()).unwrap()
    };
    let day_us = 86_400_000_000;
    let spec = only(LimitSpec {
        algorithm: Algorithm::FixedWindow,
        offset: Duration::from_secs(3_600 * 7),
        ..LimitSpec::sliding_log("day", 1, Duration::from_secs(86_400))
    });
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let before_us = wall_us();
    let mut other = Caller::new(&limiter, spec);
    let granted = caller.call(&[1]).await;
    let reply = other.call(&[1]).await;
    let after_us = wall_us();
    // All clocks are this machine's. One second covers the embedded limiter's clock, which is read once.
    assert!(reply.now.0 + 1_000_000 > before_us && reply.now.0 < after_us + 1_000_000);
    let offset_us = 7 * 3_600_000_000;
    let next_us = |now_us: u64| (now_us - offset_us) / day_us * day_us + day_us + offset_us;
    if next_us(granted.now.0) == next_us(reply.now.0) {
        assert_eq!((granted.permits(), reply.permits()), (1, 0), "all callers share one window");
        assert_eq!(promised_us(&reply), next_us(reply.now.0), "07:00 UTC");
        assert_eq!(reply.reset_us, promised_us(&reply) - reply.now.0);
    } else {
        assert_eq!((granted.permits(), reply.permits()), (1, 1), "the day began in between");
    }
}

async fn closed_limits_grant_nothing_and_name_a_wait(limiter: Arc<dyn Limiter>) {
    for (number, algorithm) in STARTS.into_iter().enumerate() {
        let closed = LimitSpec { max_requests: 0, ..limit(algorithm) };
        let quota = ProviderName::new(format!("closed-{number}")).unwrap();
        let mut caller = Caller::warm(&limiter, QuotaSpec { quota, ..only(closed.clone()) }).await;
        let reply = caller.call(&[1]).await;
        assert_eq!(Oracle::new(closed).holds(&reply, &[1]), 0);
        assert!(refused(&reply).wait_us >= 900_000, "the caller would retry in a hot loop: {algorithm:?} {reply:?}");
    }
}

/// These algorithms count granted starts, so a permit that is released unused stays counted.
async fn a_start_that_was_not_sent_stays_counted(limiter: Arc<dyn Limiter>) {
    for (number, algorithm) in STARTS.into_iter().enumerate() {
        let long = LimitSpec { window: Duration::from_secs(900), ..limit(algorithm) };
        let quota = ProviderName::new(format!("unsent-{number}")).unwrap();
        let mut oracle = Oracle::new(long.clone());
        let mut caller = Caller::warm(&limiter, QuotaSpec { quota, ..only(long) }).await;
        let reply = caller.call(&[1, 1]).await;
        assert_eq!(oracle.holds(&reply, &[1, 1]), 2);
        let call = caller.number;
        let reply = caller.settle(vec![not_sent(call, 1, &[0]), used(call, 1, 0)], &[1; 6]).await;
        oracle.holds(&reply, &[1; 6]);
    }
}

async fn even_starts_of_all_callers_keep_their_distance(limiter: Arc<dyn Limiter>) {
    // The limit per hour allows a higher rate than the limit per second.
    let limits = [("hour", 1_000_000, 3_600_000), ("second", 10, 1_000)];
    let mut even = QuotaSpec { pacing: Some(Pacing::Even), ..spec(&limits) };
    // Its burst admits all at once; pacing uses its rate.
    even.limits[1].algorithm = Algorithm::TokenBucket;
    even.limits[1].burst = Some(1_000);
    let interval_us = 100_000;
    let first = Caller::warm(&limiter, even.clone()).await;
    let mut callers = [first.clone(), Caller::new(&limiter, even.clone())];
    let mut starts: Vec<(u64, usize)> = Vec::new();
    for turn in 0..9 {
        let reply = callers[turn % 2].call(&[1, 1]).await;
        let last_us = starts.last().map_or(0, |(start_us, _)| start_us + interval_us);
        let waits: Vec<u64> = reply.grants.iter().map(|run| run.wait_us).collect();
        let next_us = last_us.max(reply.now.0);
        let expected = [next_us, next_us + interval_us];
        let within = expected.into_iter().take_while(|at_us| *at_us <= reply.now.0 + micros_up(BOOKING_HORIZON));
        let within: Vec<u64> = within.collect();
        assert_eq!(waits.iter().map(|wait_us| reply.now.0 + wait_us).collect::<Vec<_>>(), within, "{reply:?}");
        starts.extend(within.iter().map(|start_us| (*start_us, turn % 2)));
        if within.len() < 2 {
            let refusal = refused(&reply);
            assert_eq!((refusal.reason, refusal.exact), (RefusalReason::Limit { index: 2 }, true));
            assert_eq!((promised_us(&reply), even.limit_name(2)), (expected[within.len()], PACING));
            until_us(&first, promised_us(&reply) - 150_000).await;
        }
    }
    assert!(starts.windows(2).all(|pair| pair[1].0 >= pair[0].0 + interval_us), "{starts:?}");
    assert!(starts.windows(2).any(|pair| pair[0].1 != pair[1].1), "both callers get starts: {starts:?}");
    // A request of cost 3 takes three intervals.
    until_us(&first, starts.last().unwrap().0 + interval_us).await;
    let reply = callers[0].call(&[3]).await;
    assert_eq!((reply.permits(), reply.grants[0].wait_us), (1, 0));
    let next = callers[1].call(&[1]).await;
    let start_us = next.grants.first().map_or_else(|| promised_us(&next), |run| next.now.0 + run.wait_us);
    assert_eq!(start_us, (reply.now.0 + 3 * interval_us).max(next.now.0));
}

async fn even_pacing_ignores_a_limit_named_pacing(limiter: Arc<dyn Limiter>) {
    let even = QuotaSpec { pacing: Some(Pacing::Even), ..spec(&[("all", 100, 1_000), ("pacing", 100, 1_000)]) };
    let mut caller = Caller::warm(&limiter, even).await;
    for _ in 0..3 {
        let reply = caller.call(&[1]).await;
        assert_eq!(reply.permits(), 1, "{reply:?}");
    }
}

/// The rate is what the tightest limit allows within a second, except for four starts.
async fn burst_starts_of_all_callers_are_spaced(limiter: Arc<dyn Limiter>) {
    let limits = [("hour", 1_000_000, 3_600_000), ("second", 100, 1_000)];
    let burst = QuotaSpec { pacing: Some(Pacing::Burst), ..spec(&limits) };
    let first = Caller::warm(&limiter, burst.clone()).await;
    let mut callers = [first.clone(), Caller::new(&limiter, burst.clone())];
    let (mut starts, mut refusals) = (Vec::new(), 0);
    for turn in 0..12 {
        let reply = callers[turn % 2].call(&[1; 9]).await;
        for grant in &reply.grants {
            starts.extend(std::iter::repeat_n(reply.now.0 + grant.wait_us, grant.permits as usize));
        }
        if let Some(refusal) = reply.refused {
            let RefusalReason::Limit { index } = refusal.reason else { panic!("{reply:?}") };
            assert_eq!((burst.limit_name(index), refusal.exact), ("second", true));
            refusals += 1;
            until_us(&first, promised_us(&reply) - 100_000).await;
        }
    }
    assert!(refusals >= 2 && starts.len() > 50, "{refusals} refusals, {starts:?}");
    assert!(starts.is_sorted(), "both callers get their starts in the order of their calls: {starts:?}");
    assert!(starts.windows(5).all(|five| five[4] >= five[0] + 10_000), "four at once: {starts:?}");
    assert!(starts.windows(24).all(|some| some[23] >= some[0] + 200_000), "then 100 a second: {starts:?}");
    assert!(starts.windows(2).any(|pair| pair[0] == pair[1]), "and no strict distance: {starts:?}");
}

async fn starts_are_booked_no_further_ahead_than_asked(limiter: Arc<dyn Limiter>) {
    let even = QuotaSpec { pacing: Some(Pacing::Even), ..spec(&[("second", 100, 1_000)]) };
    for (look_ahead_ms, permits) in [(0, 1), (35, 4), (60, 7), (250, 26), (3_000, 26)] {
        let quota = ProviderName::new(format!("ahead-{look_ahead_ms}")).unwrap();
        let mut caller = Caller::warm(&limiter, QuotaSpec { quota, ..even.clone() }).await;
        caller.look_ahead = Duration::from_millis(look_ahead_ms);
        let reply = caller.call(&[1; 40]).await;
        assert_eq!(reply.permits(), permits, "{look_ahead_ms} ms ahead: {reply:?}");
        assert!(refused(&reply).wait_us > look_ahead_ms.min(250) * 1_000, "{reply:?}");
    }
}

/// Thousands of random histories of the state machine itself, on a simulated clock.
#[test]
fn algorithms_match_their_definitions_on_random_histories() {
    let call = (0_u64..700_000, prop::collection::vec(1_u32..4, 0..6), prop::bool::weighted(0.2));
    let numbers = (prop::sample::select(STARTS.to_vec()), 1_u32..8, 1_u64..9, 1_u32..6);
    let histories = (numbers, prop::collection::vec(call, 1..40));
    let granted = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 2_000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&histories, |((algorithm, max_requests, pace, burst), calls)| {
        let window = Duration::from_millis(pace * 60 * u64::from(max_requests));
        let burst = limit(algorithm).burst.map(|_| burst);
        let limit = LimitSpec { max_requests, window, burst, ..limit(algorithm) };
        let limit = LimitSpec { offset: limit.offset.min(window / 2), ..limit };
        let spec = only(limit.clone());
        let (mut quota, mut oracle) = (Quota::default(), Oracle::new(limit));
        let mut now_us = 1_800_000_000_000_000;
        let mut born = None;
        for (number, (gap_us, costs, promptly)) in (1..).zip(&calls) {
            now_us += gap_us;
            if let (true, Some(cost)) = (*promptly, costs.first())
                && let Says::StartsAt(start_us) = oracle.earliest(u64::from(*cost), now_us)
            {
                // One microsecond before it can be booked, or exactly then.
                now_us = now_us.max(start_us.saturating_sub(micros_up(BOOKING_HORIZON) + gap_us % 2));
            }
            let call = LimiterCall {
                incarnation: 1,
                number,
                requests: wants(costs),
                releases: Vec::new(),
                pause: None,
                rebuild: born.map(forgotten_nothing),
                seeds: None,
                invalidate_epoch: None,
                look_ahead: BOOKING_HORIZON,
                run_id: "run".to_owned(),
            };
            let reply = quota.call(Micros(now_us), &spec, &call);
            if born.replace(reply.state_epoch).is_some() {
                granted.set(granted.get() + oracle.holds(&reply, costs));
            }
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    assert!(granted.get() > 10_000, "only {} permits", granted.get());
}
