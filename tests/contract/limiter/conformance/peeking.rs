//! Peeks at limits, on every limiter: they acquire nothing, and report usage and the next possible start.

use super::*;

on_every_limiter!(peeking_acquires_nothing, peeking_reports_the_next_start, peeking_handles_renamed_and_removed_limits,);

async fn peeking_acquires_nothing(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("a", 3, 3_000), ("b", 5, 100)]);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    caller.call(&[1, 1]).await;
    let released = caller.settle(vec![used(caller.number, 1, 0)], &[]).await;
    let uses = || async { limiter.peek(&spec, None).await.unwrap().iter().map(|limit| limit.used).collect::<Vec<_>>() };
    for _ in 0..5 {
        assert_eq!(uses().await[0], 2);
    }
    until_us(&caller, free_again_us(&released, 0, padded_us(&spec, 1))).await;
    assert_eq!(uses().await, [2, 1], "`a` counts both uses, `b` only the one in flight");
    let names: Vec<String> = limiter.peek(&spec, None).await.unwrap().into_iter().map(|limit| limit.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(caller.call(&[1, 1]).await.permits(), 1);
}

async fn peeking_reports_the_next_start(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("a", 2, 3_000), ("closed", 0, 100)]);
    let open = QuotaSpec { limits: spec.limits[..1].to_vec(), ..spec.clone() };
    let mut caller = Caller::warm(&limiter, open.clone()).await;
    let seen = async |spec: &QuotaSpec| limiter.peek(spec, None).await.unwrap();
    caller.call(&[1]).await;
    caller.settle(vec![used(caller.number, 1, 0)], &[]).await;
    let one = seen(&open).await.remove(0);
    assert_eq!((one.used, one.remaining(), one.retry_after), (1, 1, Some(Duration::ZERO)), "one slot is left");
    assert!(one.reset_after > Duration::ZERO && one.reset_after <= Duration::from_micros(padded_us(&open, 0) + 1_000));
    caller.call(&[1]).await;
    let refusal = refused(&caller.settle(vec![used(caller.number, 1, 0)], &[1]).await);
    let full = seen(&open).await.remove(0);
    let retry_after = full.retry_after.unwrap();
    assert_eq!((full.used, full.remaining()), (2, 0));
    assert!(
        retry_after > Duration::ZERO && retry_after <= Duration::from_micros(refusal.wait_us),
        "{full:?} {refusal:?}"
    );
    assert!(full.reset_after >= retry_after, "{full:?}");
    assert_eq!(seen(&spec).await[1].retry_after, None, "a closed limit never grants a permit");
}

/// Each process reads settings at its own time. So a reader may name limits that the store does not know.
async fn peeking_handles_renamed_and_removed_limits(limiter: Arc<dyn Limiter>) {
    let before = spec(&[("all", 200, 60_000), ("old", 200, 200)]);
    let mut caller = Caller::warm(&limiter, before.clone()).await;
    // Forty answers one millisecond apart make logs of several chunks. So the reader also searches the middle, once the
    // uses of the first chunk no longer count. Answers older than the last logged one are logged at its instant.
    for _ in 0..3 {
        let now_us = caller.call(&[]).await.now.0;
        until_us(&caller, now_us + 45_000).await;
        assert_eq!(caller.call(&[1; 40]).await.permits(), 40);
        let call = caller.number;
        caller.settle((0..40).rev().map(|nth| used(call, 1, nth * 1_000)).collect(), &[]).await;
    }
    let now_us = caller.call(&[]).await.now.0;
    // Instants are logged in whole milliseconds, rounded up.
    until_us(&caller, now_us + padded_us(&before, 1) + 1_000).await;
    let renamed = QuotaSpec { version: 2, ..spec(&[("all", 200, 60_000), ("new", 200, 200)]) };
    let fewer = QuotaSpec { version: 2, ..spec(&[("all", 200, 60_000)]) };
    for (now, expected) in [(renamed, vec![120, 0]), (fewer, vec![120]), (before, vec![120, 0])] {
        let uses: Vec<u64> = limiter.peek(&now, None).await.unwrap().iter().map(|limit| limit.used).collect();
        assert_eq!(uses, expected);
    }
}
