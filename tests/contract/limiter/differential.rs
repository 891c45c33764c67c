//! The Rust specification and the Lua script give equal replies on random histories, for all algorithms.
//!
//! A history with a difference is shrunk to the shortest one that still differs, and printed.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::limit::{AccountRule, Algorithm, AppliesTo, Rate, Rule, Scope};
use sluicegate::domain::limit_usage::LimitUsage;
use sluicegate::domain::permit_protocol::{SubjectHistory, SubjectLimit, UsageHistory};
use sluicegate::domain::quota::Quota;
use sluicegate::limiter::redis::client::{PeekRow, decode_peek, encode_peek};
use sluicegate::limiter::redis::decode::decode_reply;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::keys::call_keys;
use sluicegate::limiter::redis::library::{Library, SOURCE};

use super::*;
use crate::support::redis::Redis;

mod history;
mod lifetimes;

use history::{Plan, PlannedLimit, PlannedPast, PlannedSeeds, PlannedWant, Step, plan};

const START_US: u64 = 1_800_000_000_000_000;
const CALLERS: usize = 3;
/// Number of histories of one test; the environment variable `HISTORIES` overrides it.
const HISTORIES: u32 = 250;

/// The Lua function, with its clock read from a key, so that both sides see the same instants.
pub(super) struct LuaSide {
    connection: redis::Connection,
    library: Library,
    prefix: String,
}

impl LuaSide {
    pub(super) fn new(prefix: &str) -> Self {
        let clock = "local clock = tonumber(redis.call('GET', keys[1] .. ':clock'))";
        // Small chunks, so that short histories fill many.
        let mut source = SOURCE.to_owned();
        let replaced = [("local clock = clock_us()", clock, 2), ("CHUNK_BYTES = 64", "CHUNK_BYTES = 24", 1)];
        for (found, instead, times) in replaced {
            assert_eq!(source.matches(found).count(), times, "{found}");
            source = source.replace(found, instead);
        }
        let library = Library::new(&source);
        let mut connection = Redis::shared().connection();
        Redis::load(&library, &mut connection);
        Self { connection, library, prefix: prefix.to_owned() }
    }

    pub(super) fn call(&mut self, now: Micros, spec: &QuotaSpec, call: &LimiterCall) -> LimiterReply {
        let keys = call_keys(&self.prefix, spec, call);
        let mut both = redis::pipe();
        both.cmd("SET").arg(format!("{}:clock", keys[0])).arg(now.0).ignore();
        both.add_command(self.library.call(&keys, &encode_call(spec, call)));
        let (answer,): (Vec<u8>,) = both.query(&mut self.connection).unwrap();
        decode_reply(&answer, spec.limits.len(), spec.provider_limits().len(), call.requests.len()).unwrap()
    }

    /// The usage of the limits, of the provider or of one subject.
    pub(super) fn peek(&mut self, now: Micros, spec: &QuotaSpec, subject: Option<&Subject>) -> Vec<LimitUsage> {
        let (keys, names) = encode_peek(&self.prefix, spec, subject);
        let mut both = redis::pipe();
        both.cmd("SET").arg(format!("{}:clock", keys[0])).arg(now.0).ignore();
        both.add_command(self.library.peek(&keys, &names));
        let (found,): (Vec<PeekRow>,) = both.query(&mut self.connection).unwrap();
        decode_peek(spec, subject, &found)
    }
}

/// The same from the Rust specification.
pub(super) fn standings(quota: &Quota, now: Micros, spec: &QuotaSpec, subject: Option<&Subject>) -> Vec<LimitUsage> {
    let all = quota.usage(now, spec, subject);
    let provider = quota.usage(now, spec, None).len();
    if subject.is_some() { all[provider..].to_vec() } else { all }
}

impl Drop for LuaSide {
    fn drop(&mut self) {
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(format!("{}:*", self.prefix)).query(&mut self.connection).unwrap_or_default();
        if !keys.is_empty() {
            redis::cmd("DEL").arg(keys).exec(&mut self.connection).unwrap();
        }
    }
}

/// A permit that was granted and not released.
#[derive(Clone)]
struct Open {
    caller: usize,
    call: u64,
    cost: u32,
    kind: CallKind,
    subjects: Vec<Subject>,
    origins: Vec<u64>,
}

/// Both limiters, and the state of their callers.
struct Life {
    twin: Quota,
    lua: LuaSide,
    now: Micros,
    current: QuotaSpec,
    run: u32,
    numbers: [u64; CALLERS],
    last_calls: [Option<(QuotaSpec, LimiterCall)>; CALLERS],
    open: Vec<Open>,
    born: Micros,
    last_run_id: String,
}

fn spec_of(version: i64, limits: &[PlannedLimit], plan: &Plan) -> QuotaSpec {
    let mut limits: Vec<LimitSpec> = limits
        .iter()
        .enumerate()
        .map(|(index, limit)| LimitSpec {
            name: format!("limit-{}", limit.name),
            algorithm: limit.algorithm,
            // The first limit counts for the provider, because a quota without such a limit is invalid.
            scope: if index == 0 { Scope::Provider } else { limit.scope },
            applies_to: if index == 0 { AppliesTo::All } else { limit.applies_to },
            shadow: index > 0 && limit.shadow,
            max_requests: limit.max_requests,
            window: match limit.algorithm {
                Algorithm::Concurrency => Duration::ZERO,
                _ => Duration::from_millis(limit.window_ms),
            },
            offset: Duration::from_millis(7),
            burst: matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra).then_some(limit.burst),
        })
        .collect();
    limits.sort_by(|a, b| a.name.cmp(&b.name));
    limits.dedup_by(|a, b| a.name == b.name);
    if limits.iter().all(|limit| limit.scope != Scope::Provider) {
        limits[0].scope = Scope::Provider;
    }
    QuotaSpec {
        version,
        pacing: plan.pacing,
        limits,
        grant_jitter: plan.jitter.then_some(Duration::from_millis(30)),
        hold_max: Duration::from_millis(500),
        // Rows join and leave, and the send budget changes.
        members: ["acme", "acme-eu"].into_iter().take(1 + usize::from(version % 4 > 1)).map(name_of).collect(),
        send_budget: Duration::from_millis(if version % 5 < 2 { 20 } else { 90 }),
        resumed_at: u64::try_from(version / 4).unwrap(),
        handover: Duration::from_millis(40),
        account_rules: if version % 3 == 0 { vec![slow("1")] } else { Vec::new() },
        ..spec(&[])
    }
}

fn name_of(name: &str) -> ProviderName {
    ProviderName::new(name).unwrap()
}

/// Past uses with two charges, or a look-up, among them.
fn past_uses(ages_ms: &[u64]) -> Vec<PastUse> {
    let past = |age_ms: &u64| PastUse {
        age: Duration::from_millis(*age_ms),
        cost: CostByKind {
            charges: 1 + u32::from(age_ms.is_multiple_of(5)),
            lookups: u32::from(age_ms.is_multiple_of(3)),
        },
    };
    ages_ms.iter().map(past).collect()
}

/// A rule with a longer window than most limits.
fn slow(account: &str) -> AccountRule {
    AccountRule { account: account.to_owned(), limit: None, rule: Rule::Limit("3/31s".parse::<Rate>().unwrap().into()) }
}

impl Life {
    fn new(prefix: &str, plan: &Plan) -> Self {
        Self {
            twin: Quota::default(),
            lua: LuaSide::new(prefix),
            now: Micros(START_US),
            current: spec_of(10, &plan.limits, plan),
            run: 0,
            numbers: [0; CALLERS],
            last_calls: [const { None }; CALLERS],
            open: Vec::new(),
            born: Micros(0),
            last_run_id: String::new(),
        }
    }

    /// The call of a step, if it makes one.
    fn call_of(&mut self, step: &Step, plan: &Plan) -> Option<(usize, QuotaSpec, LimiterCall)> {
        match step {
            Step::Advance { us } => {
                self.now.0 += us;
                None
            }
            Step::Back { us } => {
                self.now.0 -= us;
                None
            }
            Step::Change { limits } => {
                self.current = spec_of(self.current.version + 1, limits, plan);
                self.open.iter_mut().for_each(|permit| {
                    permit.origins.clear();
                    permit.subjects.clear();
                });
                None
            }
            Step::Restart => {
                // Two states never begin at the same instant.
                self.now.0 += 1;
                self.run += 1;
                None
            }
            Step::Repeat { caller } => {
                // Another process of the store may answer it, and two states never begin at the same instant.
                self.now.0 += 1;
                self.last_calls[*caller].clone().map(|(spec, call)| (*caller, spec, call))
            }
            Step::Overtaken { caller } => {
                self.now.0 += 1;
                let (spec, call) = self.last_calls[*caller].clone().filter(|(_, call)| call.number > 1)?;
                Some((*caller, spec, LimiterCall { number: call.number - 1, ..call }))
            }
            Step::OldSettings { caller } => {
                let old = QuotaSpec { version: self.current.version - 1, ..self.current.clone() };
                // A limiter that has not yet seen the current settings does not treat these as old. Then this is an
                // ordinary call, and its number is used up.
                Some((*caller, old, self.new_call(*caller, vec![PermitRequest::charges(1, 1)])))
            }
            Step::Call { caller, wants, settle, pause_ms, rebuild, seeds, distrust } => {
                let wants = wants.iter().map(|want| self.want(want)).collect();
                let mut call = self.new_call(*caller, wants);
                call.pause = (*pause_ms > 0).then(|| Duration::from_millis(*pause_ms));
                call.rebuild = rebuild.as_ref().map(|(ages_ms, open)| RebuildData {
                    state_epoch: self.born,
                    ended: past_uses(ages_ms),
                    in_flight: CostByKind { charges: open.0, lookups: open.1 },
                });
                call.seeds = seeds.as_ref().map(|seeds| self.seeds(seeds));
                self.now.0 += u64::from(*distrust);
                call.invalidate_epoch = distrust.then_some(self.born);
                call.releases = self.settle_some(*caller, settle);
                self.last_calls[*caller] = Some((self.current.clone(), call.clone()));
                Some((*caller, self.current.clone(), call))
            }
        }
    }

    fn want(&self, want: &PlannedWant) -> PermitRequest {
        let kind = if want.lookup { CallKind::Lookup } else { CallKind::Charge };
        let own = |scope: Scope, name: &Option<u8>| {
            let key = format!("{}:{}", scope.name(), name.as_ref()?);
            let limits: Vec<SubjectLimit> = (0..self.current.limits.len())
                .filter(|index| self.current.limits[*index].scope == scope)
                .map(|index| {
                    let limit = &self.current.limits[index];
                    let ruled = scope == Scope::Account && *name == Some(1) && !self.current.account_rules.is_empty();
                    if ruled {
                        return SubjectLimit {
                            index,
                            max_requests: 3,
                            window: 31 * SECOND,
                            burst: limit.burst,
                            exempt: false,
                        };
                    }
                    // One of the accounts has a higher limit.
                    let more = u32::from(*name == Some(1));
                    // Another one is exempt under every second version.
                    let exempt = scope == Scope::Account && *name == Some(2) && self.current.version % 2 == 0;
                    SubjectLimit {
                        index,
                        max_requests: limit.max_requests + more,
                        window: limit.window,
                        burst: limit.burst.map(|burst| burst + more),
                        exempt,
                    }
                })
                .collect();
            (!limits.is_empty()).then_some(Subject { key, limits })
        };
        let subjects = [own(Scope::Account, &want.account), own(Scope::Reference, &want.reference)];
        PermitRequest {
            permits: want.permits,
            cost: want.cost,
            kind,
            subjects: subjects.into_iter().flatten().collect(),
        }
    }

    fn seeds(&self, seeds: &PlannedSeeds) -> CounterSeeds {
        let history = |past: &PlannedPast| UsageHistory {
            as_of: Micros(self.now.0 - past.as_of_us),
            within: Duration::from_millis(past.within_ms),
            ended: past_uses(&past.ages_ms),
            in_flight: CostByKind { charges: past.open.0, lookups: past.open.1 },
        };
        let subject = |(is_account, name, past): &(bool, u8, PlannedPast)| {
            let (account, reference) = if *is_account { (Some(*name), None) } else { (None, Some(*name)) };
            let want = PlannedWant { permits: 1, cost: 1, lookup: false, account, reference };
            let subject = self.want(&want).subjects.pop()?;
            Some(SubjectHistory { subject, history: history(past) })
        };
        let subjects = seeds.subjects.iter().filter_map(subject).collect();
        CounterSeeds { state_epoch: self.born, provider: seeds.provider.as_ref().map(history), subjects }
    }

    fn new_call(&mut self, caller: usize, wants: Vec<PermitRequest>) -> LimiterCall {
        self.numbers[caller] += 1;
        LimiterCall {
            incarnation: caller as u64 + 1,
            number: self.numbers[caller],
            requests: wants,
            releases: Vec::new(),
            pause: None,
            rebuild: None,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: Duration::from_millis([250, 60, 0, 999][self.numbers[caller] as usize % 4]),
            run_id: format!("{:040}", self.run),
        }
    }

    /// Releases permits of a caller, picked by position among the open ones.
    fn settle_some(&mut self, caller: usize, settle: &[(usize, Option<u64>)]) -> Vec<PermitRelease> {
        let mut settlements = Vec::new();
        for (position, age) in settle {
            let mine: Vec<usize> = (0..self.open.len()).filter(|i| self.open[*i].caller == caller).collect();
            let Some(&position) = mine.get(position % mine.len().max(1)) else { break };
            let permit = self.open.remove(position);
            let fate = match age {
                Some(us) => ReleaseKind::Used { age: Duration::from_micros(*us) },
                None => ReleaseKind::Unused { origins: permit.origins },
            };
            let Open { call, cost, kind, subjects, .. } = permit;
            settlements.push(PermitRelease { call, cost, kind, subjects, release_kind: fate });
        }
        settlements
    }

    fn keep(&mut self, caller: usize, call: &LimiterCall, reply: &LimiterReply) {
        for run in &reply.grants {
            let want = &call.requests[run.request_index];
            for _ in 0..run.permits {
                self.open.push(Open {
                    caller,
                    call: call.number,
                    cost: want.cost,
                    kind: want.kind,
                    subjects: want.subjects.clone(),
                    origins: run.origins.clone(),
                });
            }
        }
    }
}

/// Plays one history on both sides; the first difference ends it. Returns the number of permits granted.
fn run_history(prefix: &str, plan: &Plan) -> Result<u64, TestCaseError> {
    let mut life = Life::new(prefix, plan);
    let mut granted = 0;
    for step in &plan.steps {
        let Some((caller, spec, call)) = life.call_of(step, plan) else { continue };
        // A call from before a restart that is repeated after it also begins a state. Two states never begin at one
        // instant.
        life.now.0 += u64::from(life.last_run_id != call.run_id);
        life.last_run_id.clone_from(&call.run_id);
        let expected = life.twin.call(life.now, &spec, &call);
        let got = life.lua.call(life.now, &spec, &call);
        prop_assert_eq!(&got, &expected, "at {} on {:#?} with {:#?}", life.now.0 as i64 - START_US as i64, call, spec);
        life.born = expected.state_epoch;
        // Only after every fourth call, because a peek costs as much as a call.
        let subjects = call.requests.iter().flat_map(|want| want.subjects.iter().map(Some));
        for subject in subjects.chain([None]).filter(|_| call.number % 4 == 0) {
            let counted = standings(&life.twin, life.now, &spec, subject);
            let looked = life.lua.peek(life.now, &spec, subject);
            prop_assert_eq!(looked, counted, "peek of {:?} after {:#?} with {:#?}", subject, call, spec);
        }
        granted += expected.permits();
        if matches!(step, Step::Call { .. }) {
            life.keep(caller, &call, &expected);
        }
    }
    Ok(granted)
}

fn differential(name: &str, algorithms: &'static [Algorithm], jitter: bool) {
    let histories = std::env::var("HISTORIES").map_or(HISTORIES, |text| text.parse().unwrap());
    let (history, granted) = (Cell::new(0_u64), Cell::new(0_u64));
    let mut runner = TestRunner::new(Config { cases: histories, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&plan(algorithms, jitter), |plan| {
        history.set(history.get() + 1);
        let permits = run_history(&format!("{name}-{}", history.get()), &plan)?;
        granted.set(granted.get() + permits);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    assert!(granted.get() > u64::from(histories), "only {} permits were granted", granted.get());
}

macro_rules! lua_and_rust_agree {
    ($($test:ident: $algorithms:expr, $jitter:expr;)+) => {
        $(#[test] fn $test() { differential(stringify!($test), &$algorithms, $jitter) })+
    };
}

lua_and_rust_agree! {
    sliding_log_held_until_the_answer: [Algorithm::SlidingLog], false;
    sliding_log_freed_by_the_start: [Algorithm::SlidingLog], true;
    sliding_window: [Algorithm::SlidingWindow], false;
    fixed_window: [Algorithm::FixedWindow], false;
    token_bucket: [Algorithm::TokenBucket], false;
    gcra: [Algorithm::Gcra], false;
    concurrency: [Algorithm::Concurrency], false;
    concurrency_beside_logs_of_starts: [Algorithm::Concurrency, Algorithm::SlidingLog], true;
    all_algorithms_together: Algorithm::ALL, false;
}
