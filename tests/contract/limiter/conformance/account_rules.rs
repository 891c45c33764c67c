//! Account rules of a row without account limits: each is a limit of its own, and no other account is limited.

use sluicegate::domain::limit::{AccountRule, RULE_LIMIT, Rate, Rule};
use sluicegate::domain::permit_protocol::Shortage;

use super::scopes::{of, served};
use super::*;

on_every_limiter!(rule_without_account_limit_counts_exactly);

/// Only accounts with a rule are limited. A rule that comes later waits for what its account used before.
async fn rule_without_account_limit_counts_exactly(limiter: Arc<dyn Limiter>) {
    let own = |account: &str, rate: &str| AccountRule {
        account: account.to_owned(),
        limit: Some(RULE_LIMIT.to_owned()),
        rule: Rule::Limit(rate.parse::<Rate>().unwrap().into()),
    };
    let mut ruled = spec(&[(RULE_LIMIT, 1, 8_000), ("all", 20, 9_000)]);
    ruled.limits[0] = LimitSpec::of_rules(Duration::from_secs(8));
    ruled.account_rules = vec![own("a", "2/8s")];
    let mut caller = Caller::warm(&limiter, ruled.clone()).await;
    let reply = caller.ask(&[of(&ruled, 3, "a", None), of(&ruled, 5, "b", None)]).await;
    assert_eq!(served(&reply, 2), [2, 5], "{reply:?}");
    let counted_us = reply.now.0;
    let shown = async |spec: &QuotaSpec, account: &str| {
        let uses = limiter.peek(spec, spec.subjects(Some(account), None).unwrap().first()).await.unwrap();
        uses.iter().map(|line| (line.name.clone(), line.max_requests, line.used)).collect::<Vec<_>>()
    };
    assert_eq!(shown(&ruled, "a").await, [("all".to_owned(), 20, 7), (RULE_LIMIT.to_owned(), 2, 2)]);
    assert_eq!(shown(&ruled, "b").await, [("all".to_owned(), 20, 7)], "no limit counts an account without a rule");
    let more =
        QuotaSpec { version: 2, account_rules: vec![own("a", "3/8s"), own("b", "6/8s"), own("c", "1/8s")], ..ruled };
    caller.spec = more.clone();
    let wants = ["a", "b", "c"].map(|account| of(&more, 2, account, None));
    let reply = caller.ask(&wants).await;
    // The rule of `b` does not know the five permits of before, and `c` had none.
    assert_eq!(served(&reply, 3), [1, 0, 1], "{reply:?}");
    let passed = reply.skipped.iter().find(|passed| passed.request_index == 1).unwrap();
    assert_eq!(reply.now.0 + passed.wait_us, counted_us + unknown_past_us(&more, 0), "{reply:?}");
    assert!(matches!(passed.shortage, Shortage::NeedsHistory { .. }), "{reply:?}");
    // Without its rule it waits for nothing.
    let fewer = QuotaSpec { version: 3, account_rules: vec![own("a", "3/8s")], ..more };
    caller.spec = fewer.clone();
    assert_eq!(caller.ask(&[of(&fewer, 4, "b", None), of(&fewer, 1, "a", None)]).await.permits(), 4);
}
