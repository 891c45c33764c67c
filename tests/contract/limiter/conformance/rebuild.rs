//! Rebuild of a cold limiter from past use. It grants the remaining permits, and never more than a limiter that lost
//! nothing.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::limit::{Algorithm, AppliesTo};
use sluicegate::domain::permit_protocol::BATCH_MAX;
use sluicegate::domain::quota::Quota;

use super::algorithms::limit;
use super::*;

on_every_limiter!(
    ledger_history_counts_as_usage,
    in_flight_requests_count_until_latest_end,
    in_flight_requests_count_by_kind,
    past_requests_count_by_kind,
    bucket_history_is_capped_at_capacity,
    full_history_in_one_call_counts,
    oversized_history_rebuilds_nothing,
    warm_limiter_ignores_a_rebuild,
);

/// A window so long that no use stops to count during the test.
fn long(algorithm: Algorithm) -> LimitSpec {
    LimitSpec { max_requests: 6, window: Duration::from_secs(5_400), offset: Duration::ZERO, ..limit(algorithm) }
}

fn of(algorithm: Algorithm) -> QuotaSpec {
    let quota = ProviderName::new(algorithm.name().replace('_', "-")).unwrap();
    QuotaSpec { quota, limits: vec![long(algorithm)], ..spec(&[]) }
}

/// The next call of a cold limiter: it sends past use for the rebuild, and requests permits.
async fn told(
    limiter: &Arc<dyn Limiter>,
    spec: &QuotaSpec,
    ended: Vec<PastUse>,
    open: u32,
    permits: u32,
) -> LimiterReply {
    told_of_kinds(limiter, spec, ended, CostByKind::charges(open), PermitRequest::charges(permits, 1)).await
}

async fn told_of_kinds(
    limiter: &Arc<dyn Limiter>,
    spec: &QuotaSpec,
    ended: Vec<PastUse>,
    open: CostByKind,
    want: PermitRequest,
) -> LimiterReply {
    let mut caller = Caller::new(limiter, spec.clone());
    let born = caller.call(&[]).await.state_epoch;
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: 2,
        requests: vec![want],
        releases: Vec::new(),
        pause: None,
        rebuild: Some(RebuildData { state_epoch: born, ended, in_flight: open }),
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: limiter.run_id(&spec.quota).await.unwrap(),
    };
    limiter.call(spec, &call).await.unwrap()
}

fn past(age_ms: u64, cost: u32) -> PastUse {
    PastUse { age: Duration::from_millis(age_ms), cost: CostByKind::charges(cost) }
}

async fn ledger_history_counts_as_usage(limiter: Arc<dyn Limiter>) {
    for algorithm in Algorithm::WITH_WINDOW {
        let spec = of(algorithm);
        // Past uses in any order; the first no longer counts.
        let reply = told(&limiter, &spec, vec![past(20_000_000, 9), past(30, 1), past(500, 2)], 0, 9).await;
        let capacity = u64::from(spec.limits[0].cost_max());
        // A calendar window may have begun after those uses; then they do not count in it.
        let begun_us = reply.now.0 % 5_400_000_000;
        if algorithm != Algorithm::FixedWindow || begun_us > 500_000 {
            let left = capacity.saturating_sub(3);
            assert_eq!(reply.permits(), left, "{algorithm:?}: {reply:?}");
        }
        if algorithm == Algorithm::SlidingLog {
            let free_us = free_again_us(&reply, 500_000, padded_us(&spec, 0));
            assert_eq!((promised_us(&reply), refused(&reply).exact), (free_us, true));
        }
    }
}

async fn in_flight_requests_count_until_latest_end(limiter: Arc<dyn Limiter>) {
    for algorithm in [Algorithm::SlidingLog, Algorithm::TokenBucket] {
        let spec = of(algorithm);
        let reply = told(&limiter, &spec, Vec::new(), 6, 9).await;
        let (waits_us, exact) = match algorithm {
            // All are in flight. The earliest case is an answer now.
            Algorithm::SlidingLog => (padded_us(&spec, 0), false),
            // All six count as started now. The bucket holds at most four, and one of them must drain first.
            _ => (900_000_000, true),
        };
        let refusal = refused(&reply);
        assert_eq!((reply.permits(), refusal.wait_us, refusal.exact), (0, waits_us, exact), "{algorithm:?}: {reply:?}");
    }
}

async fn in_flight_requests_count_by_kind(limiter: Arc<dyn Limiter>) {
    let lookups = PermitRequest { kind: CallKind::Lookup, ..PermitRequest::charges(9, 1) };
    for (applies_to, want) in [(AppliesTo::Charge, PermitRequest::charges(9, 1)), (AppliesTo::Lookup, lookups)] {
        for (algorithm, name) in [(Algorithm::SlidingLog, "held"), (Algorithm::SlidingWindow, "started")] {
            for open in
                [CostByKind::charges(4), CostByKind { charges: 0, lookups: 4 }, CostByKind { charges: 1, lookups: 3 }]
            {
                let own = LimitSpec { applies_to, ..long(algorithm) };
                let all = LimitSpec::sliding_log("z-all", 8, Duration::from_secs(60));
                let quota = format!("{name}-{}-{}-{}", applies_to.name(), open.charges, open.lookups);
                let quota = ProviderName::new(quota).unwrap();
                let spec = QuotaSpec { quota, limits: vec![own, all], ..spec(&[]) };
                let reply = told_of_kinds(&limiter, &spec, Vec::new(), open, want.clone()).await;
                let of_kind = if applies_to == AppliesTo::Charge { open.charges } else { open.lookups };
                // Six slots for this kind, eight for all kinds.
                assert_eq!(reply.permits(), u64::from((6 - of_kind).min(4)), "{applies_to:?} {open:?}: {reply:?}");
            }
        }
    }
}

async fn past_requests_count_by_kind(limiter: Arc<dyn Limiter>) {
    let lookups = PermitRequest { kind: CallKind::Lookup, ..PermitRequest::charges(9, 1) };
    let cost = CostByKind { charges: 2, lookups: 1 };
    for (applies_to, want) in [(AppliesTo::Charge, PermitRequest::charges(9, 1)), (AppliesTo::Lookup, lookups)] {
        for algorithm in [Algorithm::SlidingLog, Algorithm::SlidingWindow, Algorithm::TokenBucket, Algorithm::Gcra] {
            let own = LimitSpec { applies_to, ..long(algorithm) };
            let left = own.cost_max() - cost.counted_by(applies_to);
            let quota = format!("used-{}-{}", applies_to.name(), algorithm.name().replace('_', "-"));
            let spec = QuotaSpec { quota: ProviderName::new(quota).unwrap(), limits: vec![own], ..spec(&[]) };
            let past = PastUse { age: Duration::from_millis(50), cost };
            let reply = told_of_kinds(&limiter, &spec, vec![past], CostByKind::default(), want.clone()).await;
            assert_eq!(reply.permits(), u64::from(left), "{applies_to:?} {algorithm:?}: {reply:?}");
        }
    }
}

/// The rate may have been lowered since. Without the cap, uses that were allowed then would close the limit for hours.
async fn bucket_history_is_capped_at_capacity(limiter: Arc<dyn Limiter>) {
    // Six slots; one drains in 15 minutes.
    let spec = of(Algorithm::TokenBucket);
    let lately = (1..=60).map(|seconds| past(seconds * 1_000, 10)).collect();
    let reply = told(&limiter, &spec, lately, 0, 1).await;
    let (youngest_us, one_us) = (1_000_000, 900_000_000);
    assert_eq!((reply.permits(), refused(&reply).wait_us), (0, one_us - youngest_us), "{reply:?}");
}

async fn full_history_in_one_call_counts(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 1_500, 3_600_000)]);
    let ages = (0..u64::try_from(BATCH_MAX).unwrap()).map(|number| past(number * 700, 1)).collect();
    let reply = told(&limiter, &spec, ages, 0, 1_000).await;
    assert_eq!(reply.permits(), 500);
}

async fn oversized_history_rebuilds_nothing(limiter: Arc<dyn Limiter>) {
    let spec = spec(&[("all", 1_500, 3_600_000)]);
    let ages = (0..=u64::try_from(BATCH_MAX).unwrap()).map(|number| past(number * 700, 1)).collect();
    let reply = told(&limiter, &spec, ages, 0, 1_000).await;
    assert_eq!(
        (reply.permits(), refused(&reply).reason),
        (0, RefusalReason::Cold),
        "an oversized history must not be used in part"
    );
}

async fn warm_limiter_ignores_a_rebuild(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 8_000)])).await;
    let born = caller.call(&[1]).await.state_epoch;
    caller.number += 1;
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: caller.number,
        requests: vec![PermitRequest::charges(2, 1)],
        releases: Vec::new(),
        pause: None,
        rebuild: Some(RebuildData { state_epoch: born, ended: vec![past(10, 3)], in_flight: CostByKind::charges(3) }),
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: limiter.run_id(&caller.spec.quota).await.unwrap(),
    };
    assert_eq!(limiter.call(&caller.spec, &call).await.unwrap().permits(), 2, "a warm limiter keeps its own usage");
}

/// One use of a history: gap before it in microseconds, cost, and time to its answer if there is one.
type Planned = (u64, u32, Option<u64>);

/// Plays a history, loses the state, and rebuilds a second limiter from the true past. Up to each instant, the rebuilt
/// limiter starts no more permits than the one that lost nothing.
fn compare(limits: Vec<LimitSpec>, history: &[Planned], later_us: u64) -> Result<(u64, u64), TestCaseError> {
    let spec = QuotaSpec { limits, ..spec(&[]) };
    let (mut kept, mut now_us, mut number) = (Quota::default(), 1_800_000_000_000_000, 2);
    let call = |number, wants: Vec<PermitRequest>, settlements, rebuild| LimiterCall {
        incarnation: 1,
        number,
        requests: wants,
        releases: settlements,
        pause: None,
        rebuild,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: "run".to_owned(),
    };
    let born = kept.call(Micros(now_us), &spec, &call(1, Vec::new(), Vec::new(), None)).state_epoch;
    kept.call(Micros(now_us), &spec, &call(2, Vec::new(), Vec::new(), Some(forgotten_nothing(born))));
    let mut ended: Vec<(u64, u32)> = Vec::new();
    let mut open = CostByKind::default();
    for (gap_us, cost, answer_us) in history {
        now_us += gap_us;
        number += 1;
        let reply = kept.call(Micros(now_us), &spec, &call(number, wants(&[*cost]), Vec::new(), None));
        let Some(run) = reply.grants.first() else { continue };
        let start_us = now_us + run.wait_us;
        now_us = start_us + answer_us.unwrap_or(0);
        if answer_us.is_some() {
            kept.call(Micros(now_us), &spec, &call(number + 1, Vec::new(), vec![used(number, *cost, 0)], None));
            number += 1;
            ended.push((now_us, *cost));
        } else {
            open.charges += cost;
        }
    }
    let mut lost = Quota::default();
    now_us += later_us;
    let born = lost.call(Micros(now_us), &spec, &call(1, Vec::new(), Vec::new(), None)).state_epoch;
    now_us += micros_up(BOOKING_HORIZON + spec.send_budget);
    let ended: Vec<PastUse> = ended
        .into_iter()
        .map(|(ended_us, cost)| PastUse {
            age: Duration::from_micros(now_us - ended_us),
            cost: CostByKind::charges(cost),
        })
        .collect();
    let rebuild = Some(RebuildData { state_epoch: born, ended, in_flight: open });
    let ask = |quota: &mut Quota, at_us, number, rebuild| {
        let reply =
            quota.call(Micros(at_us), &spec, &call(number, vec![PermitRequest::charges(20, 1)], Vec::new(), rebuild));
        let starts =
            |run: &sluicegate::domain::permit_protocol::PermitGrant| (at_us + run.wait_us, u64::from(run.permits));
        reply.grants.iter().map(starts).collect::<Vec<_>>()
    };
    lost.call(Micros(now_us), &spec, &call(2, Vec::new(), Vec::new(), rebuild));
    let mut totals = (0, 0);
    // Each instant starts from the same two states, so that a grant at one instant does not change the next.
    for at_us in [0, 20_000, 100_000, 300_000, 700_000, 1_300_000, 5_000_000].map(|us| now_us + us) {
        let from_kept = ask(&mut kept.clone(), at_us, number + 2, None);
        let from_lost = ask(&mut lost.clone(), at_us, 3, None);
        let by = |starts: &[(u64, u64)], us| starts.iter().filter(|(at, _)| *at <= us).map(|(_, n)| n).sum::<u64>();
        for (start_us, _) in &from_lost {
            let (more, most) = (by(&from_lost, *start_us), by(&from_kept, *start_us));
            prop_assert!(more <= most, "{} starts by {}, and {} if nothing had been lost", more, start_us, most);
        }
        totals.0 += by(&from_lost, u64::MAX);
        totals.1 += by(&from_kept, u64::MAX);
    }
    Ok(totals)
}

#[test]
fn rebuilt_limiter_never_grants_more() {
    let planned = (0_u64..150_000, 1_u32..3, prop::option::weighted(0.85, 0_u64..90_000));
    let algorithms =
        prop::collection::vec((prop::sample::select(Algorithm::WITH_WINDOW.to_vec()), 1_u32..7, 1_u64..8), 1..3);
    let histories = (algorithms, prop::collection::vec(planned, 0..25), 0_u64..400_000);
    let (rebuilt, kept) = (Cell::new(0), Cell::new(0));
    let mut runner = TestRunner::new(Config { cases: 3_000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&histories, |(algorithms, history, later_us)| {
        let limit = |(number, (algorithm, max_requests, pace)): (usize, (Algorithm, u32, u64))| {
            let window = Duration::from_millis(pace * 60 * u64::from(max_requests));
            LimitSpec { name: format!("limit-{number}"), max_requests, window, offset: window / 3, ..limit(algorithm) }
        };
        let limits: Vec<LimitSpec> = algorithms.into_iter().enumerate().map(limit).collect();
        let (from_lost, from_kept) = compare(limits, &history, later_us)?;
        rebuilt.set(rebuilt.get() + from_lost);
        kept.set(kept.get() + from_kept);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    // A rebuilt limiter that grants nothing would also pass, so the number of its grants is checked.
    assert!(rebuilt.get() * 2 > kept.get() && kept.get() > 10_000, "{rebuilt:?} of {kept:?}");
}
