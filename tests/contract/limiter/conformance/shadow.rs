//! Shadow limits, on every limiter: they count the refusals and waits that they would have caused, and enforce nothing.

use sluicegate::domain::limit::{Algorithm, Scope};

use super::*;

on_every_limiter!(
    shadow_limit_counts_would_be_refusals,
    shadow_limit_counts_would_be_waits,
    a_closed_shadow_limit_refuses_nothing,
    account_shadow_limit_counts_per_account,
    enforced_shadow_limit_starts_without_history,
);

fn shaded(limits: &[(&str, u32, u64)], index: usize) -> QuotaSpec {
    let mut spec = spec(limits);
    spec.limits[index].shadow = true;
    spec
}

async fn shadow_of(caller: &Caller, subject: Option<&Subject>, name: &str) -> (u64, u64, u64) {
    let uses = caller.limiter.peek(&caller.spec, subject).await.unwrap();
    let line = uses.iter().find(|line| line.name == name).unwrap();
    assert!(line.shadow);
    (line.used, line.would_have_refused, line.would_have_waited)
}

async fn shadow_limit_counts_would_be_refusals(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, shaded(&[("all", 9, 8_000), ("tight", 2, 8_000)], 1)).await;
    let reply = caller.call(&[1; 5]).await;
    assert_eq!((reply.permits(), reply.refused, reply.deciding_limit, reply.remaining), (5, None, 0, 4), "{reply:?}");
    assert_eq!(shadow_of(&caller, None, "tight").await, (2, 3, 0));
    caller.call(&[2, 1]).await;
    assert_eq!(shadow_of(&caller, None, "tight").await, (2, 5, 0), "the counter counts permits, whatever they cost");
}

async fn shadow_limit_counts_would_be_waits(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, shaded(&[("all", 9, 8_000), ("tight", 1, 600)], 1)).await;
    let window_us = padded_us(&caller.spec, 1);
    let first = caller.call(&[1]).await;
    let free_us = first.now.0.div_ceil(1_000) * 1_000 + window_us;
    until_us(&caller, free_us - 200_000).await;
    let second = caller.call(&[1]).await;
    assert_eq!((second.permits(), second.grants[0].wait_us), (1, 0), "the permit starts at once");
    let waited = u64::from(second.now.0 < free_us);
    assert_eq!(shadow_of(&caller, None, "tight").await.2, waited);
}

async fn a_closed_shadow_limit_refuses_nothing(limiter: Arc<dyn Limiter>) {
    for (number, algorithm) in Algorithm::WITH_WINDOW.into_iter().enumerate() {
        let mut spec = shaded(&[("all", 9, 8_000), ("closed", 0, 8_000)], 1);
        spec.limits[1].algorithm = algorithm;
        spec.quota = ProviderName::new(format!("closed-{number}")).unwrap();
        let mut caller = Caller::warm(&limiter, spec).await;
        assert_eq!(caller.call(&[1, 1]).await.permits(), 2);
        assert_eq!(shadow_of(&caller, None, "closed").await, (0, 2, 0), "{algorithm:?}");
    }
}

async fn account_shadow_limit_counts_per_account(limiter: Arc<dyn Limiter>) {
    let mut spec = shaded(&[("account", 1, 8_000), ("all", 9, 8_000)], 0);
    spec.limits[0].scope = Scope::Account;
    let subject = |account| spec.subjects(Some(account), None).unwrap();
    let want = |account, permits| PermitRequest { subjects: subject(account), ..PermitRequest::charges(permits, 1) };
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let reply = caller.ask(&[want("a", 3), want("b", 1)]).await;
    assert_eq!((reply.permits(), reply.skipped.len()), (4, 0), "{reply:?}");
    assert_eq!(shadow_of(&caller, subject("a").first(), "account").await, (1, 2, 0));
    assert_eq!(shadow_of(&caller, subject("b").first(), "account").await, (1, 0, 0));
}

async fn enforced_shadow_limit_starts_without_history(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, shaded(&[("all", 9, 8_000), ("tight", 2, 8_000)], 1)).await;
    caller.call(&[1; 5]).await;
    caller.spec.version = 2;
    caller.spec.limits[1].shadow = false;
    let reply = caller.settle(vec![used(caller.number, 5, 0)], &[1]).await;
    let unknown = RefusalReason::NeedsHistory { index: 1, readable_in_us: caller.spec.start_delay_max_us() };
    assert_eq!((reply.permits(), refused(&reply).reason), (0, unknown));
    assert_eq!(refused(&reply).wait_us, unknown_past_us(&caller.spec, 1), "a shadow limit does not count the hold");
}
