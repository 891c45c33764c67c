//! The page of the limiter: the Redis user that it describes has the rights that are needed, and its tables match the
//! code.

use std::collections::BTreeSet;
use std::time::Duration;

use sluicegate::domain::limit::{Algorithm, Scope};
use sluicegate::domain::permit_protocol::{LimiterCall, PermitRequest};
use sluicegate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::Limiter as _;
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::redis::keys::call_keys;
use sluicegate::limiter::redis::library::SOURCE;

use crate::page::{Page, plain};
use crate::support::redis::Redis;

fn page() -> Page {
    Page::read("docs/limiter.md")
}

fn spec() -> QuotaSpec {
    let of = |name: &str, scope| LimitSpec { scope, ..LimitSpec::sliding_log(name, 10, Duration::from_secs(1)) };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: vec![of("all", Scope::Provider), of("mine", Scope::Account), of("one", Scope::Reference)],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(1),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn call(spec: &QuotaSpec, run_id: String) -> LimiterCall {
    let subjects = spec.subjects(Some("A"), Some("R")).unwrap();
    LimiterCall {
        incarnation: 1,
        number: 1,
        requests: vec![PermitRequest { subjects, ..PermitRequest::charges(1, 1) }],
        releases: Vec::new(),
        pause: None,
        rebuild: None,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id,
    }
}

/// The list misses no right, and has none that the program does not use.
#[tokio::test]
async fn documented_redis_user_has_minimal_rights() {
    let users = Page::read("docs/security.md").blocks_of("text").swap_remove(0);
    let user = users.lines().find_map(|line| line.strip_prefix("user sluicegate on #PASSWORD-SHA256 ")).unwrap();
    let allowed: BTreeSet<String> =
        user.split_whitespace().filter_map(|word| word.strip_prefix('+')).map(str::to_owned).collect();
    let called = SOURCE.split("redis.call('").skip(1).map(|rest| rest.split('\'').next().unwrap().to_lowercase());
    let ours = ["fcall", "function|load", "info", "ping", "time", "cluster|slots"].map(str::to_owned);
    assert_eq!(allowed, called.chain(ours).collect());

    let redis = Redis::start();
    redis.command::<()>(&format!("ACL SETUSER sluicegate on >PASSWORD {user}"));
    let limiter = RedisLimiter::new(&redis.url().replace("://", "://sluicegate:PASSWORD@"), "sluicegate").unwrap();
    let report = limiter.report().await.unwrap();
    assert!(report.nodes.iter().all(|node| node.facts.is_ok()), "{report:?}");
    let spec = spec();
    let run_id = limiter.run_id(&spec.quota).await.unwrap();
    limiter.call(&spec, &call(&spec, run_id)).await.unwrap();
    let subject = spec.subjects(Some("A"), None).unwrap();
    limiter.peek(&spec, subject.first()).await.unwrap();
    limiter.ping().await.unwrap();
}

#[test]
fn documented_keys_match_the_code() {
    let spec = spec();
    let subjects = spec.subjects(Some("A"), Some("R")).unwrap();
    let named: Vec<String> = page().table("## In Redis", "key").iter().map(|row| plain(&row[0]).to_owned()).collect();
    let used = call_keys("P", &spec, &call(&spec, String::new()));
    let used: Vec<String> =
        used.iter().map(|key| key.replace("{acme}", "{Q}").replace("log:all", "log:LIMIT")).collect();
    assert_eq!((named, subjects.len()), (used, 2));
}

#[test]
fn all_algorithms_are_in_the_table() {
    let table = page().table("## Algorithms", "algorithm");
    let named: Vec<&str> = table.iter().map(|row| plain(&row[0])).collect();
    assert_eq!(named, Algorithm::ALL.map(Algorithm::name));
}
