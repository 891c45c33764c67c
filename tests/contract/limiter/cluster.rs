//! A real Redis Cluster of three masters. Each quota lives on one of them. A node may fail, return or move a slot: no
//! permit too many is granted, and quotas on other nodes do not notice.

use std::time::Instant;

use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::redis::keys::provider_keys;

use super::*;
use crate::support::redis::{Redis, RedisCluster};

fn limiter(cluster: &RedisCluster, prefix: &str) -> Arc<RedisLimiter> {
    let urls = cluster.urls();
    Arc::new(RedisLimiter::cluster(urls.iter().map(String::as_str), prefix).unwrap())
}

/// Three quotas with the same limits, one on each node, in the order of the nodes.
fn specs_on_all(cluster: &RedisCluster, prefix: &str, limits: &[(&str, u32, u64)]) -> [QuotaSpec; 3] {
    [0, 1, 2].map(|node| {
        let named =
            |number: u32| QuotaSpec { quota: ProviderName::new(format!("provider-{number}")).unwrap(), ..spec(limits) };
        let here = |spec: &QuotaSpec| cluster.owner(&provider_keys(prefix, spec)[0]) == node;
        (0..).map(named).find(here).unwrap()
    })
}

async fn warm_on_all(cluster: &RedisCluster, prefix: &str, limits: &[(&str, u32, u64)]) -> [Caller; 3] {
    let limiter: Arc<dyn Limiter> = limiter(cluster, prefix);
    let [first, second, third] = specs_on_all(cluster, prefix, limits);
    [Caller::warm(&limiter, first).await, Caller::warm(&limiter, second).await, Caller::warm(&limiter, third).await]
}

/// Calls until the store answers again.
async fn until_answered(caller: &mut Caller, wants: &[u32]) -> LimiterReply {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match caller.try_call(wants).await {
            Ok(reply) => return reply,
            Err(LimiterError::Unavailable(why)) => {
                assert!(Instant::now() < deadline, "the store is still unavailable: {why}")
            }
            Err(refused) => panic!("{refused}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn quotas_on_different_nodes_keep_their_limits() {
    let cluster = RedisCluster::shared();
    let mut callers = warm_on_all(cluster, "spread", &[("long", 5, 20_000), ("short", 3, 10_000)]).await;
    let mut run_ids = Vec::new();
    for (node, caller) in callers.iter_mut().enumerate() {
        let keys = provider_keys("spread", &caller.spec);
        assert!(keys.iter().all(|key| cluster.owner(key) == node), "{keys:?}");
        let reply = caller.call(&[1, 1, 1, 1]).await;
        assert_eq!((reply.permits(), refused(&reply).reason), (3, RefusalReason::Limit { index: 1 }));
        let used: Vec<u64> =
            caller.limiter.peek(&caller.spec, None).await.unwrap().iter().map(|limit| limit.used).collect();
        assert_eq!(used, [3, 3]);
        let run_id = caller.limiter.run_id(&caller.spec.quota).await.unwrap();
        let info: String = cluster.nodes[node].command("INFO server");
        assert!(info.contains(&format!("run_id:{run_id}")), "{run_id} is the run id of another node");
        run_ids.push(run_id);
    }
    run_ids.dedup();
    assert_eq!(run_ids.len(), 3);
}

#[tokio::test]
async fn dead_node_stops_only_its_quotas() {
    let cluster = RedisCluster::start();
    let [mut here, mut left, mut right] = warm_on_all(&cluster, "dead", &[("all", 40, 20_000)]).await;
    let before = here.call(&[1, 1, 1]).await;
    assert_eq!(before.permits(), 3);
    let born = [left.call(&[1]).await.state_epoch, right.call(&[1]).await.state_epoch];
    cluster.nodes[0].kill();
    for _ in 0..10 {
        let error = here.try_call(&[1]).await.unwrap_err();
        assert!(matches!(error, LimiterError::Unavailable(_)), "{error:?}");
        let others = [left.call(&[1]).await, right.call(&[1]).await];
        assert_eq!([others[0].permits(), others[1].permits()], [1, 1], "the quotas of other nodes continue");
    }
    cluster.nodes[0].restart();
    cluster.await_agreement();
    here.warm = None;
    let cold = until_answered(&mut here, &[1]).await;
    assert_eq!((cold.permits(), refused(&cold).reason), (0, RefusalReason::Cold));
    assert!(cold.state_epoch > before.state_epoch);
    here.warm = Some(cold.state_epoch);
    assert_eq!(here.call(&[1]).await.permits(), 1);
    let still = [left.call(&[1]).await, right.call(&[1]).await];
    assert_eq!([still[0].state_epoch, still[1].state_epoch], born, "no other quota lost its state");
}

/// No process knows the replica's address. The other nodes name it after the fail-over.
#[tokio::test]
async fn promoted_replica_starts_cold() {
    let cluster = RedisCluster::start();
    let replica = cluster.add_replica(0);
    let [mut here, mut other, _] = warm_on_all(&cluster, "replica", &[("all", 40, 20_000)]).await;
    let before = here.call(&[1, 1, 1]).await;
    cluster.nodes[0].kill();
    here.warm = None;
    let cold = until_answered(&mut here, &[1]).await;
    assert_eq!((cold.permits(), refused(&cold).reason), (0, RefusalReason::Cold));
    assert!(cold.state_epoch > before.state_epoch);
    let info: String = replica.command("INFO server");
    assert!(info.contains(&here.limiter.run_id(&here.spec.quota).await.unwrap()));
    assert_eq!(other.call(&[1]).await.permits(), 1);
    // The old master returns as a replica and changes nothing.
    cluster.nodes[0].restart();
    here.warm = Some(cold.state_epoch);
    assert_eq!(until_answered(&mut here, &[1]).await.permits(), 1);
}

/// A node that accepts connections and never answers delays only its own quotas.
#[tokio::test]
async fn silent_node_stops_only_its_quotas() {
    let cluster = RedisCluster::start();
    let [mut here, mut left, mut right] = warm_on_all(&cluster, "silent", &[("all", 100, 20_000)]).await;
    cluster.nodes[0].signal("STOP");
    let (silent, (), ()) = tokio::join!(
        async {
            let error = here.try_call(&[1]).await.unwrap_err();
            // By now the connection is closed, and the next one waits for its handshake.
            let again = here.repeat(&[1]).await.unwrap_err();
            [error, again]
        },
        async {
            for _ in 0..30 {
                assert_eq!(left.call(&[1]).await.permits(), 1);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        },
        async {
            for _ in 0..30 {
                assert_eq!(right.call(&[1]).await.permits(), 1);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        },
    );
    assert!(silent.iter().all(|error| matches!(error, LimiterError::Unavailable(_))), "{silent:?}");
    cluster.nodes[0].signal("CONT");
    cluster.await_agreement();
    assert_eq!(
        until_answered(&mut here, &[1]).await.permits(),
        1,
        "the store process and its state are the same as before"
    );
}

/// The slot is unavailable throughout its migration. On the target server the quota begins cold.
#[tokio::test(flavor = "multi_thread")]
async fn migrating_slot_is_unavailable_then_cold() {
    let cluster = RedisCluster::start();
    let [mut mover, mut stayer, _] = warm_on_all(&cluster, "moving", &[("all", 20, 20_000)]).await;
    let before = mover.call(&[1, 1, 1]).await;
    mover.settle(vec![used(mover.number, 2, 0)], &[]).await;
    let slot = cluster.slot(&provider_keys("moving", &mover.spec)[0]);
    let mut outcomes = Vec::new();
    tokio::task::block_in_place(|| {
        cluster.migrate(slot, 0, 1, || {
            let outcome = tokio::runtime::Handle::current().block_on(mover.try_call(&[1]));
            outcomes.push(outcome.map(|reply| reply.permits()));
        });
    });
    // Once the migration has begun, a missing key may be on either node.
    assert!(outcomes.len() > 1, "calls before and after the key moved");
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(LimiterError::Unavailable(_)))), "{outcomes:?}");
    let cold = until_answered(&mut mover, &[1]).await;
    assert_eq!((cold.permits(), refused(&cold).reason), (0, RefusalReason::Cold));
    assert!(cold.state_epoch > before.state_epoch);
    mover.warm = Some(cold.state_epoch);
    assert_eq!(mover.call(&[1; 9]).await.permits(), 9);
    assert_eq!(stayer.call(&[1]).await.permits(), 1);
}

#[tokio::test]
async fn any_live_seed_finds_the_others() {
    let cluster = RedisCluster::start();
    let [spec, ..] = specs_on_all(&cluster, "seeds", &[("all", 9, 20_000)]);
    cluster.nodes[1].kill();
    let seeds = [cluster.nodes[1].url(), cluster.nodes[2].url()];
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::cluster(seeds.iter().map(String::as_str), "seeds").unwrap());
    assert_eq!(Caller::warm(&limiter, spec.clone()).await.call(&[1]).await.permits(), 1);
    limiter.ping().await.unwrap();
    let nobody = [cluster.nodes[1].url()];
    let limiter = RedisLimiter::cluster(nobody.iter().map(String::as_str), "seeds").unwrap();
    let error = limiter.run_id(&spec.quota).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Unavailable(why) if why.contains("no node of the cluster")), "{error:?}");
}

#[tokio::test]
async fn check_sees_every_master() {
    let cluster = RedisCluster::start();
    cluster.nodes[1].command::<()>("CONFIG SET maxmemory-policy allkeys-lru");
    cluster.nodes[2].kill();
    let report = limiter(&cluster, "report").report().await.unwrap();
    assert_eq!((report.nodes.len(), report.orphan_slots), (3, 0));
    for (number, node) in cluster.nodes.iter().enumerate() {
        let address = format!("127.0.0.1:{}", node.port);
        let seen = report.nodes.iter().find(|seen| seen.address == address).unwrap();
        let policy = seen.facts.as_ref().ok().map(|facts| facts.eviction.policy.as_str());
        assert_eq!(policy, [Some("noeviction"), Some("allkeys-lru"), None][number]);
    }
    let evictions = limiter(&cluster, "report").evictions().await;
    let evictions: Vec<(String, &str)> =
        evictions.iter().map(|server| (server.address.clone(), server.policy.as_str())).collect();
    let expected = ["noeviction", "allkeys-lru"];
    assert_eq!(evictions.len(), expected.len(), "a master that is down is left out: {evictions:?}");
    for (node, policy) in cluster.nodes.iter().zip(expected) {
        assert!(evictions.contains(&(format!("127.0.0.1:{}", node.port), policy)), "{evictions:?}");
    }
    cluster.nodes[0].command::<()>("CLUSTER DELSLOTSRANGE 0 9");
    let seeds = [cluster.nodes[0].url()];
    let limiter = RedisLimiter::cluster(seeds.iter().map(String::as_str), "report").unwrap();
    assert_eq!(limiter.report().await.unwrap().orphan_slots, 10);
}

#[tokio::test]
async fn wrong_url_scheme_is_refused_with_a_fix() {
    let (single, cluster) = (Redis::shared(), RedisCluster::shared());
    let [first, second, _] = specs_on_all(cluster, "kind", &[("all", 9, 20_000)]);
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::cluster([single.url().as_str()], "kind").unwrap());
    let error = Caller::new(&limiter, first).try_call(&[1]).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Refused(why) if why.contains("write redis://")), "{error:?}");
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&cluster.nodes[0].url(), "kind").unwrap());
    let error = Caller::new(&limiter, second).try_call(&[1]).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Refused(why) if why.contains("redis+cluster://")), "{error:?}");
}

/// The credentials of the URL open every node, and no error shows them.
#[tokio::test]
async fn credentials_open_every_node_and_stay_hidden() {
    let cluster = RedisCluster::start();
    for node in &cluster.nodes {
        node.command::<()>("ACL SETUSER sluice on >swordfish ~* +@all");
    }
    let specs = specs_on_all(&cluster, "secret", &[("all", 9, 20_000)]);
    for node in &cluster.nodes {
        node.command::<()>("ACL SETUSER default off");
    }
    let with = |password: &str| cluster.nodes[0].url().replace("redis://", &format!("redis://sluice:{password}@"));
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::cluster([with("swordfish").as_str()], "secret").unwrap());
    for spec in &specs {
        assert_eq!(Caller::warm(&limiter, spec.clone()).await.call(&[1]).await.permits(), 1);
    }
    let limiter = RedisLimiter::cluster([with("sardine").as_str()], "secret").unwrap();
    let error = limiter.run_id(&specs[0].quota).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Refused(why) if why.contains("limiter.url")), "{error:?}");
    assert!(!error.to_string().contains("sardine"), "{error}");
}
