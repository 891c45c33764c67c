//! The Rust specification and the Lua script give the same answers on random histories.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::decision::{Call, Fate, LimitSpec, QuotaSpec, Reply, Settlement};
use sluicegate::domain::provider::ProviderName;
use sluicegate::domain::sliding_log::Carousel;
use sluicegate::domain::time::Micros;
use sluicegate::limiter::redis::keys::call_keys;
use sluicegate::limiter::redis::script::{SLIDING_LOG, arguments, parse_reply};

use crate::support::redis::Redis;

const START_US: u64 = 1_800_000_000_000_000;

/// One step of a history; permits to settle are picked by position among those still open.
#[derive(Clone, Debug)]
enum Step {
    Advance { us: u64 },
    Call { caller: u64, wants: Vec<u32>, settle: Vec<(usize, Option<u64>)>, pause_ms: u64, warm: bool },
    Repeat { caller: u64 },
    Overtaken { caller: u64 },
    Change { limits: Vec<(u8, u32, u64)> },
    OldSettings { caller: u64 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let age = prop_oneof![1 => Just(None), 4 => (0_u64..400_000).prop_map(Some)];
    let settle = prop::collection::vec((any::<usize>(), age), 0..4);
    let wants = prop::collection::vec(prop_oneof![6 => Just(1_u32), 1 => 2_u32..6], 0..6);
    let pause = prop_oneof![20 => Just(0_u64), 1 => 1_u64..500];
    let call = (0_u64..3, wants, settle, pause, any::<bool>())
        .prop_map(|(caller, wants, settle, pause_ms, warm)| Step::Call { caller, wants, settle, pause_ms, warm });
    let limit = (0_u8..3, 0_u32..8, prop_oneof![Just(50_u64), Just(400), Just(1_000)]);
    prop_oneof![
        10 => prop_oneof![0_u64..3_000, 0_u64..400_000, Just(2_000_000)].prop_map(|us| Step::Advance { us }),
        20 => call,
        2 => (0_u64..3).prop_map(|caller| Step::Repeat { caller }),
        1 => (0_u64..3).prop_map(|caller| Step::Overtaken { caller }),
        1 => prop::collection::vec(limit, 1..3).prop_map(|limits| Step::Change { limits }),
        1 => (0_u64..3).prop_map(|caller| Step::OldSettings { caller }),
        1 => Just(Step::Restart),
    ]
}

fn spec(quota: &str, version: i64, limits: &[(u8, u32, u64)], jitter: bool) -> QuotaSpec {
    let mut limits: Vec<LimitSpec> = limits
        .iter()
        .map(|(name, max_requests, window_ms)| LimitSpec {
            name: format!("limit-{name}"),
            max_requests: *max_requests,
            window: Duration::from_millis(*window_ms),
        })
        .collect();
    limits.sort_by(|a, b| a.name.cmp(&b.name));
    limits.dedup_by(|a, b| a.name == b.name);
    QuotaSpec {
        quota: ProviderName::new(quota).unwrap(),
        version,
        limits,
        grant_jitter: jitter.then_some(Duration::from_millis(30)),
        hold_max: Duration::from_millis(500),
        send_budget: Duration::from_millis(100),
    }
}

/// The script with its clock replaced by a key, so that both sides live through the same instants.
struct LuaSide {
    connection: redis::Connection,
    script: redis::Script,
    prefix: String,
}

impl LuaSide {
    fn new(prefix: &str) -> Self {
        let clock = "(function() local t = tonumber(redis.call('GET', KEYS[1] .. ':clock')) \
                     return { math.floor(t / 1000000), t % 1000000 } end)()";
        assert_eq!(SLIDING_LOG.matches("redis.call('TIME')").count(), 1);
        let script = redis::Script::new(&SLIDING_LOG.replace("redis.call('TIME')", clock));
        Self { connection: Redis::shared().connection(), script, prefix: prefix.to_owned() }
    }

    fn call(&mut self, now: Micros, spec: &QuotaSpec, call: &Call) -> Reply {
        let keys = call_keys(&self.prefix, spec);
        redis::cmd("SET").arg(format!("{}:clock", keys[0])).arg(now.0).exec(&mut self.connection).unwrap();
        let mut invocation = self.script.prepare_invoke();
        keys.iter().for_each(|key| {
            invocation.key(key);
        });
        arguments(spec, call).into_iter().for_each(|argument| {
            invocation.arg(argument);
        });
        let numbers: Vec<i64> = invocation.invoke(&mut self.connection).unwrap();
        parse_reply(&numbers, spec.limits.len()).unwrap()
    }
}

/// A permit that was granted and not settled.
#[derive(Clone)]
struct Open {
    caller: u64,
    call: u64,
    cost: u32,
    origins: Vec<u64>,
}

/// Lives through one history on both sides; the first difference ends it.
fn run_history(prefix: &str, jitter: bool, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut twin = Carousel::default();
    let mut lua = LuaSide::new(prefix);
    let mut now = Micros(START_US);
    let mut current = spec("q", 10, &[(0, 3, 400), (1, 5, 1_000)], jitter);
    let mut run = 0;
    let mut numbers = [0_u64; 3];
    let mut last_calls: [Option<(QuotaSpec, Call)>; 3] = [None, None, None];
    let mut open: Vec<Open> = Vec::new();
    let mut born = Micros(0);
    for step in steps {
        let (caller, spec, call) = match step {
            Step::Advance { us } => {
                now.0 += us;
                continue;
            }
            Step::Change { limits } => {
                current = self::spec("q", current.version + 1, limits, jitter);
                open.iter_mut().for_each(|permit| permit.origins.clear());
                continue;
            }
            Step::Restart => {
                run += 1;
                continue;
            }
            Step::Repeat { caller } => match &last_calls[*caller as usize] {
                Some((spec, call)) => (*caller, spec.clone(), call.clone()),
                None => continue,
            },
            Step::Overtaken { caller } => match &last_calls[*caller as usize] {
                Some((spec, call)) if call.number > 1 => {
                    (*caller, spec.clone(), Call { number: call.number - 1, ..call.clone() })
                }
                _ => continue,
            },
            Step::OldSettings { caller } => {
                let old = QuotaSpec { version: current.version - 1, ..current.clone() };
                // Settings that the limiter has not been told of are not old to it: then this is a call like any other,
                // and its number is used up.
                numbers[*caller as usize] += 1;
                (*caller, old, new_call(*caller, numbers[*caller as usize], run))
            }
            Step::Call { caller, wants, settle, pause_ms, warm } => {
                numbers[*caller as usize] += 1;
                let mut call = new_call(*caller, numbers[*caller as usize], run);
                call.wants.clone_from(wants);
                call.pause = (*pause_ms > 0).then(|| Duration::from_millis(*pause_ms));
                call.warm = warm.then_some(born);
                call.settlements = settle_some(&mut open, *caller, settle);
                last_calls[*caller as usize] = Some((current.clone(), call.clone()));
                (*caller, current.clone(), call)
            }
        };
        let expected = twin.call(now, &spec, &call);
        let got = lua.call(now, &spec, &call);
        prop_assert_eq!(&got, &expected, "at {} on {:?} with {:?}", now.0 - START_US, call, spec);
        born = expected.born;
        if matches!(step, Step::Call { .. }) && !jitter {
            let mut costs = call.wants.iter();
            for granted in &expected.granted {
                for cost in costs.by_ref().take(granted.permits) {
                    open.push(Open { caller, call: call.number, cost: *cost, origins: granted.origins.clone() });
                }
            }
        }
    }
    Ok(())
}

/// Settles permits of a caller, picked by position among those still open.
fn settle_some(open: &mut Vec<Open>, caller: u64, settle: &[(usize, Option<u64>)]) -> Vec<Settlement> {
    let mut settlements = Vec::new();
    for (position, age) in settle {
        let mine: Vec<usize> = (0..open.len()).filter(|i| open[*i].caller == caller).collect();
        let Some(&position) = mine.get(position % mine.len().max(1)) else { break };
        let permit = open.remove(position);
        let fate = match age {
            Some(us) => Fate::Used { age: Duration::from_micros(*us) },
            None => Fate::NotSent { origins: permit.origins },
        };
        settlements.push(Settlement { call: permit.call, cost: permit.cost, fate });
    }
    settlements
}

fn new_call(incarnation: u64, number: u64, run: u32) -> Call {
    Call {
        incarnation,
        number,
        wants: vec![1],
        settlements: Vec::new(),
        pause: None,
        warm: None,
        run_id: format!("run{run}"),
    }
}

fn differential(name: &str, jitter: bool) {
    let history = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 1_000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&prop::collection::vec(step(), 1..60), |steps| {
        history.set(history.get() + 1);
        run_history(&format!("{name}-{}", history.get()), jitter, &steps)
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[test]
fn lua_and_rust_agree_when_slots_are_held_until_the_answer() {
    differential("held", false);
}

#[test]
fn lua_and_rust_agree_when_slots_are_freed_by_the_start() {
    differential("granted", true);
}
