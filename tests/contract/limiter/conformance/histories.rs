//! Limits, accounts and references with a past that the limiter did not count. They grant nothing until a caller sends
//! their history from the ledger; then only that history counts.

use sluicegate::domain::limit::{Algorithm, Scope};
use sluicegate::domain::permit_protocol::{Shortage, SubjectHistory, UsageHistory};

use super::*;

on_every_limiter!(
    account_history_is_rebuilt_after_state_loss,
    incomplete_history_is_ignored,
    history_applies_to_later_requests,
    new_limit_counts_past_use_alone,
    added_limit_keeps_account_counters,
    changed_limits_use_the_ledger_history,
    a_new_shadow_limit_begins_empty,
    joining_provider_brings_its_usage,
);

/// The provider admits 20 in 9 s, and each account 4 in this window.
fn scoped(window_ms: u64) -> QuotaSpec {
    let mut spec = spec(&[("account", 4, window_ms), ("all", 20, 9_000)]);
    spec.limits[0].scope = Scope::Account;
    spec
}

fn of(spec: &QuotaSpec, permits: u32, account: &str) -> PermitRequest {
    PermitRequest { subjects: spec.subjects(Some(account), None).unwrap(), ..PermitRequest::charges(permits, 1) }
}

fn served(reply: &LimiterReply, wants: usize) -> Vec<u32> {
    let of = |want| reply.grants.iter().filter(|run| run.request_index == want).map(|run| run.permits).sum();
    (0..wants).map(of).collect()
}

/// The history of one counter, as of this reply: ended charges by age in milliseconds, and charges in flight.
fn history(spec: &QuotaSpec, read_at: &LimiterReply, ages_ms: &[u64], open: u32) -> UsageHistory {
    let past = |age_ms: &u64| PastUse { age: Duration::from_millis(*age_ms), cost: CostByKind::charges(1) };
    UsageHistory {
        as_of: Micros(read_at.now.0 - spec.start_delay_max_us()),
        within: Duration::from_secs(90_000),
        ended: ages_ms.iter().map(past).collect(),
        in_flight: CostByKind::charges(open),
    }
}

fn of_account(spec: &QuotaSpec, account: &str, history: UsageHistory) -> SubjectHistory {
    SubjectHistory { subject: spec.subjects(Some(account), None).unwrap().remove(0), history }
}

/// A caller after a rebuild that knows the provider's usage but not the accounts. The ledger can be queried now.
async fn rebuilt(limiter: &Arc<dyn Limiter>, spec: &QuotaSpec) -> (Caller, LimiterReply) {
    let mut caller = Caller::new(limiter, spec.clone());
    let cold = caller.call(&[]).await;
    let past = PastUse { age: Duration::from_millis(500), cost: CostByKind::charges(1) };
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: 2,
        requests: Vec::new(),
        releases: Vec::new(),
        pause: None,
        rebuild: Some(RebuildData {
            state_epoch: cold.state_epoch,
            ended: vec![past],
            in_flight: CostByKind::default(),
        }),
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: limiter.run_id(&spec.quota).await.unwrap(),
    };
    limiter.call(spec, &call).await.unwrap();
    caller.number = 2;
    until_us(&caller, cold.state_epoch.0 + spec.start_delay_max_us()).await;
    let reply = caller.ask(&[of(spec, 1, "a")]).await;
    assert!(reply.now.0 >= cold.state_epoch.0 + spec.start_delay_max_us());
    (caller, reply)
}

async fn account_history_is_rebuilt_after_state_loss(limiter: Arc<dyn Limiter>) {
    let spec = scoped(86_400_000);
    let (mut caller, unknown) = rebuilt(&limiter, &spec).await;
    let why: Vec<Shortage> = unknown.skipped.iter().map(|passed| passed.shortage).collect();
    assert_eq!((unknown.permits(), why), (0, vec![Shortage::NeedsHistory { readable_in_us: 0 }]), "{unknown:?}");
    let used = history(&spec, &unknown, &[3_000, 60_000], 1);
    let subjects = vec![of_account(&spec, "a", used), of_account(&spec, "b", history(&spec, &unknown, &[], 0))];
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: None, subjects });
    let reply = caller.ask(&[of(&spec, 9, "a"), of(&spec, 9, "b"), of(&spec, 9, "c")]).await;
    assert_eq!(served(&reply, 3), [1, 4, 0], "two uses ended, one is in flight, and c has no history: {reply:?}");
    let subject = spec.subjects(Some("a"), None).unwrap().remove(0);
    let uses = limiter.peek(&spec, Some(&subject)).await.unwrap();
    assert_eq!(uses.iter().find(|line| line.name == "account").unwrap().used, 4, "{uses:?}");
    // A use is free one window after its end.
    let passed = reply.skipped[0];
    let free_us = free_again_us(&reply, 60_000_000, padded_us(&spec, 0));
    assert_eq!((reply.now.0 + passed.wait_us, passed.exact, passed.shortage), (free_us, true, Shortage::NoSlot));
}

async fn incomplete_history_is_ignored(limiter: Arc<dyn Limiter>) {
    let spec = scoped(60_000);
    let (mut caller, unknown) = rebuilt(&limiter, &spec).await;
    let whole = history(&spec, &unknown, &[], 0);
    // Of another epoch, read while earlier permits could still start, or over a shorter time than the window.
    let early = UsageHistory { as_of: Micros(unknown.state_epoch.0 - 1), ..whole.clone() };
    let short = UsageHistory { within: Duration::from_secs(60), ..whole.clone() };
    let others =
        [(unknown.state_epoch.0 - 1, whole.clone()), (unknown.state_epoch.0, early), (unknown.state_epoch.0, short)];
    for (born, history) in others {
        caller.seeds = Some(CounterSeeds {
            state_epoch: Micros(born),
            provider: None,
            subjects: vec![of_account(&spec, "a", history)],
        });
        let reply = caller.ask(&[of(&spec, 1, "a")]).await;
        assert_eq!(reply.permits(), 0, "{reply:?}");
    }
    caller.seeds = Some(CounterSeeds {
        state_epoch: unknown.state_epoch,
        provider: None,
        subjects: vec![of_account(&spec, "a", whole)],
    });
    assert_eq!(caller.ask(&[of(&spec, 9, "a")]).await.permits(), 4);
}

async fn history_applies_to_later_requests(limiter: Arc<dyn Limiter>) {
    let spec = scoped(60_000);
    let (mut caller, unknown) = rebuilt(&limiter, &spec).await;
    let subjects = vec![of_account(&spec, "a", history(&spec, &unknown, &[1_000], 0))];
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: None, subjects });
    assert_eq!(caller.ask(&[]).await.permits(), 0);
    assert_eq!(caller.ask(&[of(&spec, 9, "a")]).await.permits(), 3);
    // A second history of the same account is ignored.
    let subjects = vec![of_account(&spec, "a", history(&spec, &unknown, &[], 0))];
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: None, subjects });
    assert_eq!(caller.ask(&[of(&spec, 9, "a")]).await.permits(), 0);
}

/// Waits until the ledger can know every earlier grant, and returns the reply of a call after that.
async fn readable(caller: &Caller) -> LimiterReply {
    let mut caller = caller.clone();
    let reply = caller.ask(&[PermitRequest::charges(1, 1)]).await;
    let RefusalReason::NeedsHistory { readable_in_us, .. } = refused(&reply).reason else { panic!("{reply:?}") };
    until_us(&caller, reply.now.0 + readable_in_us).await;
    let reply = caller.ask(&[PermitRequest::charges(1, 1)]).await;
    assert!(matches!(refused(&reply).reason, RefusalReason::NeedsHistory { readable_in_us: 0, .. }), "{reply:?}");
    reply
}

async fn new_limit_counts_past_use_alone(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("minute", 8, 60_000)])).await;
    assert_eq!(caller.call(&[1; 3]).await.permits(), 3);
    caller.settle(vec![used(caller.number, 2, 0)], &[]).await;
    caller.spec = QuotaSpec { version: 2, ..spec(&[("day", 10, 86_400_000), ("minute", 8, 60_000)]) };
    let unknown = readable(&caller).await;
    caller.number += 2;
    // Six that the old limit no longer counts, the two, and the third, which is in flight.
    let past = history(&caller.spec, &unknown, &[7_200_000, 7_200_000, 7_200_000, 7_200_000, 900, 900], 0);
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: Some(past), subjects: Vec::new() });
    let reply = caller.call(&[1; 9]).await;
    assert_eq!(reply.permits(), 3, "ten per day less six, and one in flight: {reply:?}");
    let uses: Vec<u64> = limiter.peek(&caller.spec, None).await.unwrap().iter().map(|line| line.used).collect();
    assert_eq!(uses, [10, 6], "the usage of the other limit is unchanged");
}

async fn added_limit_keeps_account_counters(limiter: Arc<dyn Limiter>) {
    let plain = scoped(60_000);
    let mut caller = Caller::warm(&limiter, plain.clone()).await;
    assert_eq!(caller.ask(&[of(&plain, 3, "a")]).await.permits(), 3);
    let mut more =
        QuotaSpec { version: 2, ..spec(&[("account", 4, 60_000), ("all", 20, 9_000), ("daily", 9, 86_400_000)]) };
    more.limits[0].scope = Scope::Account;
    more.limits[2].scope = Scope::Account;
    caller.spec = more.clone();
    let reply = caller.ask(&[of(&more, 9, "a"), of(&more, 9, "b")]).await;
    assert_eq!(served(&reply, 2), [0, 0], "no account has a history of a day: {reply:?}");
    let readable_in_us = reply.skipped.iter().map(|skipped| match skipped.shortage {
        Shortage::NeedsHistory { readable_in_us } => readable_in_us,
        Shortage::NoSlot => panic!("{reply:?}"),
    });
    until_us(&caller, reply.now.0 + readable_in_us.max().unwrap() + 2_000).await;
    let unknown = caller.ask(&[]).await;
    let unused = of_account(&more, "b", history(&more, &unknown, &[], 0));
    let subjects = vec![of_account(&more, "a", history(&more, &unknown, &[3_600_000, 7_200_000], 0)), unused];
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: None, subjects });
    let reply = caller.ask(&[of(&more, 9, "a"), of(&more, 9, "b")]).await;
    assert_eq!(
        served(&reply, 2),
        [1, 4],
        "three permits of a are in flight, and four are allowed per minute: {reply:?}"
    );
    let subject = more.subjects(Some("a"), None).unwrap().remove(0);
    let used: Vec<u64> = limiter.peek(&more, Some(&subject)).await.unwrap().iter().map(|line| line.used).collect();
    assert_eq!(used[used.len() - 2..], [4, 6], "the new limit counts two earlier uses too");
}

async fn changed_limits_use_the_ledger_history(limiter: Arc<dyn Limiter>) {
    let hour = |algorithm, window_s| LimitSpec {
        algorithm,
        burst: (algorithm == Algorithm::TokenBucket).then_some(6),
        ..LimitSpec::sliding_log("hour", 6, Duration::from_secs(window_s))
    };
    let log = hour(Algorithm::SlidingLog, 3_600);
    let shadow = LimitSpec { shadow: true, ..log.clone() };
    let wide = LimitSpec::sliding_log("wide", 1_000, Duration::from_secs(1));
    let changes = [
        ("algorithm", hour(Algorithm::SlidingWindow, 3_600), log.clone()),
        ("started", log.clone(), hour(Algorithm::SlidingWindow, 3_600)),
        ("bucket", log.clone(), hour(Algorithm::TokenBucket, 36_000)),
        ("longer", hour(Algorithm::SlidingLog, 60), log.clone()),
        ("shadow", shadow, log),
    ];
    for (quota, from, to) in changes {
        let quota = ProviderName::new(quota).unwrap();
        let with = |limit: LimitSpec| vec![limit, wide.clone()];
        let mut caller = Caller::warm(&limiter, QuotaSpec { quota, limits: with(from), ..spec(&[]) }).await;
        assert_eq!(caller.call(&[1, 1]).await.permits(), 2);
        caller.settle(vec![used(caller.number, 2, 0)], &[]).await;
        caller.spec = QuotaSpec { version: 2, limits: with(to.clone()), ..caller.spec.clone() };
        let unknown = readable(&caller).await;
        caller.number += 2;
        let past = history(&caller.spec, &unknown, &[900, 900, 61_000], 1);
        caller.seeds =
            Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: Some(past), subjects: Vec::new() });
        let reply = caller.call(&[1; 9]).await;
        assert_eq!(reply.permits(), 2, "of six, three ended and one is in flight: {to:?} {reply:?}");
    }
}

async fn a_new_shadow_limit_begins_empty(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 9, 8_000)])).await;
    caller.call(&[1]).await;
    caller.spec = QuotaSpec { version: 2, ..spec(&[("all", 9, 8_000), ("watched", 2, 8_000)]) };
    caller.spec.limits[1].shadow = true;
    assert_eq!(caller.call(&[1; 3]).await.permits(), 3);
    let uses = limiter.peek(&caller.spec, None).await.unwrap();
    assert_eq!((uses[1].used, uses[1].would_have_refused), (2, 1), "{uses:?}");
}

async fn joining_provider_brings_its_usage(limiter: Arc<dyn Limiter>) {
    let rows = |names: &[&str]| names.iter().map(|name| ProviderName::new(*name).unwrap()).collect::<Vec<_>>();
    let alone = QuotaSpec { members: rows(&["one"]), handover: Duration::from_millis(30), ..scoped(60_000) };
    let mut caller = Caller::warm(&limiter, alone.clone()).await;
    assert_eq!(caller.ask(&[of(&alone, 2, "a")]).await.permits(), 2);
    let call = caller.number;
    caller.settlements = vec![PermitRelease { subjects: of(&alone, 1, "a").subjects, ..used(call, 2, 0) }];
    caller.ask(&[]).await;
    caller.settlements.clear();
    let both = QuotaSpec { version: 2, members: rows(&["one", "two"]), ..alone };
    caller.spec = both.clone();
    let reply = caller.ask(&[of(&both, 1, "a")]).await;
    let RefusalReason::NeedsHistory { readable_in_us, .. } = refused(&reply).reason else { panic!("{reply:?}") };
    // Until every process has read the new settings, some count the provider elsewhere. Then the permits granted there
    // must start.
    assert_eq!(readable_in_us, both.start_delay_max_us() + 30_000);
    until_us(&caller, reply.now.0 + readable_in_us).await;
    let unknown = caller.ask(&[of(&both, 1, "a")]).await;
    // Two uses of this row, and three of the other row, of which one is this account's.
    let past = history(&both, &unknown, &[700, 700, 900, 900, 900], 0);
    let subjects = vec![of_account(&both, "a", history(&both, &unknown, &[700, 700, 900], 0))];
    caller.seeds = Some(CounterSeeds { state_epoch: unknown.state_epoch, provider: Some(past), subjects });
    let reply = caller.ask(&[of(&both, 9, "a")]).await;
    assert_eq!(reply.permits(), 1, "four allowed, three used: {reply:?}");
    let uses = limiter.peek(&both, None).await.unwrap();
    assert_eq!(uses.iter().find(|line| line.name == "all").unwrap().used, 6, "{uses:?}");
    // A provider that leaves the quota removes no usage, and no permit waits for it.
    caller.spec = QuotaSpec { version: 3, members: rows(&["two"]), ..both };
    assert_eq!(caller.call(&[1]).await.permits(), 1);
}
