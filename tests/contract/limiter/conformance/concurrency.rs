//! Limits of requests in flight: a slot is free when its request has ended, and never while it may be in flight.

use sluicegate::domain::limit::{Algorithm, AppliesTo, Scope};
use sluicegate::domain::quota_spec::CONCURRENCY_RETRY;

use super::*;

on_every_limiter!(
    slots_are_free_when_requests_end,
    unanswered_request_holds_its_slot_to_its_deadline,
    accounts_have_slots_of_their_own,
    concurrency_and_rate_are_acquired_together,
    slots_are_held_whatever_the_slot_release,
    in_flight_of_a_lost_state_still_counts,
    lowered_concurrency_waits_for_the_excess,
    lookups_can_have_slots_of_their_own,
    shadow_concurrency_counts_and_refuses_nothing,
    closed_concurrency_grants_nothing,
);

fn slots(max_requests: u32) -> QuotaSpec {
    QuotaSpec { limits: vec![LimitSpec::concurrency("slots", max_requests)], ..spec(&[]) }
}

fn is_full(reply: &LimiterReply) -> bool {
    let refusal = LimiterRefusal {
        reason: RefusalReason::Limit { index: 0 },
        wait_us: micros_up(CONCURRENCY_RETRY),
        exact: false,
    };
    reply.refused == Some(refusal)
}

async fn slots_are_free_when_requests_end(limiter: Arc<dyn Limiter>) {
    let mut first = Caller::warm(&limiter, slots(3)).await;
    let mut second = Caller::new(&limiter, first.spec.clone());
    let reply = first.call(&[1, 1]).await;
    assert_eq!((reply.permits(), reply.remaining, reply.refused), (2, 1, None));
    let of_first = first.number;
    let reply = second.call(&[1, 1]).await;
    assert_eq!((reply.permits(), reply.remaining), (1, 0), "processes share the slots");
    assert!(is_full(&reply), "{reply:?}");
    let uses = limiter.peek(&first.spec, None).await.unwrap();
    assert_eq!((uses[0].used, uses[0].remaining()), (3, 0));
    // Ended long ago, just now, or not sent: each slot is free at once, and once.
    let ends = [used(of_first, 1, 70_000_000), not_sent(of_first, 1, &[0])];
    let reply = first.settle(ends.to_vec(), &[1, 1, 1]).await;
    assert_eq!((reply.permits(), reply.grants[0].wait_us), (2, 0), "{reply:?}");
    assert!(is_full(&first.settle(ends.to_vec(), &[1]).await), "released before");
    assert!(is_full(&second.call(&[1]).await));
    let call = first.number - 1;
    assert_eq!(first.settle(vec![used(call, 2, 0)], &[2]).await.permits(), 1, "a costly call holds as many slots");
    assert!(is_full(&second.call(&[1]).await));
}

async fn unanswered_request_holds_its_slot_to_its_deadline(limiter: Arc<dyn Limiter>) {
    let short = QuotaSpec { hold_max: Duration::from_millis(300), ..slots(1) };
    let lease_us = quota_spec::padded_us(300_000);
    let mut crashed = Caller::warm(&limiter, short.clone()).await;
    let granted = crashed.call(&[1]).await;
    let mut other = Caller::new(&limiter, short);
    loop {
        let reply = other.call(&[1]).await;
        if reply.permits() > 0 {
            assert!(reply.now.0 >= granted.now.0 + lease_us, "{reply:?}");
            break;
        }
        assert!(reply.now.0 < granted.now.0 + lease_us && is_full(&reply), "{reply:?}");
        until_us(&other, (reply.now.0 + 50_000).min(granted.now.0 + lease_us)).await;
    }
    // What it reports now frees nothing.
    let call = crashed.number;
    assert!(is_full(&crashed.settle(vec![used(call, 1, 0)], &[1]).await));
}

async fn accounts_have_slots_of_their_own(limiter: Arc<dyn Limiter>) {
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::concurrency("account", 2) };
    let spec = QuotaSpec { limits: vec![own, LimitSpec::concurrency("slots", 3)], ..spec(&[]) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let of = |permits, account| PermitRequest {
        subjects: spec.subjects(Some(account), None).unwrap(),
        ..PermitRequest::charges(permits, 1)
    };
    let reply = caller.ask(&[of(3, "a"), of(3, "b")]).await;
    let served: Vec<u32> = reply.grants.iter().map(|grant| grant.permits).collect();
    assert_eq!(served, [2, 1], "two by its own limit, then the third slot of all: {reply:?}");
    assert_eq!(reply.skipped.len(), 1);
    let skipped = reply.skipped[0];
    assert_eq!((skipped.limit, skipped.wait_us, skipped.exact), (0, micros_up(CONCURRENCY_RETRY), false));
    let call = caller.number;
    let released = PermitRelease { subjects: spec.subjects(Some("a"), None).unwrap(), ..used(call, 1, 0) };
    caller.settlements = vec![released];
    let reply = caller.ask(&[of(1, "a")]).await;
    assert_eq!(reply.permits(), 1, "{reply:?}");
}

async fn concurrency_and_rate_are_acquired_together(limiter: Arc<dyn Limiter>) {
    let limits = vec![LimitSpec::sliding_log("rate", 3, Duration::from_secs(9)), LimitSpec::concurrency("slots", 2)];
    let mut caller = Caller::warm(&limiter, QuotaSpec { limits, ..spec(&[]) }).await;
    let reply = caller.call(&[1; 3]).await;
    assert_eq!((reply.permits(), refused(&reply).reason), (2, RefusalReason::Limit { index: 1 }));
    let call = caller.number;
    let reply = caller.settle(vec![used(call, 2, 0)], &[1; 3]).await;
    let refusal = refused(&reply);
    assert_eq!((reply.permits(), refusal.reason, refusal.exact), (1, RefusalReason::Limit { index: 0 }, true));
    let uses = limiter.peek(&caller.spec, None).await.unwrap();
    assert_eq!(uses.iter().map(|usage| usage.used).collect::<Vec<_>>(), [3, 1], "what ended counts for the rate alone");
}

async fn slots_are_held_whatever_the_slot_release(limiter: Arc<dyn Limiter>) {
    let limits = vec![LimitSpec::sliding_log("rate", 9, Duration::from_secs(9)), LimitSpec::concurrency("slots", 2)];
    let by_start = QuotaSpec { grant_jitter: Some(Duration::from_millis(30)), limits, ..spec(&[]) };
    let mut caller = Caller::warm(&limiter, by_start).await;
    assert_eq!(caller.call(&[1; 3]).await.permits(), 2);
    assert_eq!(caller.call(&[1]).await.permits(), 0);
    let call = caller.number - 1;
    assert_eq!(caller.settle(vec![used(call, 1, 0)], &[1, 1]).await.permits(), 1);
}

async fn in_flight_of_a_lost_state_still_counts(limiter: Arc<dyn Limiter>) {
    let spec = QuotaSpec { hold_max: Duration::from_millis(400), ..slots(3) };
    let mut caller = Caller::new(&limiter, spec.clone());
    let cold = caller.call(&[1]).await;
    assert_eq!(refused(&cold).wait_us, spec.cold_start_us());
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: 2,
        requests: wants(&[1; 3]),
        releases: Vec::new(),
        pause: None,
        rebuild: Some(RebuildData {
            state_epoch: cold.state_epoch,
            // What has ended holds no slot.
            ended: vec![PastUse { age: Duration::ZERO, cost: CostByKind::charges(3) }],
            in_flight: CostByKind::charges(2),
        }),
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: limiter.run_id(&spec.quota).await.unwrap(),
    };
    let rebuilt = limiter.call(&spec, &call).await.unwrap();
    assert_eq!(rebuilt.permits(), 1, "{rebuilt:?}");
    caller.number = 2;
    let over_us = rebuilt.now.0 + micros_up(BOOKING_HORIZON) + quota_spec::padded_us(400_000);
    until_us(&caller, over_us).await;
    assert_eq!(caller.settle(vec![used(2, 1, 0)], &[1; 3]).await.permits(), 3);
}

async fn lowered_concurrency_waits_for_the_excess(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, slots(4)).await;
    assert_eq!(caller.call(&[1; 4]).await.permits(), 4);
    let call = caller.number;
    caller.spec = QuotaSpec { version: 2, ..slots(2) };
    assert!(is_full(&caller.settle(vec![used(call, 2, 0)], &[1]).await));
    assert_eq!(caller.settle(vec![used(call, 1, 0)], &[1, 1]).await.permits(), 1);
    caller.spec = QuotaSpec { version: 3, ..slots(5) };
    assert_eq!(caller.call(&[1; 9]).await.permits(), 3);
}

async fn lookups_can_have_slots_of_their_own(limiter: Arc<dyn Limiter>) {
    let limit = |name: &str, applies_to| LimitSpec { applies_to, ..LimitSpec::concurrency(name, 1) };
    let limits = vec![
        limit("charges", AppliesTo::Charge),
        limit("lookups", AppliesTo::Lookup),
        LimitSpec::sliding_log("rate", 9, Duration::from_secs(9)),
    ];
    let mut caller = Caller::warm(&limiter, QuotaSpec { limits, ..spec(&[]) }).await;
    let lookups = PermitRequest { kind: CallKind::Lookup, ..PermitRequest::charges(2, 1) };
    let reply = caller.ask(&[PermitRequest::charges(2, 1), lookups]).await;
    assert_eq!((reply.permits(), reply.skipped.len()), (2, 2), "one of each: {reply:?}");
}

async fn shadow_concurrency_counts_and_refuses_nothing(limiter: Arc<dyn Limiter>) {
    let shadow = LimitSpec { shadow: true, ..LimitSpec::concurrency("slots", 2) };
    let limits = vec![LimitSpec::sliding_log("rate", 9, Duration::from_secs(9)), shadow];
    let mut caller = Caller::warm(&limiter, QuotaSpec { limits, ..spec(&[]) }).await;
    assert_eq!(caller.call(&[1; 5]).await.permits(), 5);
    let uses = limiter.peek(&caller.spec, None).await.unwrap();
    assert_eq!((uses[1].used, uses[1].would_have_refused), (5, 3), "{uses:?}");
}

async fn closed_concurrency_grants_nothing(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, slots(0)).await;
    assert!(is_full(&caller.call(&[1]).await));
    // A limit of another algorithm under the same name does not know what is in flight.
    let mut changed = slots(2);
    changed.version = 2;
    changed.limits[0].algorithm = Algorithm::SlidingLog;
    changed.limits[0].window = Duration::from_secs(9);
    caller.spec = changed;
    assert!(matches!(refused(&caller.call(&[1]).await).reason, RefusalReason::NeedsHistory { .. }));
}
