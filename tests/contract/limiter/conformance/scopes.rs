//! Limits of one account, one reference or one kind of call. They are counted and refused separately, and a refusal
//! uses no slot that others could use.

use sluicegate::domain::limit::{AccountRule, AppliesTo, Rate, Rule, Scope};
use sluicegate::domain::permit_protocol::{Shortage, SkippedRequest};
use sluicegate::domain::quota::SUBJECT_RETENTION_US;

use super::*;

on_every_limiter!(
    accounts_are_counted_separately,
    refused_account_is_skipped_and_acquires_nothing,
    account_and_reference_are_acquired_all_or_nothing,
    account_slot_frees_one_window_later,
    unused_account_slot_is_returned_unchanged,
    an_account_is_not_booked_ahead,
    unanswered_account_slot_counts_from_its_deadline,
    release_for_another_account_frees_nothing,
    lookups_and_charges_are_refused_separately,
    each_kind_is_served_in_order,
    lost_state_blocks_unknown_accounts,
    unused_state_blocks_no_account,
    ended_exemption_waits_for_uncounted_use,
    idle_account_waits_after_window_growth,
    accounts_are_kept_by_their_own_windows,
    readded_account_limit_waits_for_history,
    account_limit_added_while_cold_needs_history,
);

/// The provider admits 20 in 9 s; in this window each account 2 and each reference 1.
fn scoped(window_ms: u64) -> QuotaSpec {
    let mut spec = spec(&[("account", 2, window_ms), ("all", 20, 9_000), ("reference", 1, window_ms)]);
    spec.limits[0].scope = Scope::Account;
    spec.limits[2].scope = Scope::Reference;
    spec
}

pub(super) fn of(spec: &QuotaSpec, permits: u32, account: &str, reference: Option<&str>) -> PermitRequest {
    let subjects = spec.subjects(Some(account), reference).unwrap();
    PermitRequest { subjects, ..PermitRequest::charges(permits, 1) }
}

fn for_account(spec: &QuotaSpec, account: &str, release: PermitRelease) -> PermitRelease {
    PermitRelease { subjects: spec.subjects(Some(account), None).unwrap(), ..release }
}

/// Permits granted to each request.
pub(super) fn served(reply: &LimiterReply, wants: usize) -> Vec<u32> {
    let of = |want| reply.grants.iter().filter(|run| run.request_index == want).map(|run| run.permits).sum();
    (0..wants).map(of).collect()
}

async fn used_by(limiter: &Arc<dyn Limiter>, spec: &QuotaSpec, account: Option<&str>, limit: &str) -> u64 {
    let subject = account.map(|account| spec.subjects(Some(account), None).unwrap().remove(0));
    let uses = limiter.peek(spec, subject.as_ref()).await.unwrap();
    uses.iter().find(|line| line.name == limit).unwrap_or_else(|| panic!("no {limit} in {uses:?}")).used
}

async fn accounts_are_counted_separately(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let mut other = Caller::new(&limiter, spec.clone());
    let wants = [of(&spec, 3, "a", None), of(&spec, 1, "b", None), of(&spec, 1, "c", None)];
    let reply = caller.ask(&wants).await;
    assert_eq!((served(&reply, 3), reply.refused), (vec![2, 1, 1], None), "{reply:?}");
    let passed = SkippedRequest {
        request_index: 0,
        limit: 0,
        wait_us: padded_us(&spec, 0),
        exact: false,
        shortage: Shortage::NoSlot,
    };
    assert_eq!(reply.skipped, [passed], "both slots of the account are in flight");
    let reply = other.ask(&[of(&spec, 1, "a", None), of(&spec, 2, "b", None), PermitRequest::charges(1, 1)]).await;
    assert_eq!(served(&reply, 3), [0, 1, 1], "processes share the counters: {reply:?}");
    for (account, used) in [("a", 2), ("b", 2), ("c", 1), ("d", 0)] {
        assert_eq!(used_by(&limiter, &spec, Some(account), "account").await, used, "{account}");
    }
    assert_eq!(used_by(&limiter, &spec, None, "all").await, 6, "the provider's limit counts all of them");
}

async fn refused_account_is_skipped_and_acquires_nothing(limiter: Arc<dyn Limiter>) {
    let mut spec = scoped(8_000);
    spec.limits[1].max_requests = 4;
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.ask(&[of(&spec, 9, "a", None), of(&spec, 2, "b", None)]).await;
    assert_eq!(served(&reply, 2), [2, 2], "its seven refused permits use no slot: {reply:?}");
    assert_eq!(reply.skipped.len(), 1);
    let reply = caller.ask(&[of(&spec, 1, "a", None), of(&spec, 1, "c", None)]).await;
    assert_eq!((reply.permits(), refused(&reply).reason), (0, RefusalReason::Limit { index: 1 }));
    assert_eq!(
        used_by(&limiter, &spec, Some("c"), "account").await,
        0,
        "a refusal by the provider's limit uses no slot of the account"
    );
}

async fn account_and_reference_are_acquired_all_or_nothing(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.ask(&[of(&spec, 2, "a", Some("r")), of(&spec, 1, "b", Some("r"))]).await;
    assert_eq!(served(&reply, 2), [1, 0]);
    let limits: Vec<usize> = reply.skipped.iter().map(|passed| passed.limit).collect();
    assert_eq!(limits, [2, 2], "the reference's limit refuses both accounts");
    assert_eq!(
        used_by(&limiter, &spec, Some("a"), "account").await,
        1,
        "a refusal by the reference's limit uses no slot of the account"
    );
    assert_eq!(used_by(&limiter, &spec, Some("b"), "account").await, 0);
    assert_eq!(used_by(&limiter, &spec, None, "all").await, 1);
    // The account's limit refuses the second request, which the reference's limit would admit. So the reference's slot
    // stays free.
    let wants = [of(&spec, 1, "a", Some("s")), of(&spec, 1, "a", Some("t")), of(&spec, 1, "c", Some("t"))];
    let reply = caller.ask(&wants).await;
    assert_eq!(served(&reply, 3), [1, 0, 1], "{reply:?}");
}

async fn account_slot_frees_one_window_later(limiter: Arc<dyn Limiter>) {
    let spec = scoped(700);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let wants = [of(&spec, 2, "a", None)];
    assert_eq!(caller.ask(&wants).await.permits(), 2);
    let call = caller.number;
    caller.settlements = [9_000, 0].map(|age_us| for_account(&spec, "a", used(call, 1, age_us))).to_vec();
    let reply = caller.ask(&wants).await;
    caller.settlements.clear();
    let free_us = |age_us| free_again_us(&reply, age_us, padded_us(&spec, 0));
    let passed = reply.skipped[0];
    assert_eq!((reply.now.0 + passed.wait_us, passed.exact), (free_us(9_000), true));
    until_us(&caller, free_us(9_000)).await;
    let reply = caller.ask(&wants).await;
    let both = reply.now.0 >= free_us(0);
    assert_eq!(reply.permits(), if both { 2 } else { 1 }, "{reply:?}");
}

async fn unused_account_slot_is_returned_unchanged(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let wants = [of(&spec, 3, "a", None)];
    assert_eq!(caller.ask(&wants).await.permits(), 2);
    caller.settlements = vec![for_account(&spec, "a", not_sent(caller.number, 1, &[0]))];
    assert_eq!(caller.ask(&wants).await.permits(), 1, "one slot was released unused");
}

/// A booked start of the provider's limit must not use an account's slot before it is free. If such a permit were
/// released unused and requested again under a raised limit, it would start too early.
async fn an_account_is_not_booked_ahead(limiter: Arc<dyn Limiter>) {
    let mut spec = spec(&[("account", 1, 300), ("all", 1, 500)]);
    spec.limits[0].scope = Scope::Account;
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(caller.ask(&[of(&spec, 1, "a", None)]).await.permits(), 1);
    caller.settlements = vec![for_account(&spec, "a", used(caller.number, 1, 0))];
    let released = caller.ask(&[]).await;
    caller.settlements.clear();
    let free_us = free_again_us(&released, 0, padded_us(&spec, 0));
    let provider_us = free_again_us(&released, 0, padded_us(&spec, 1));
    until_us(&caller, provider_us - micros_up(BOOKING_HORIZON) + 2_000).await;
    let reply = caller.ask(&[of(&spec, 1, "a", None), of(&spec, 1, "b", None)]).await;
    if reply.now.0 < free_us {
        assert_eq!(served(&reply, 2), [0, 1], "booked for the other account alone: {reply:?}");
        let passed = reply.skipped[0];
        assert_eq!((reply.now.0 + passed.wait_us, passed.exact), (free_us, true));
    }
    let origins = reply.grants[0].origins.clone();
    let subjects = [served(&reply, 2)[0], 0].map(|granted| if granted > 0 { "a" } else { "b" });
    caller.settlements = vec![for_account(&spec, subjects[0], not_sent(caller.number, 1, &origins))];
    caller.spec.version = 2;
    caller.spec.limits[1].max_requests = 5;
    let reply = caller.ask(&[of(&spec, 1, "a", None)]).await;
    let early = reply.grants.iter().any(|run| reply.now.0 + run.wait_us < free_us);
    assert!(!early, "starts before {free_us}: {reply:?}");
}

async fn unanswered_account_slot_counts_from_its_deadline(limiter: Arc<dyn Limiter>) {
    let mut spec = spec(&[("account", 1, 600), ("all", 20, 600)]);
    spec.limits[0].scope = Scope::Account;
    spec.hold_max = Duration::from_millis(200);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let wants = [of(&spec, 1, "a", None)];
    let granted = caller.ask(&wants).await;
    let over_us = over_us(&spec, 0, granted.now.0);
    until_us(&caller, granted.now.0 + 300_000).await;
    let reply = caller.ask(&wants).await;
    if reply.now.0 < over_us {
        let passed = reply.skipped[0];
        assert_eq!((reply.permits(), reply.now.0 + passed.wait_us, passed.exact), (0, over_us, true));
    }
    until_us(&caller, over_us).await;
    assert_eq!(caller.ask(&wants).await.permits(), 1);
}

/// Redis drops a key when its uses no longer count. Settings under which they count longer keep the key longer.
#[tokio::test]
async fn account_key_lives_while_its_uses_count() {
    let server = Redis::shared();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&server.url(), "kept").unwrap());
    let mut spec = spec(&[("account", 5, 600), ("all", 20, 600)]);
    spec.limits[0].scope = Scope::Account;
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(caller.ask(&[of(&spec, 1, "a", None)]).await.permits(), 1);
    (caller.spec.version, caller.spec.hold_max) = (2, 600 * SECOND);
    let wants = [of(&caller.spec, 1, "a", None)];
    assert_eq!(caller.ask(&wants).await.permits(), 1);
    let lives = lives_ms(server, "kept:*");
    assert!(lives.len() >= 2 && lives.iter().all(|(_, left_ms)| *left_ms > 600_000), "{lives:?}");
}

/// The remaining life in milliseconds of each key that matches this pattern.
fn lives_ms(server: &Redis, pattern: &str) -> Vec<(String, i64)> {
    let mut connection = server.connection();
    let keys: Vec<String> = ::redis::cmd("KEYS").arg(pattern).query(&mut connection).unwrap();
    let mut life = |key: &String| ::redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
    keys.iter().map(|key| (key.clone(), life(key))).collect()
}

/// References come and go. A monthly limit of the provider does not prolong the life of their keys.
#[tokio::test]
async fn reference_keys_expire_by_their_own_windows() {
    let server = Redis::shared();
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&server.url(), "own-windows").unwrap());
    let month_ms = 30 * 86_400_000;
    let limits = [("account", 5, 86_400_000), ("all", 20, month_ms), ("reference", 5, 60_000)];
    let mut spec = QuotaSpec { hold_max: SECOND, ..spec(&limits) };
    (spec.limits[0].scope, spec.limits[2].scope) = (Scope::Account, Scope::Reference);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(caller.ask(&[of(&spec, 1, "a", Some("r"))]).await.permits(), 1);
    let day_ms = 86_400_000;
    // The longest time that a use counts, and a quarter or an hour more.
    let expected = [
        ("own-windows:*:account:*", day_ms..day_ms + 2 * 3_600_000),
        ("own-windows:*:reference:*", 60_000..80_000),
        ("own-windows:{acme}", month_ms..month_ms + 2 * day_ms),
    ];
    for (pattern, most) in expected {
        let lives = lives_ms(server, pattern);
        assert!(lives.len() == 1 && most.contains(&u64::try_from(lives[0].1).unwrap()), "{pattern}: {lives:?}");
    }
}

async fn release_for_another_account_frees_nothing(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(caller.ask(&[of(&spec, 2, "a", None)]).await.permits(), 2);
    let call = caller.number;
    caller.settlements = vec![for_account(&spec, "b", not_sent(call, 2, &[0]))];
    let reply = caller.ask(&[of(&spec, 1, "a", None), of(&spec, 3, "b", None)]).await;
    assert_eq!(served(&reply, 2), [0, 2], "{reply:?}");
}

async fn lookups_and_charges_are_refused_separately(limiter: Arc<dyn Limiter>) {
    let mut spec = spec(&[("all", 10, 8_000), ("charges", 2, 8_000), ("lookups", 1, 8_000)]);
    spec.limits[1].applies_to = AppliesTo::Charge;
    spec.limits[2].applies_to = AppliesTo::Lookup;
    let lookups = |permits| PermitRequest { kind: CallKind::Lookup, ..PermitRequest::charges(permits, 1) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.ask(&[lookups(2), PermitRequest::charges(3, 1), lookups(1)]).await;
    assert_eq!((served(&reply, 3), reply.refused), (vec![1, 2, 0], None), "{reply:?}");
    let passed: Vec<(usize, usize)> = reply.skipped.iter().map(|passed| (passed.request_index, passed.limit)).collect();
    assert_eq!(passed, [(0, 2), (1, 1), (2, 2)]);
    let uses: Vec<u64> = limiter.peek(&spec, None).await.unwrap().iter().map(|line| line.used).collect();
    assert_eq!(uses, [3, 2, 1]);
    let call = caller.number;
    let back = PermitRelease { kind: CallKind::Lookup, ..not_sent(call, 1, &[0, 0, 0]) };
    caller.settlements = vec![back];
    let reply = caller.ask(&[PermitRequest::charges(1, 1), lookups(1)]).await;
    assert_eq!(served(&reply, 2), [0, 1], "a slot of a look-up is free for look-ups alone: {reply:?}");
}

async fn each_kind_is_served_in_order(limiter: Arc<dyn Limiter>) {
    let mut spec = spec(&[("all", 10, 8_000), ("charges", 3, 8_000)]);
    spec.limits[1].applies_to = AppliesTo::Charge;
    let lookups = PermitRequest { kind: CallKind::Lookup, ..PermitRequest::charges(1, 1) };
    let mut caller = Caller::warm(&limiter, spec).await;
    assert_eq!(caller.ask(&[PermitRequest::charges(1, 1)]).await.permits(), 1);
    let reply = caller.ask(&[PermitRequest::charges(1, 3), PermitRequest::charges(1, 1), lookups]).await;
    assert_eq!(served(&reply, 3), [0, 0, 1], "a cheap charge does not overtake the costly one: {reply:?}");
}

async fn lost_state_blocks_unknown_accounts(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::new(&limiter, spec.clone());
    let cold = caller.call(&[]).await;
    // The ledger knows a request, but not its account.
    let past = PastUse { age: Duration::from_millis(500), cost: CostByKind::charges(1) };
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: 2,
        requests: vec![of(&spec, 1, "a", None), PermitRequest::charges(1, 1)],
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
    let reply = limiter.call(&spec, &call).await.unwrap();
    assert_eq!(served(&reply, 2), [0, 1], "{reply:?}");
    let passed = reply.skipped[0];
    let Some(own) = call.requests[0].subjects.first() else { panic!("{call:?}") };
    // Lost uses can begin to count until the cold start ends less the longest window. From then on the account's own
    // window counts.
    let held_us = spec.cold_start_us() - spec.longest_window_us() + spec.subject_counters(own)[0].window_us;
    assert_eq!((reply.now.0 + passed.wait_us, passed.exact), (cold.state_epoch.0 + held_us, true));
}

async fn unused_state_blocks_no_account(limiter: Arc<dyn Limiter>) {
    let spec = scoped(8_000);
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    assert_eq!(caller.ask(&[of(&spec, 1, "a", Some("r"))]).await.permits(), 1);
}

async fn ended_exemption_waits_for_uncounted_use(limiter: Arc<dyn Limiter>) {
    let plain = scoped(8_000);
    let rule = AccountRule { account: "a".to_owned(), limit: None, rule: Rule::Exempt };
    let exempting = QuotaSpec { account_rules: vec![rule], ..plain.clone() };
    let mut caller = Caller::warm(&limiter, exempting.clone()).await;
    let reply = caller.ask(&[of(&exempting, 9, "a", None), of(&exempting, 9, "b", None)]).await;
    assert_eq!(served(&reply, 2), [9, 2], "{reply:?}");
    let counted_us = reply.now.0;
    let uses = limiter.peek(&exempting, exempting.subjects(Some("a"), None).unwrap().first()).await.unwrap();
    let own: Vec<_> = uses.iter().filter(|line| line.name == "account").map(|line| (line.used, line.shadow)).collect();
    assert_eq!(own, [(2, true)], "the shadow counts up to the limit: {uses:?}");
    caller.spec = QuotaSpec { version: 2, ..plain.clone() };
    let reply = caller.ask(&[of(&plain, 1, "a", None), of(&plain, 1, "b", None), of(&plain, 1, "c", None)]).await;
    assert_eq!(served(&reply, 3), [0, 0, 1], "{reply:?}");
    // No use of the account is later than its last count.
    let passed = reply.skipped[0];
    let held_until_us = counted_us + unknown_past_us(&plain, 0);
    assert_eq!((reply.now.0 + passed.wait_us, passed.exact), (held_until_us, true), "{reply:?}");
    assert!(matches!(passed.shortage, Shortage::NeedsHistory { .. }), "{reply:?}");
    // Exempt again: permits at once, and the wait for its history is kept meanwhile.
    caller.spec = QuotaSpec { version: 3, ..exempting.clone() };
    assert_eq!(caller.ask(&[of(&exempting, 3, "a", None)]).await.permits(), 3);
}

async fn idle_account_waits_after_window_growth(limiter: Arc<dyn Limiter>) {
    idle_account_waits_when_its_window_grows(limiter, 100).await;
}

/// A longer limit of the provider does not prolong the retention of accounts.
async fn accounts_are_kept_by_their_own_windows(limiter: Arc<dyn Limiter>) {
    idle_account_waits_when_its_window_grows(limiter, 86_400_000).await;
}

/// An account that is idle for longer than the longest account window is dropped. A rule with a longer window must not
/// count it as unused.
async fn idle_account_waits_when_its_window_grows(limiter: Arc<dyn Limiter>, provider_window_ms: u64) {
    let mut plain = spec(&[("account", 2, 100), ("all", 20, provider_window_ms)]);
    plain.limits[0].scope = Scope::Account;
    plain.hold_max = Duration::from_millis(50);
    let mut caller = Caller::warm(&limiter, plain.clone()).await;
    assert_eq!(caller.ask(&[of(&plain, 2, "a", None)]).await.permits(), 2);
    let call = caller.number;
    caller.settlements = vec![for_account(&plain, "a", used(call, 2, 0))];
    let released = caller.ask(&[]).await;
    caller.settlements.clear();
    let before_us = micros_up(BOOKING_HORIZON) + micros_up(plain.hold_max);
    let dropped_us = released.now.0 + before_us + padded_us(&plain, 0) + SUBJECT_RETENTION_US;
    until_us(&caller, dropped_us).await;
    let rule = |account: &str| AccountRule {
        account: account.to_owned(),
        limit: None,
        rule: Rule::Limit("2/1h".parse::<Rate>().unwrap().into()),
    };
    let ruled = QuotaSpec { account_rules: vec![rule("a")], version: 2, ..plain.clone() };
    caller.spec = ruled.clone();
    let reply = caller.ask(&[of(&ruled, 1, "a", None), of(&ruled, 1, "b", None)]).await;
    assert_eq!(served(&reply, 2), [0, 1], "{reply:?}");
    let until = reply.now.0 + reply.skipped[0].wait_us;
    let window_us = ruled.subject_counters(&ruled.subjects(Some("a"), None).unwrap()[0])[0].window_us;
    assert_eq!(until, reply.now.0 + before_us + window_us);
    // It waits for the window of the rule and no longer. A rule of another account does not start that wait again.
    let more = QuotaSpec { account_rules: vec![rule("a"), rule("c")], version: 3, ..plain };
    caller.spec = more.clone();
    let reply = caller.ask(&[of(&more, 1, "a", None), of(&more, 1, "c", None)]).await;
    assert_eq!(served(&reply, 2), [0, 0], "{reply:?}");
    let untils: Vec<u64> = reply.skipped.iter().map(|passed| reply.now.0 + passed.wait_us).collect();
    assert_eq!(untils, [until; 2]);
}

/// Uses of an account while no limit counted it are missing in kept counters and in new ones.
async fn readded_account_limit_waits_for_history(limiter: Arc<dyn Limiter>) {
    let counted = scoped(60_000);
    let mut caller = Caller::warm(&limiter, counted.clone()).await;
    assert_eq!(caller.ask(&[of(&counted, 1, "a", None)]).await.permits(), 1);
    let without = QuotaSpec { version: 2, limits: vec![counted.limits[1].clone()], ..counted.clone() };
    caller.spec = without.clone();
    let reply = caller.ask(&[of(&without, 5, "a", None), of(&without, 5, "b", None)]).await;
    assert_eq!(served(&reply, 2), [5, 5]);
    let back = QuotaSpec { version: 3, ..counted };
    caller.spec = back.clone();
    let changed = caller.ask(&[]).await;
    let held_until_us = changed.now.0 + unknown_past_us(&back, 0);
    for account in ["a", "b"] {
        let subject = back.subjects(Some(account), None).unwrap().remove(0);
        let seen = limiter.peek(&back, Some(&subject)).await.unwrap();
        let own = seen.iter().find(|line| line.name == "account").unwrap();
        assert!(own.retry_after.unwrap() > Duration::from_secs(50), "{account}: {own:?}");
    }
    let reply = caller.ask(&[of(&back, 1, "a", None), of(&back, 1, "b", None)]).await;
    let held: Vec<_> =
        reply.skipped.iter().map(|passed| (passed.request_index, reply.now.0 + passed.wait_us)).collect();
    assert_eq!(held, [(0, held_until_us), (1, held_until_us)], "{reply:?}");
    assert!(reply.skipped.iter().all(|passed| matches!(passed.shortage, Shortage::NeedsHistory { .. })), "{reply:?}");
}

/// The ledger was read for the limits that existed when the state was lost.
async fn account_limit_added_while_cold_needs_history(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::new(&limiter, spec(&[("all", 20, 9_000)]));
    let cold = caller.call(&[]).await;
    let more = QuotaSpec { version: 2, ..scoped(60_000) };
    caller.spec = more.clone();
    caller.call(&[]).await;
    caller.warm = Some(cold.state_epoch);
    assert_eq!(caller.call(&[]).await.refused, None);
    let reply = caller.ask(&[of(&more, 1, "a", None), PermitRequest::charges(1, 1)]).await;
    assert_eq!((served(&reply, 2), reply.refused), (vec![0, 1], None), "{reply:?}");
    assert!(matches!(reply.skipped[0].shortage, Shortage::NeedsHistory { .. }), "{reply:?}");
}
