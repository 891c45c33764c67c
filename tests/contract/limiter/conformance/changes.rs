//! Changes of limits, on every limiter: earlier use still counts, and a caller with stale settings gets nothing.

use super::*;

on_every_limiter!(
    a_lowered_limit_waits_for_the_newest_uses,
    limit_lowered_and_raised_keeps_usage,
    calls_in_flight_count_against_a_lowered_limit,
    a_raised_limit_grants_the_difference,
    raised_limit_still_counts_uses_before_booking,
    new_or_widened_limit_waits_one_window,
    a_shorter_window_counts_at_once,
    stale_settings_acquire_and_release_nothing,
);

async fn a_lowered_limit_waits_for_the_newest_uses(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 3_000)])).await;
    let window_us = padded_us(&caller.spec, 0);
    caller.call(&[1, 1, 1]).await;
    let call = caller.number;
    caller.settle(vec![used(call, 1, 0)], &[]).await;
    let start_us = caller.call(&[]).await.now.0;
    until_us(&caller, start_us + 30_000).await;
    caller.settle(vec![used(call, 1, 0)], &[]).await;
    until_us(&caller, start_us + 60_000).await;
    let last = caller.settle(vec![used(call, 1, 0)], &[]).await;
    caller.spec.version = 2;
    caller.spec.limits[0].max_requests = 1;
    let reply = caller.call(&[1]).await;
    assert_eq!(promised_us(&reply), free_again_us(&last, 0, window_us), "the newest use decides");
    assert_eq!((reply.version, refused(&reply).exact), (2, true));
}

async fn limit_lowered_and_raised_keeps_usage(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 3_000)])).await;
    let window_us = padded_us(&caller.spec, 0);
    caller.call(&[1, 1, 1]).await;
    let released = caller.settle(vec![used(caller.number, 3, 0)], &[]).await;
    for (version, max_requests, permits) in [(2, 0, 0), (3, 5, 2)] {
        caller.spec.version = version;
        caller.spec.limits[0].max_requests = max_requests;
        let reply = caller.call(&[1; 6]).await;
        assert_eq!(
            reply.permits(),
            permits,
            "three calls are within the window, {max_requests} are allowed: {reply:?}"
        );
    }
    let reply = caller.call(&[1]).await;
    assert_eq!((promised_us(&reply), refused(&reply).exact), (free_again_us(&released, 0, window_us), true));
    // A shorter window takes effect at once and decides the wait.
    caller.spec = QuotaSpec { version: 4, ..spec(&[("all", 5, 600)]) };
    until_us(&caller, free_again_us(&released, 0, padded_us(&caller.spec, 0))).await;
    assert_eq!(caller.call(&[1; 6]).await.permits(), 3, "two are in flight");
}

async fn calls_in_flight_count_against_a_lowered_limit(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 100)])).await;
    caller.call(&[1, 1, 1]).await;
    let call = caller.number;
    caller.spec.version = 2;
    caller.spec.limits[0].max_requests = 2;
    let reply = caller.settle(vec![not_sent(call, 1, &[0])], &[1]).await;
    assert_eq!(reply.permits(), 0, "two are in flight, two are allowed");
    let reply = caller.settle(vec![not_sent(call, 1, &[0])], &[1, 1]).await;
    assert_eq!((reply.permits(), reply.remaining), (1, 0));
}

async fn a_raised_limit_grants_the_difference(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 2, 3_000)])).await;
    caller.call(&[1, 1]).await;
    caller.settle(vec![used(caller.number, 2, 0)], &[]).await;
    caller.spec.version = 2;
    caller.spec.limits[0].max_requests = 5;
    let reply = caller.call(&[1; 5]).await;
    assert_eq!((reply.permits(), reply.grants[0].wait_us), (3, 0), "{reply:?}");
}

/// A start that was booked under a lowered limit removed the uses above that limit from the log. They still count until
/// their window ends.
async fn raised_limit_still_counts_uses_before_booking(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 600)])).await;
    caller.call(&[1, 1, 1]).await;
    let released = caller.settle(vec![used(caller.number, 3, 0)], &[]).await;
    let free_us = free_again_us(&released, 0, padded_us(&caller.spec, 0));
    caller.spec.version = 2;
    caller.spec.limits[0].max_requests = 1;
    until_us(&caller, free_us - 220_000).await;
    let booked = caller.call(&[1]).await;
    assert_eq!(booked.now.0 + booked.grants[0].wait_us, free_us.max(booked.now.0));
    caller.spec.version = 3;
    caller.spec.limits[0].max_requests = 3;
    let reply = caller.call(&[1, 1]).await;
    let starts: Vec<u64> = reply.grants.iter().map(|run| reply.now.0 + run.wait_us).collect();
    assert_eq!((reply.permits(), starts), (2, vec![free_us.max(reply.now.0)]), "three uses count until {free_us}");
}

async fn new_or_widened_limit_waits_one_window(limiter: Arc<dyn Limiter>) {
    let soon = |limits: &[(&str, u32, u64)]| QuotaSpec { hold_max: SECOND, ..spec(limits) };
    let mut caller = Caller::warm(&limiter, soon(&[("old", 5, 400)])).await;
    caller.spec = QuotaSpec { version: 2, ..soon(&[("new", 9, 700), ("old", 5, 400)]) };
    let new_us = unknown_past_us(&caller.spec, 0);
    let reply = caller.call(&[1]).await;
    let start_delay_us = caller.spec.start_delay_max_us();
    let unknown = RefusalReason::NeedsHistory { index: 0, readable_in_us: start_delay_us };
    assert_eq!((reply.permits(), refused(&reply).reason), (0, unknown));
    assert_eq!(
        (refused(&reply).wait_us, refused(&reply).exact),
        (new_us, true),
        "the past of the new limit is not known"
    );
    until_us(&caller, promised_us(&reply)).await;
    assert_eq!(caller.call(&[1]).await.permits(), 1);
    caller.spec = QuotaSpec { version: 3, ..soon(&[("new", 9, 700), ("old", 5, 500)]) };
    let reply = caller.call(&[1]).await;
    assert_eq!(refused(&reply).reason, RefusalReason::NeedsHistory { index: 1, readable_in_us: start_delay_us });
    assert_eq!(
        refused(&reply).wait_us,
        unknown_past_us(&caller.spec, 1),
        "uses before the old window are not in the log"
    );
    // A limit that was removed and added again is new.
    caller.spec = QuotaSpec { version: 4, ..soon(&[("new", 9, 700)]) };
    caller.call(&[]).await;
    caller.spec = QuotaSpec { version: 5, ..soon(&[("new", 9, 700), ("old", 5, 500)]) };
    let back = caller.call(&[1]).await;
    assert_eq!((back.permits(), promised_us(&back)), (0, back.now.0 + unknown_past_us(&caller.spec, 1)));
}

async fn a_shorter_window_counts_at_once(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 1, 9_000)])).await;
    caller.call(&[1]).await;
    let released = caller.settle(vec![used(caller.number, 1, 0)], &[]).await;
    caller.spec = QuotaSpec { version: 2, ..spec(&[("all", 1, 3_000)]) };
    let reply = caller.call(&[1]).await;
    assert_eq!(promised_us(&reply), free_again_us(&released, 0, padded_us(&caller.spec, 0)));
}

async fn stale_settings_acquire_and_release_nothing(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 1, 100)])).await;
    let mut newer = Caller::new(&limiter, QuotaSpec { version: 7, ..caller.spec.clone() });
    caller.call(&[1]).await;
    let call = caller.number;
    newer.call(&[]).await;
    let stale = caller.settle(vec![not_sent(call, 1, &[0])], &[1]).await;
    assert_eq!((stale.permits(), refused(&stale).reason, stale.version), (0, RefusalReason::StaleVersion, 7));
    assert_eq!(newer.call(&[1]).await.permits(), 0, "no permit was released either");
    caller.spec.version = 7;
    assert_eq!(
        caller.settle(vec![not_sent(call, 1, &[0])], &[1]).await.permits(),
        1,
        "the permit can still be released"
    );
}
