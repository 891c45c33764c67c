//! Faults of Redis: lost state, malformed answers, refused writes, no answer. None of them yields a permit, the error
//! names the fault, and calls continue where they can.

use sha2::Digest as _;
use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::keys::{call_keys, provider_keys};
use sluicegate::limiter::redis::library::LIBRARY;

use super::*;
use crate::support::redis::Redis;

fn limiter(redis: &Redis, prefix: &str) -> Arc<dyn Limiter> {
    Arc::new(RedisLimiter::new(&redis.url(), prefix).unwrap())
}

fn command(redis: &Redis, line: &str) {
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    words.for_each(|word| {
        command.arg(word);
    });
    command.exec(&mut redis.connection()).unwrap();
}

/// A caller with two slots: one in flight, the other answered just now.
async fn busy(limiter: &Arc<dyn Limiter>) -> Caller {
    let mut caller = Caller::warm(limiter, spec(&[("all", 2, 20_000)])).await;
    caller.call(&[1, 1]).await;
    caller.settle(vec![used(caller.number, 1, 0)], &[]).await;
    assert_eq!(caller.limiter.peek(&caller.spec, None).await.unwrap()[0].used, 2);
    caller
}

/// The next call finds a cold limiter, which grants again once the ledger has ended the cold start.
async fn expect_cold_start(caller: &mut Caller, before: Micros) {
    caller.warm = None;
    let cold = caller.call(&[1]).await;
    assert_eq!((cold.permits(), refused(&cold).reason), (0, RefusalReason::Cold), "{cold:?}");
    assert!(cold.state_epoch > before);
    caller.warm = Some(cold.state_epoch);
    let most = u64::from(caller.spec.limits[0].max_requests);
    assert_eq!(caller.call(&[1; 1_000]).await.permits(), most);
}

#[tokio::test]
async fn a_flushed_store_starts_cold() {
    let redis = Redis::start();
    let limiter = limiter(&redis, "flushed");
    let mut caller = busy(&limiter).await;
    let born = caller.call(&[]).await.state_epoch;
    command(&redis, "FLUSHALL");
    expect_cold_start(&mut caller, born).await;
}

#[tokio::test]
async fn restarted_store_is_cold_with_new_identity() {
    let redis = Redis::start();
    let limiter = limiter(&redis, "killed");
    let mut caller = busy(&limiter).await;
    let (born, run_id) = (caller.call(&[]).await.state_epoch, limiter.run_id(&caller.spec.quota).await.unwrap());
    redis.kill();
    for _ in 0..3 {
        let error = caller.try_call(&[1]).await.unwrap_err();
        assert!(matches!(error, LimiterError::Unavailable(_)), "{error:?}");
    }
    assert!(matches!(limiter.ping().await, Err(LimiterError::Unavailable(_))));
    redis.restart();
    // A call for the run id of the old process is not accepted by the new one.
    let old = LimiterCall {
        incarnation: caller.incarnation,
        number: caller.number,
        requests: wants(&[1]),
        releases: Vec::new(),
        pause: None,
        rebuild: None,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: run_id.clone(),
    };
    let error = limiter.call(&caller.spec, &old).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Unavailable(why) if why.contains("changed")), "{error:?}");
    assert_ne!(limiter.run_id(&caller.spec.quota).await.unwrap(), run_id);
    expect_cold_start(&mut caller, born).await;
}

#[tokio::test]
async fn flushed_functions_are_reloaded() {
    // A separate server, because functions belong to the whole server.
    let redis = Redis::start();
    let limiter = limiter(&redis, "functions");
    let mut caller = Caller::warm(&limiter, spec(&[("all", 4, 20_000)])).await;
    for granted in 1..=4 {
        command(&redis, "FUNCTION FLUSH");
        assert_eq!(caller.call(&[1]).await.permits(), 1);
        command(&redis, "FUNCTION FLUSH");
        assert_eq!(limiter.peek(&caller.spec, None).await.unwrap()[0].used, granted);
    }
    assert_eq!(caller.call(&[1]).await.permits(), 0);
}

/// A caller with a log of several chunks: 300 answers, each in its own millisecond.
async fn long_log(limiter: &Arc<dyn Limiter>) -> Caller {
    let mut caller = Caller::warm(limiter, spec(&[("all", 300, 20_000)])).await;
    assert_eq!(caller.call(&[1; 300]).await.permits(), 300);
    let call = caller.number;
    for answers in (0..300).collect::<Vec<u64>>().chunks(50) {
        let answered = answers.iter().map(|number| used(call, 1, (300 - number) * 2_000)).collect();
        caller.settle(answered, &[]).await;
    }
    assert_eq!(caller.limiter.peek(&caller.spec, None).await.unwrap()[0].used, 300);
    caller
}

#[tokio::test]
async fn a_lost_state_is_a_cold_start() {
    let redis = Redis::shared();
    let limiter = limiter(redis, "lost");
    let mut caller = busy(&limiter).await;
    let born = caller.call(&[]).await.state_epoch;
    command(redis, &format!("DEL {}", provider_keys("lost", &caller.spec)[0]));
    expect_cold_start(&mut caller, born).await;
}

#[tokio::test]
async fn unreadable_state_causes_a_cold_start() {
    let redis = Redis::shared();
    let mut connection = redis.connection();
    let of_state = [0, 3, 60, 76, 100, 120].map(|kept| ("m", kept));
    // The record of the past, and this caller's last call.
    let others = [("k", 0), ("k", 60), ("own", 0), ("own", 10)];
    for (number, (field, kept)) in of_state.into_iter().chain(others).enumerate() {
        let prefix = format!("damaged-{number}");
        let limiter = limiter(redis, &prefix);
        let mut caller = busy(&limiter).await;
        let born = caller.call(&[]).await.state_epoch;
        let key = &provider_keys(&prefix, &caller.spec)[0];
        let name = if field == "own" { caller.incarnation.to_le_bytes().to_vec() } else { field.into() };
        let mut value: Vec<u8> = redis::cmd("HGET").arg(key).arg(&name).query(&mut connection).unwrap();
        assert!(value.len() > kept, "{field}");
        value.truncate(kept);
        redis::cmd("HSET").arg(key).arg(&name).arg(value).exec(&mut connection).unwrap();
        let error = caller.try_call(&[1]).await.unwrap_err();
        assert!(error.to_string().contains("DAMAGED"), "{field} {kept}: {error:?}");
        expect_cold_start(&mut caller, born).await;
    }
}

/// The state of another layout counts as one of another store. Nothing of it is read.
#[tokio::test]
async fn state_of_another_layout_begins_cold() {
    let redis = Redis::shared();
    let limiter = limiter(redis, "layout");
    let mut caller = busy(&limiter).await;
    let born = caller.call(&[]).await.state_epoch;
    let key = &provider_keys("layout", &caller.spec)[0];
    let mut connection = redis.connection();
    let mut state: Vec<u8> = redis::cmd("HGET").arg(key).arg("m").query(&mut connection).unwrap();
    let digest = sha2::Sha256::digest(limiter.run_id(&caller.spec.quota).await.unwrap());
    state[..8].copy_from_slice(&digest[..8]);
    redis::cmd("HSET").arg(key).arg("m").arg(state).exec(&mut connection).unwrap();
    expect_cold_start(&mut caller, born).await;
}

#[tokio::test]
async fn truncated_log_causes_a_cold_start() {
    let redis = Redis::shared();
    for (number, damage) in ["DEL {1}", "LPOP {1}", "LSET {1} 0 x"].into_iter().enumerate() {
        let prefix = format!("log-{number}");
        let limiter = limiter(redis, &prefix);
        let mut caller = long_log(&limiter).await;
        let born = caller.call(&[]).await.state_epoch;
        let key = &provider_keys(&prefix, &caller.spec)[1];
        let chunks: u64 = redis::cmd("LLEN").arg(key).query(&mut redis.connection()).unwrap();
        assert!(chunks > 1, "the log has only one chunk");
        command(redis, &damage.replace("{1}", key));
        // Sixty uses must end before a permit can start. The last of them is in the first missing chunk.
        caller.spec = QuotaSpec { version: 2, ..spec(&[("all", 240, 20_000)]) };
        let error = caller.try_call(&[1; 2]).await.unwrap_err();
        assert!(error.to_string().contains("DAMAGED"), "{damage}: {error:?}");
        expect_cold_start(&mut caller, born).await;
    }
}

#[tokio::test]
async fn a_key_of_another_type_is_deleted_once() {
    let redis = Redis::shared();
    {
        let prefix = "type";
        let limiter = limiter(redis, prefix);
        let mut caller = busy(&limiter).await;
        let born = caller.call(&[]).await.state_epoch;
        let key = &provider_keys(prefix, &caller.spec)[0];
        command(redis, &format!("SET {key} x"));
        let error = caller.try_call(&[1]).await.unwrap_err();
        assert!(error.to_string().contains("DAMAGED") && error.to_string().contains("WRONGTYPE"), "{key}: {error:?}");
        expect_cold_start(&mut caller, born).await;
    }
}

/// A primary that became a replica is a transient fault: it, or another node, becomes primary again.
#[tokio::test]
async fn read_only_store_grants_nothing_and_keeps_state() {
    let redis = Redis::start();
    let limiter = limiter(&redis, "readonly");
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 20_000)])).await;
    let first = caller.call(&[1]).await;
    command(&redis, "REPLICAOF 127.0.0.1 1");
    let error = caller.try_call(&[1]).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Unavailable(why) if why.to_uppercase().contains("READ")), "{error:?}");
    command(&redis, "REPLICAOF NO ONE");
    let reply = caller.repeat(&[1]).await.unwrap();
    assert_eq!((reply.permits(), reply.state_epoch, reply.remaining), (1, first.state_epoch, 1));
}

/// Without memory, a call takes effect completely or not at all.
#[tokio::test]
async fn out_of_memory_store_grants_nothing() {
    let redis = Redis::start();
    let limiter = limiter(&redis, "memory");
    let mut caller = Caller::warm(&limiter, spec(&[("all", 3, 20_000)])).await;
    caller.call(&[1]).await;
    let call = caller.number;
    command(&redis, "CONFIG SET maxmemory 1");
    for _ in 0..3 {
        let error = caller.try_call(&[1]).await.unwrap_err();
        assert!(matches!(&error, LimiterError::Unavailable(why) if why.contains("OOM")), "{error:?}");
    }
    // A call that begins with a deletion may succeed. Then it has released and granted, otherwise neither.
    caller.settlements = vec![used(call, 1, 0)];
    let came_through = caller.try_call(&[1]).await.map_or(0, |reply| reply.permits());
    command(&redis, "CONFIG SET maxmemory 0");
    let again = caller.repeat(&[1]).await.unwrap();
    assert!(came_through == 0 || came_through == again.permits());
    caller.settlements.clear();
    let left = caller.call(&[1, 1, 1]).await;
    assert_eq!(again.permits() + left.permits(), 2, "one of three was used before");
}

/// A call without a reply may have run or not. Repeated under its number, it runs once.
#[tokio::test]
async fn unanswered_call_is_repeated_but_runs_once() {
    let redis = Redis::start();
    let limiter = limiter(&redis, "silent");
    let mut caller = Caller::warm(&limiter, spec(&[("all", 5, 20_000)])).await;
    for granted in 1..=3 {
        redis.signal("STOP");
        let error = caller.try_call(&[1]).await.unwrap_err();
        assert!(matches!(error, LimiterError::Unavailable(_)), "{error:?}");
        redis.signal("CONT");
        assert_eq!(caller.repeat(&[1]).await.unwrap().permits(), 1);
        assert_eq!(limiter.peek(&caller.spec, None).await.unwrap()[0].used, granted);
    }
}

#[tokio::test]
async fn a_store_that_forbids_functions_refuses() {
    let redis = Redis::start();
    command(&redis, "ACL SETUSER limited on >word ~* +@all -fcall");
    let url = redis.url().replace("redis://", "redis://limited:word@");
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&url, "forbidden").unwrap());
    let mut caller = Caller::new(&limiter, spec(&[("all", 5, 1_000)]));
    let error = caller.try_call(&[1]).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Refused(_)), "{error:?}");
    assert!(!error.to_string().contains("word"), "{error}");
    let wrong = redis.url().replace("redis://", "redis://limited:secret@");
    let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&wrong, "forbidden").unwrap());
    let error = limiter.run_id(&caller.spec.quota).await.unwrap_err();
    assert!(matches!(&error, LimiterError::Refused(_)), "{error:?}");
    assert!(!error.to_string().contains("secret"), "{error}");
}

/// The function checks all arguments before its first write.
#[tokio::test]
async fn a_missing_or_malformed_argument_writes_nothing() {
    let redis = Redis::shared();
    let limiter = limiter(redis, "arguments");
    let mut caller = Caller::warm(&limiter, spec(&[("a", 9, 20_000), ("b", 9, 1_000)])).await;
    caller.call(&[1, 2]).await;
    caller.settle(vec![used(caller.number, 1, 0)], &[]).await;
    let call = LimiterCall {
        incarnation: caller.incarnation,
        number: caller.number + 1,
        requests: wants(&[1, 2]),
        releases: vec![used(caller.number - 1, 1, 5), not_sent(caller.number - 1, 1, &[0, 0])],
        pause: Some(SECOND),
        rebuild: Some(RebuildData {
            ended: vec![PastUse { age: SECOND, cost: CostByKind::charges(1) }],
            ..forgotten_nothing(Micros(1))
        }),
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: limiter.run_id(&caller.spec.quota).await.unwrap(),
    };
    let keys = call_keys("arguments", &caller.spec, &call);
    let good = encode_call(&caller.spec, &call);
    let mut connection = redis.connection();
    let before = dump(&mut connection, &keys);
    let all_keys = keys.clone();
    let mut refuse = |keys: &[String], argument: &[u8], what: &str| {
        let outcome: Result<Vec<u8>, redis::RedisError> = LIBRARY.call(keys, argument).query(&mut connection);
        assert!(outcome.as_ref().is_err_and(|error| error.to_string().contains("ARGUMENT")), "{what}: {outcome:?}");
        assert_eq!(dump(&mut connection, &all_keys), before, "{what} wrote something");
    };
    for length in 0..good.len() {
        refuse(&keys, &good[..length], &format!("an argument of {length} bytes"));
    }
    refuse(&keys, &[good.as_slice(), b"1"].concat(), "one byte too many");
    refuse(&keys[..2], &good, "a key too few");
    refuse(&[keys.as_slice(), &keys[..1]].concat(), &good, "a key too many");
    // The valid argument does write.
    let reply = caller.limiter.call(&caller.spec, &call).await.unwrap();
    assert_eq!(refused(&reply).reason, RefusalReason::Paused);
    assert_ne!(dump(&mut redis.connection(), &keys), before);
}

/// The stored bytes of every key.
fn dump(connection: &mut redis::Connection, keys: &[String]) -> Vec<Option<Vec<u8>>> {
    keys.iter().map(|key| redis::cmd("DUMP").arg(key).query(connection).unwrap()).collect()
}

#[tokio::test]
async fn peek_writes_nothing() {
    let redis = Redis::shared();
    let limiter = limiter(redis, "look");
    let caller = busy(&limiter).await;
    let keys = provider_keys("look", &caller.spec);
    let mut connection = redis.connection();
    let before = dump(&mut connection, &keys);
    limiter.peek(&caller.spec, None).await.unwrap();
    assert_eq!(dump(&mut connection, &keys), before);
}
