//! Conformance of every limiter, embedded or in Redis. Instants are compared on the limiter's own clock, which each
//! reply carries, so that they can be exact.

use std::sync::atomic::{AtomicU32, Ordering};

use sluicegate::domain::provider::BOOKING_HORIZON;
use sluicegate::domain::time::micros_up;
use sluicegate::limiter::embedded::EmbeddedLimiter;
use sluicegate::limiter::redis::client::RedisLimiter;

use super::*;
use crate::support::redis::{Redis, RedisCluster};

/// A new limiter for one test.
fn embedded() -> Arc<dyn Limiter> {
    Arc::new(EmbeddedLimiter::new())
}

/// A key prefix that no other test of this process has.
fn new_prefix() -> String {
    static PREFIXES: AtomicU32 = AtomicU32::new(0);
    format!("conformance-{}", PREFIXES.fetch_add(1, Ordering::Relaxed))
}

fn in_redis() -> Arc<dyn Limiter> {
    Arc::new(RedisLimiter::new(&Redis::shared().url(), &new_prefix()).unwrap())
}

fn in_cluster() -> Arc<dyn Limiter> {
    let urls = RedisCluster::shared().urls();
    Arc::new(RedisLimiter::cluster(urls.iter().map(String::as_str), &new_prefix()).unwrap())
}

macro_rules! on_every_limiter {
    ($($test:ident),+ $(,)?) => {
        mod embedded {
            $(#[tokio::test] async fn $test() { super::$test(super::embedded()).await })+
        }
        mod redis {
            $(#[tokio::test] async fn $test() { super::$test(super::in_redis()).await })+
        }
        mod cluster {
            $(#[tokio::test] async fn $test() { super::$test(super::in_cluster()).await })+
        }
    };
}

mod account_rules;
mod algorithms;
mod changes;
mod concurrency;
mod histories;
mod limit_changes_by_start;
mod pauses;
mod peeking;
mod rebuild;
mod scopes;
mod shadow;
mod throttle;

on_every_limiter!(
    first_call_finds_a_cold_limiter,
    cold_start_ends_by_time_or_rebuild,
    the_limit_is_granted_and_no_more,
    answered_slot_frees_exactly_one_window_later,
    unused_slot_is_returned_unchanged,
    released_booked_slot_keeps_its_start,
    unanswered_slot_counts_from_its_deadline,
    unanswered_slot_counts_per_limit_window,
    booked_slot_is_held_from_its_start,
    release_counts_once_for_its_own_call,
    release_frees_only_its_own_call,
    repeated_call_acquires_and_releases_once,
    several_limits_are_acquired_all_or_nothing,
    costs_are_granted_in_order,
    jitter_bound_frees_slot_from_its_start,
    smaller_jitter_bound_refuses_no_free_slot,
    a_closed_limit_grants_nothing,
    a_full_batch_is_one_call,
    quotas_are_independent,
);

async fn first_call_finds_a_cold_limiter(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("long", 5, 700), ("short", 3, 100)]);
    let mut caller = Caller::new(&limiter, spec.clone());
    let reply = caller.call(&[1, 1]).await;
    // The booking horizon, the longest hold and the longest window.
    let wait_us = micros_up(BOOKING_HORIZON) + micros_up(HOLD_MAX) + padded_us(&spec, 0);
    let cold = LimiterRefusal { reason: RefusalReason::Cold, wait_us, exact: false };
    assert_eq!((reply.grants.len(), reply.refused), (0, Some(cold)));
    assert_eq!(spec.cold_start_us(), cold.wait_us);
    assert_eq!(reply.state_epoch, reply.now);
    let again = caller.call(&[1]).await;
    assert_eq!((again.state_epoch, refused(&again).reason), (reply.state_epoch, RefusalReason::Cold));
    assert_eq!(promised_us(&again), promised_us(&reply), "a call does not prolong the cold start");
    assert!(limiter.peek(&spec, None).await.unwrap().iter().all(|limit| limit.used == 0));
}

async fn cold_start_ends_by_time_or_rebuild(limiter: Arc<dyn Limiter>) {
    let short = QuotaSpec { hold_max: Duration::from_millis(300), ..spec(&[("all", 1, 40)]) };
    let mut caller = Caller::new(&limiter, short.clone());
    let cold = caller.call(&[1]).await;
    // The rebuild of another epoch does not end this cold start.
    caller.warm = Some(Micros(cold.state_epoch.0 - 1));
    assert_eq!(refused(&caller.call(&[1]).await).reason, RefusalReason::Cold);
    caller.warm = None;
    until_us(&caller, promised_us(&cold)).await;
    assert_eq!(caller.call(&[1]).await.permits(), 1);
    let vouched = QuotaSpec { quota: ProviderName::new("vouched").unwrap(), ..short };
    assert_eq!(Caller::warm(&limiter, vouched).await.call(&[1]).await.permits(), 1);
}

async fn the_limit_is_granted_and_no_more(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 3, 500)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.call(&[1, 1]).await;
    assert_eq!((reply.permits(), reply.remaining, reply.refused), (2, 1, None));
    assert!(reply.grants.iter().all(|run| run.wait_us == 0), "{reply:?}");
    let mut other = Caller::new(&limiter, spec.clone());
    let reply = other.call(&[1, 1]).await;
    assert_eq!((reply.permits(), reply.remaining), (1, 0), "processes share the limit");
    let refusal = refused(&reply);
    assert_eq!((refusal.reason, refusal.exact), (RefusalReason::Limit { index: 0 }, false), "all slots are in flight");
    assert_eq!(refusal.wait_us, padded_us(&spec, 0), "the earliest case: one is answered now");
}

async fn answered_slot_frees_exactly_one_window_later(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 2, 400)]);
    let window_us = padded_us(&spec, 0);
    let mut caller = Caller::warm(&limiter, spec).await;
    let granted = caller.call(&[1, 1]).await;
    assert_eq!(granted.permits(), 2);
    let call = caller.number;
    let reply = caller.settle(vec![used(call, 1, 7_300), used(call, 1, 0)], &[1]).await;
    let refusal = refused(&reply);
    assert_eq!((refusal.reason, refusal.exact), (RefusalReason::Limit { index: 0 }, true));
    let first_us = free_again_us(&reply, 7_300, window_us);
    assert_eq!(promised_us(&reply), first_us);
    // Within the booking horizon it is booked for exactly the promised start.
    until_us(&caller, first_us - micros_up(BOOKING_HORIZON)).await;
    let booked = caller.call(&[1, 1]).await;
    let starts: Vec<u64> = booked.grants.iter().map(|run| booked.now.0 + run.wait_us).collect();
    assert_eq!(starts.first(), Some(&first_us.max(booked.now.0)), "{booked:?}");
    let second_us = free_again_us(&reply, 0, window_us);
    let second_start = starts.get(1).copied().unwrap_or_else(|| promised_us(&booked));
    assert_eq!(second_start, second_us.max(booked.now.0), "each slot has its own instant");
}

async fn unused_slot_is_returned_unchanged(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 1, 600)]);
    let mut caller = Caller::warm(&limiter, spec).await;
    let granted = caller.call(&[1]).await;
    let origins = granted.grants[0].origins.clone();
    let again = caller.settle(vec![not_sent(caller.number, 1, &origins)], &[1]).await;
    assert_eq!((again.permits(), again.grants[0].wait_us), (1, 0), "an unused permit leaves no usage");
}

async fn released_booked_slot_keeps_its_start(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 1, 600)]);
    let window_us = padded_us(&spec, 0);
    let mut caller = Caller::warm(&limiter, spec).await;
    caller.call(&[1]).await;
    let settled = caller.settle(vec![used(caller.number, 1, 0)], &[1]).await;
    let start_us = free_again_us(&settled, 0, window_us);
    assert_eq!(promised_us(&settled), start_us);
    until_us(&caller, start_us - 200_000).await;
    let booked = caller.call(&[1]).await;
    assert_eq!(booked.now.0 + booked.grants[0].wait_us, start_us.max(booked.now.0));
    let origins = booked.grants[0].origins.clone();
    let again = caller.settle(vec![not_sent(caller.number, 1, &origins)], &[1]).await;
    assert_eq!(
        again.now.0 + again.grants[0].wait_us,
        start_us.max(again.now.0),
        "the released slot starts no earlier than before"
    );
    // After its start, the slot is free like any other.
    let kept = if again.now.0 < start_us { origins } else { vec![0] };
    assert_eq!(again.grants[0].origins, kept, "the slot keeps its origin");
}

/// When a use without an answer stops to count, if it started at `start_us`: after the longest hold, rounded up to
/// whole milliseconds as in the log, and a window.
fn over_us(spec: &QuotaSpec, limit: usize, start_us: u64) -> u64 {
    (start_us + quota_spec::padded_us(micros_up(spec.hold_max))).div_ceil(1_000) * 1_000 + padded_us(spec, limit)
}

async fn unanswered_slot_counts_from_its_deadline(limiter: Arc<dyn Limiter>) {
    let spec = QuotaSpec { hold_max: SECOND / 2, ..spec(&[("all", 2, 600)]) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let first = caller.call(&[1]).await;
    until_us(&caller, first.now.0 + 100_000).await;
    let second = caller.call(&[1]).await;
    assert_eq!(second.permits(), 1);
    let in_flight = caller.call(&[1]).await;
    if in_flight.now.0 < first.now.0 + 500_000 {
        let answered_now_us = in_flight.now.0 + padded_us(&spec, 0);
        assert_eq!((promised_us(&in_flight), refused(&in_flight).exact), (answered_now_us, false));
    }
    // The first is past its deadline. So it counts for one more window and no longer.
    until_us(&caller, first.now.0 + 550_000).await;
    let over = [&first, &second].map(|reply| over_us(&spec, 0, reply.now.0));
    let reply = caller.call(&[1]).await;
    if reply.now.0 < over[0] - 250_000 {
        assert_eq!((promised_us(&reply), refused(&reply).exact), (over[0], true));
    }
    until_us(&caller, over[0] - 200_000).await;
    let mut starts = Vec::new();
    for _ in 0..2 {
        let reply = caller.call(&[1]).await;
        starts.extend(reply.grants.iter().map(|run| (reply.now.0, reply.now.0 + run.wait_us)));
    }
    for ((now_us, start_us), over_us) in starts.iter().zip(over) {
        assert_eq!(*start_us, over_us.max(*now_us), "{starts:?}");
    }
    assert!(!starts.is_empty(), "at least the first start is booked");
}

async fn unanswered_slot_counts_per_limit_window(limiter: Arc<dyn Limiter>) {
    let spec = QuotaSpec { hold_max: SECOND / 10, ..spec(&[("long", 9, 5_400_000), ("short", 2, 100)]) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    for turn in 1..=4 {
        let reply = caller.call(&[2]).await;
        assert_eq!(reply.permits(), 1, "round {turn}: {reply:?}");
        until_us(&caller, over_us(&spec, 1, reply.now.0 + reply.grants[0].wait_us)).await;
    }
    // Eight of the nine slots of 90 minutes are used.
    assert_eq!(caller.call(&[1]).await.permits(), 1);
    let reply = caller.call(&[1]).await;
    assert_eq!(refused(&reply).reason, RefusalReason::Limit { index: 0 }, "{reply:?}");
}

async fn booked_slot_is_held_from_its_start(limiter: Arc<dyn Limiter>) {
    let hold_us = 250_000;
    let spec = QuotaSpec { hold_max: Duration::from_micros(hold_us), ..spec(&[("all", 1, 700)]) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    caller.call(&[1]).await;
    let settled = caller.settle(vec![used(caller.number, 1, 0)], &[1]).await;
    let start_us = promised_us(&settled);
    until_us(&caller, start_us - 240_000).await;
    let booked = caller.call(&[1]).await;
    // A call after the promised start books nothing and starts at once.
    let start_us = start_us.max(booked.now.0);
    assert_eq!((booked.permits(), booked.now.0 + booked.grants[0].wait_us), (1, start_us));
    // Past its deadline, the use counts as answered at the deadline.
    until_us(&caller, start_us + quota_spec::padded_us(hold_us)).await;
    let reply = caller.call(&[1]).await;
    assert_eq!((reply.permits(), promised_us(&reply)), (0, over_us(&spec, 0, start_us)));
}

async fn release_counts_once_for_its_own_call(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 2, 100)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    caller.call(&[1, 1]).await;
    let call = caller.number;
    let mut stranger = Caller::new(&limiter, spec);
    stranger.settle(vec![used(call, 2, 0), not_sent(call, 2, &[0])], &[]).await;
    assert_eq!(caller.call(&[1]).await.permits(), 0, "permits of another caller");
    caller.settle(vec![not_sent(call + 40, 1, &[0])], &[]).await;
    assert_eq!(caller.call(&[1]).await.permits(), 0, "a call that was never made");
    let all_of_it = vec![used(call, 1, 0), not_sent(call, 1, &[0]), not_sent(call, 5, &[0]), not_sent(call, 1, &[0])];
    let reply = caller.settle(all_of_it, &[1, 1, 1]).await;
    // The unused slot starts at once, the answered one is booked a window later, and there is no third.
    let starts: Vec<bool> = reply.grants.iter().map(|run| run.wait_us == 0).collect();
    assert_eq!((reply.permits(), starts), (2, vec![true, false]), "{reply:?}");
}

async fn release_frees_only_its_own_call(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 3, 500)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(Caller::new(&limiter, spec).call(&[1, 1]).await.permits(), 2);
    caller.call(&[1]).await;
    let reply = caller.settle(vec![not_sent(caller.number, 3, &[0])], &[1, 1, 1]).await;
    assert_eq!(reply.permits(), 1, "two belong to another caller");
}

async fn repeated_call_acquires_and_releases_once(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 4, 100)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let first = caller.call(&[1, 1]).await;
    for _ in 0..3 {
        assert_eq!(caller.repeat(&[1, 1]).await.unwrap(), first, "a repeated call has the same reply");
    }
    caller.settlements = vec![not_sent(caller.number, 1, &[0])];
    let second = caller.call(&[1]).await;
    assert_eq!((second.permits(), second.remaining), (1, 2));
    assert_eq!(caller.repeat(&[1]).await.unwrap(), second);
    caller.settlements.clear();
    assert_eq!(limiter.peek(&spec, None).await.unwrap()[0].used, 2);
    let late = Caller { number: caller.number - 1, ..caller.clone() };
    let overtaken = late.repeat(&[1, 1]).await.unwrap();
    assert_eq!((overtaken.permits(), refused(&overtaken).reason), (0, RefusalReason::StaleCall));
    assert_eq!(caller.call(&[1, 1, 1]).await.permits(), 2);
}

async fn several_limits_are_acquired_all_or_nothing(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("hour", 3, 3_000), ("second", 2, 300)]);
    let (hour_us, second_us) = (padded_us(&spec, 0), padded_us(&spec, 1));
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let first = caller.call(&[1, 1, 1]).await;
    assert_eq!(
        (first.permits(), refused(&first).reason),
        (2, RefusalReason::Limit { index: 1 }),
        "the limit `second` is full"
    );
    let uses: Vec<u64> = limiter.peek(&spec, None).await.unwrap().iter().map(|limit| limit.used).collect();
    assert_eq!(uses, [2, 2], "a permit that one limit refuses uses no slot of the other");
    let settled = caller.settle(vec![used(caller.number, 2, 0)], &[1]).await;
    let free_us = free_again_us(&settled, 0, second_us);
    assert_eq!((promised_us(&settled), refused(&settled).reason), (free_us, RefusalReason::Limit { index: 1 }));
    until_us(&caller, free_us).await;
    let third = caller.call(&[1, 1]).await;
    assert_eq!(third.permits(), 1, "one slot is left per hour, two per second: {third:?}");
    assert_eq!(refused(&third).reason, RefusalReason::Limit { index: 0 });
    assert_eq!((promised_us(&third), refused(&third).exact), (free_again_us(&settled, 0, hour_us), true));
}

async fn costs_are_granted_in_order(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 5, 100)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.call(&[3, 3, 1]).await;
    assert_eq!((reply.permits(), reply.remaining), (1, 2), "the cheap request does not overtake the costly one");
    let call = caller.number;
    assert_eq!(caller.call(&[2]).await.remaining, 0);
    let reply = caller.settle(vec![not_sent(call, 3, &[0])], &[4, 1]).await;
    assert_eq!(reply.permits(), 0);
    assert_eq!(limiter.peek(&spec, None).await.unwrap()[0].used, 2);
    let never = caller.call(&[6]).await;
    assert_eq!((never.permits(), refused(&never).exact), (0, false), "a cost above the limit is never granted");
}

async fn jitter_bound_frees_slot_from_its_start(limiter: Arc<dyn Limiter>) {
    let jitter = Duration::from_millis(30);
    let quota = |quota: &str, window_ms| QuotaSpec {
        quota: ProviderName::new(quota).unwrap(),
        grant_jitter: Some(jitter),
        ..spec(&[("all", 2, window_ms)])
    };
    let free_us =
        |first: &LimiterReply, spec: &QuotaSpec| (first.now.0 + 30_000).div_ceil(1_000) * 1_000 + padded_us(spec, 0);
    // First a quota whose slots are too far ahead to be booked, then one whose slots are awaited.
    let mut caller = Caller::warm(&limiter, quota("told", 3_000)).await;
    let first = caller.call(&[1, 1]).await;
    assert_eq!(first.permits(), 2);
    let told_us = free_us(&first, &caller.spec);
    let reply = caller.call(&[1]).await;
    assert_eq!((promised_us(&reply), refused(&reply).exact), (told_us, true));
    let call = caller.number - 1;
    let settled = caller.settle(vec![used(call, 2, 0), not_sent(call, 2, &[0])], &[1]).await;
    assert_eq!(promised_us(&settled), told_us, "releases do not move the start");
    let mut caller = Caller::warm(&limiter, quota("waited", 400)).await;
    let first = caller.call(&[1, 1]).await;
    caller.settle(vec![used(caller.number, 2, 0)], &[]).await;
    until_us(&caller, free_us(&first, &caller.spec)).await;
    assert_eq!(caller.call(&[1, 1, 1]).await.permits(), 2);
}

/// Uses logged under the larger bound lie further ahead than any booking under the smaller one.
async fn smaller_jitter_bound_refuses_no_free_slot(limiter: Arc<dyn Limiter>) {
    let allowing = |jitter_ms| Some(Duration::from_millis(jitter_ms));
    let mut caller =
        Caller::warm(&limiter, QuotaSpec { grant_jitter: allowing(60_000), ..spec(&[("all", 20, 1_000)]) }).await;
    assert_eq!(caller.call(&[1; 4]).await.permits(), 4);
    caller.spec = QuotaSpec { version: 2, grant_jitter: allowing(50), ..caller.spec };
    let reply = caller.call(&[1; 10]).await;
    assert_eq!((reply.permits(), reply.refused), (10, None), "{reply:?}");
    let most = reply.grants.iter().map(|run| run.permits).max();
    assert!(most <= Some(2), "the starts are spread: {reply:?}");
}

async fn a_closed_limit_grants_nothing(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 0, 300), ("other", 5, 100)])).await;
    let reply = caller.call(&[1]).await;
    let closed =
        LimiterRefusal { reason: RefusalReason::Limit { index: 0 }, wait_us: padded_us(&caller.spec, 0), exact: false };
    assert_eq!((reply.permits(), reply.refused), (0, Some(closed)));
}

async fn a_full_batch_is_one_call(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 1_500, 300)])).await;
    let reply = caller.call(&[1; 1_000]).await;
    assert_eq!((reply.permits(), reply.grants.len(), reply.remaining), (1_000, 1, 500));
    let call = caller.number;
    let answers: Vec<PermitRelease> = (0..1_000).map(|age_us| used(call, 1, age_us * 20)).collect();
    let reply = caller.settle(answers, &[1; 1_000]).await;
    assert_eq!(reply.permits(), 500, "answered slots are free one window later");
}

async fn quotas_are_independent(limiter: Arc<dyn Limiter>) {
    let mut one = Caller::warm(&limiter, spec(&[("all", 1, 300)])).await;
    let other = QuotaSpec { quota: ProviderName::new("other").unwrap(), version: 9, ..spec(&[("all", 1, 300)]) };
    let mut other = Caller::warm(&limiter, other).await;
    assert_eq!(one.call(&[1]).await.permits(), 1);
    assert_eq!(other.call(&[1]).await.permits(), 1);
    other.pause = Some(SECOND);
    other.call(&[]).await;
    let reply = one.settle(vec![not_sent(one.number, 1, &[0])], &[1]).await;
    assert_eq!((reply.permits(), reply.version), (1, 1));
}
