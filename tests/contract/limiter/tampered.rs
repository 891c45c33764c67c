//! Limiter state that another program wrote to. Where the library remembers its last write, the state is reset at once.
//! Elsewhere no error is permanent, and no wait exceeds what settings allow.

use std::ops::Range;

use sluicegate::limiter::redis::client::RedisLimiter;
use sluicegate::limiter::redis::keys::{provider_keys, subject_key};
use sluicegate::limiter::redis::library::LIBRARY;
use tokio::time::Instant;

use super::*;
use crate::support::redis::Redis;

mod forgotten;
mod gate;

/// Numbers of the state, of its counters in flight and of its one limit, with their positions in `m` as in the header
/// of `lua/tallies.lua`.
const FIELDS: [(&str, Range<usize>); 26] = [
    ("run id digest", 0..8),
    ("terms digest", 8..16),
    ("writer", 16..24),
    ("born", 24..31),
    ("warm", 31..38),
    ("last call", 38..45),
    ("version", 45..51),
    ("paused until", 51..58),
    ("resumed at", 58..64),
    ("calls", 64..70),
    ("time to live renewed", 70..77),
    ("charges in flight", 77..83),
    ("lookups in flight", 83..89),
    ("first deadline", 89..96),
    ("held until", 96..103),
    ("uses", 103..110),
    ("last ms", 110..117),
    ("excess until", 117..124),
    ("uses ever logged", 124..130),
    ("of them before the tail", 130..136),
    ("chunks", 136..140),
    ("spent", 140..144),
    ("open ms", 144..151),
    ("open uses", 151..155),
    ("bytes of head", 155..159),
    ("bytes of tail", 159..163),
];
const LIMIT: u32 = 50;
const ANSWERED: u32 = 30;
const IN_FLIGHT: u32 = 10;
/// In every window of these tests.
const LEFT: u64 = (LIMIT - ANSWERED - IN_FLIGHT) as u64;
/// The longest pause that settings allow is a day.
const WAIT_MAX_US: u64 = 86_410_000_000;

struct Tampered {
    connection: redis::Connection,
    caller: Caller,
    state_key: String,
    answered_at: Instant,
}

impl Tampered {
    /// Of 50 slots, 30 are answered and 10 are in flight.
    async fn new(redis: &Redis, prefix: &str) -> Self {
        let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), prefix).unwrap());
        let mut caller = Caller::warm(&limiter, spec(&[("all", LIMIT, 20_000)])).await;
        caller.warm = None;
        caller.call(&[1; ANSWERED as usize]).await;
        let answered_at = Instant::now();
        caller.settle(vec![used(caller.number, ANSWERED, 0)], &[]).await;
        caller.call(&[1; IN_FLIGHT as usize]).await;
        let state_key = provider_keys(prefix, &caller.spec)[0].clone();
        Self { connection: redis.connection(), caller, state_key, answered_at }
    }

    fn field(&mut self, name: &[u8]) -> Vec<u8> {
        redis::cmd("HGET").arg(&self.state_key).arg(name).query(&mut self.connection).unwrap()
    }

    fn overwrite(&mut self, name: &[u8], value: &[u8]) {
        redis::cmd("HSET").arg(&self.state_key).arg(name).arg(value).exec(&mut self.connection).unwrap();
    }

    fn mine(&self) -> Vec<u8> {
        self.caller.incarnation.to_le_bytes().to_vec()
    }

    /// As after a reload of the functions without a restart of the server.
    fn forget_what_was_written(&mut self) {
        reload().exec(&mut self.connection).unwrap();
    }

    /// Continues as a worker does: it retries an error, and rebuilds a lost state from the ledger. Returns the numbers
    /// of granted permits and of errors.
    async fn go_on(&mut self, what: &str) -> (u64, u32) {
        let (mut granted, mut errors, mut in_a_row, mut rebuild) = (0, 0, 0, None);
        for _ in 0..6 {
            self.caller.number += 1;
            let call = LimiterCall {
                incarnation: self.caller.incarnation,
                number: self.caller.number,
                requests: wants(&[1; LIMIT as usize]),
                releases: Vec::new(),
                pause: None,
                rebuild: rebuild.take(),
                seeds: None,
                invalidate_epoch: None,
                look_ahead: BOOKING_HORIZON,
                run_id: self.caller.limiter.run_id(&self.caller.spec.quota).await.unwrap(),
            };
            match self.caller.limiter.call(&self.caller.spec, &call).await {
                Ok(reply) => {
                    in_a_row = 0;
                    granted += reply.permits();
                    if let Some(refused) = reply.refused {
                        // The rebuild from the ledger ends a cold start, however long it is.
                        let is_cold = refused.reason == RefusalReason::Cold;
                        assert!(is_cold || refused.wait_us <= WAIT_MAX_US, "{what}: {refused:?}");
                        let of_state = self.answered_at.elapsed();
                        let ended = vec![PastUse { age: of_state, cost: CostByKind::charges(ANSWERED) }];
                        let open = CostByKind::charges(IN_FLIGHT);
                        rebuild =
                            is_cold.then_some(RebuildData { state_epoch: reply.state_epoch, ended, in_flight: open });
                    }
                }
                Err(error) => {
                    (errors, in_a_row) = (errors + 1, in_a_row + 1);
                    assert!(error.to_string().contains("DAMAGED") && in_a_row == 1, "{what}: {error}");
                }
            }
        }
        (granted, errors)
    }
}

/// Loads the functions again.
fn reload() -> redis::Pipeline {
    let mut pipeline = redis::pipe();
    pipeline.atomic().cmd("FUNCTION").arg("FLUSH").add_command(LIBRARY.load());
    pipeline
}

const NASTY: usize = 8;

/// One of eight values that another program may write in place of a number.
fn nasty(was: &[u8], number: usize) -> Vec<u8> {
    let days_us = 30 * 86_400 * 1_000_000_u64;
    let is = was.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
    let [more, less, later] = [is.wrapping_add(1), is.wrapping_sub(1), is.wrapping_add(days_us)];
    let values: [u64; NASTY] = [0, 1, more, less, later, u64::MAX, 1 << 53, rand::random()];
    values[number].to_le_bytes()[..was.len()].to_vec()
}

/// Values in place of a text.
fn unfit(was: &[u8]) -> Vec<Vec<u8>> {
    let random: Vec<u8> = was.iter().map(|_| rand::random()).collect();
    let half = was[..was.len() / 2].to_vec();
    vec![Vec::new(), b"x".to_vec(), half, was[..was.len() - 1].to_vec(), [was, b"x"].concat(), random]
}

#[tokio::test]
async fn tampered_state_is_reset() {
    let redis = Redis::start();
    let mut prefixes = 0..;
    let mut next = || format!("remembered-{}", prefixes.next().unwrap());
    for (name, at) in FIELDS {
        for number in 0..NASTY {
            let mut tampered = Tampered::new(&redis, &next()).await;
            let mut state = tampered.field(b"m");
            let value = nasty(&state[at.clone()], number);
            state[at.clone()].copy_from_slice(&value);
            tampered.overwrite(b"m", &state);
            let what = format!("{name} as {value:?}");
            // State of another server, or invalidated state, is reset without an error, as after a loss.
            assert_eq!(tampered.go_on(&what).await.0, LEFT, "{what}");
        }
    }
    for name in [b"m".to_vec(), b"k".to_vec(), Vec::new()] {
        let mut number = 0;
        loop {
            let mut tampered = Tampered::new(&redis, &next()).await;
            let name = if name.is_empty() { tampered.mine() } else { name.clone() };
            let was = tampered.field(&name);
            let Some(value) = unfit(&was).get(number).cloned() else { break };
            tampered.overwrite(&name, &value);
            let what = format!("{name:?} as {value:?}");
            let (granted, errors) = tampered.go_on(&what).await;
            assert!(granted == LEFT && errors <= 1, "{what}: {granted} {errors}");
            number += 1;
        }
    }
}

#[tokio::test]
async fn restored_old_state_is_reset() {
    let redis = Redis::start();
    let mut tampered = Tampered::new(&redis, "put-back").await;
    let before: Vec<u8> = redis::cmd("DUMP").arg(&tampered.state_key).query(&mut tampered.connection).unwrap();
    let more = tampered.caller.call(&[1; 5]).await;
    assert_eq!(more.permits(), 5);
    let key = tampered.state_key.clone();
    let mut restore = redis::cmd("RESTORE");
    restore.arg(&key).arg(0).arg(&before).arg("REPLACE").exec(&mut tampered.connection).unwrap();
    tampered.caller.number += 1;
    let error = tampered.caller.repeat(&[1]).await.unwrap_err();
    assert!(error.to_string().contains("not what was written last"), "{error}");
}

/// After a reload the functions know only the stored state. They detect what contradicts itself, and no tampering
/// blocks a quota forever.
#[tokio::test]
async fn undetected_tampering_does_not_block_forever() {
    let redis = Redis::start();
    let mut prefixes = 0..;
    let mut next = || format!("unknown-{}", prefixes.next().unwrap());
    let mut unseen = Vec::new();
    for (name, at) in FIELDS {
        for number in 0..NASTY {
            let mut tampered = Tampered::new(&redis, &next()).await;
            let mut state = tampered.field(b"m");
            let value = nasty(&state[at.clone()], number);
            state[at.clone()].copy_from_slice(&value);
            tampered.overwrite(b"m", &state);
            tampered.forget_what_was_written();
            let what = format!("{name} as {value:?}");
            let (granted, errors) = tampered.go_on(&what).await;
            assert!(granted <= u64::from(LIMIT), "{what}: {granted}");
            if granted > LEFT {
                unseen.push((name, errors));
            }
        }
    }
    // The last answered instant can be any past instant, so a change to it is not detected.
    assert!(unseen.iter().all(|(name, _)| *name == "open ms"), "{unseen:?}");
    for (number, value) in [Vec::new(), b"x".to_vec(), vec![7; 16], vec![7; 40], vec![255; 60]].iter().enumerate() {
        for name in [b"8 bytes.".to_vec(), Vec::new()] {
            let mut tampered = Tampered::new(&redis, &format!("field-{number}-{}", name.len())).await;
            let name = if name.is_empty() { tampered.mine() } else { name };
            tampered.overwrite(&name, value);
            tampered.forget_what_was_written();
            assert_eq!(tampered.go_on(&format!("{name:?} as {value:?}")).await, (LEFT, 1), "{name:?} {value:?}");
        }
    }
}

#[tokio::test]
async fn inconsistent_account_state_resets_the_limiter() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    let mut limits = spec(&[("all", 90, 20_000), ("mine", 5, 20_000)]);
    limits.limits[1].scope = sluicegate::domain::limit::Scope::Account;
    let subjects = limits.subjects(Some("a"), None).unwrap();
    let want = |permits| PermitRequest { subjects: subjects.clone(), ..PermitRequest::charges(permits, 1) };
    let started = async |prefix: &str, is_answered: bool| {
        let limiter: Arc<dyn Limiter> = Arc::new(RedisLimiter::new(&redis.url(), prefix).unwrap());
        let mut caller = Caller::warm(&limiter, limits.clone()).await;
        assert_eq!(caller.ask(&[want(3)]).await.permits(), 3);
        let answered = PermitRelease { subjects: subjects.clone(), ..used(caller.number, 3, 0) };
        caller.settle(is_answered.then_some(answered).into_iter().collect(), &[]).await;
        (caller, subject_key(prefix, &limits, &subjects[0]))
    };
    // Behind the 29 bytes of the subject and the 26 of its counter: uses at 62, permits in flight at 36.
    for (at, is_answered) in [(62, true), (36, false), (82, true)] {
        for value in [0, 1, 200] {
            let (mut caller, key) = started(&format!("account-{at}-{value}"), is_answered).await;
            let mut state: Vec<u8> = redis::cmd("HGET").arg(&key).arg("m").query(&mut connection).unwrap();
            if state[at] == value {
                continue;
            }
            state[at] = value;
            redis::cmd("HSET").arg(&key).arg("m").arg(state).exec(&mut connection).unwrap();
            let mut outcomes = Vec::new();
            for _ in 0..2 {
                caller.number += 1;
                outcomes.push(caller.repeat_for(vec![want(5)]).await.map(|reply| (reply.permits(), reply.refused)));
            }
            let too_many = outcomes.iter().flatten().any(|(permits, _)| *permits > 2);
            assert!(!too_many && outcomes[1].is_ok(), "{at} as {value}: {outcomes:?}");
        }
    }
    for value in [Vec::new(), b"x".to_vec(), vec![7; 50], vec![255; 140]] {
        let (mut caller, key) = started(&format!("account-text-{}", value.len()), true).await;
        redis::cmd("HSET").arg(&key).arg("m").arg(&value).exec(&mut connection).unwrap();
        let error = caller.try_call(&[]).await.err();
        assert!(error.is_none(), "a call for no account ignores a damaged account: {error:?}");
        caller.number += 1;
        if let Err(error) = caller.repeat_for(vec![want(5)]).await {
            assert!(error.to_string().contains("DAMAGED"), "{value:?}: {error}");
        }
        caller.number += 1;
        let then = caller.repeat_for(vec![want(5)]).await;
        assert!(then.is_ok(), "{value:?}: {then:?}");
    }
}
