//! Every interleaving of a small world: two workers with up to two jobs each, a store, a provider, and at every step a
//! crash, or a worker that does nothing for as long as it likes. Explored to the end, on the state machine itself.
//!
//! A step is one of: a call is made, its reply is heard, a permit begins or is given back, a request is counted at the
//! provider, its answer is read, a worker crashes, time goes on. None has to happen, so a worker that is frozen, an answer
//! that never comes and a lease that runs out are all among them. `WHOLE_MODEL=1` explores the largest, too.

use std::collections::HashSet;

use sluicegate::domain::quota::Quota;

use super::*;

mod identity;

use identity::identity;

const START_US: u64 = 1_800_000_000_000_000;
const TICK_US: u64 = 200_000;
const WINDOW_MS: u64 = 200;
const SEND_BUDGET_US: u64 = 200_000;
const TIMEOUT_US: u64 = 200_000;

/// The rules as they are, or with one of them broken: then a breach must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rules {
    Kept,
    /// The slot is freed by the start, not by the answer.
    SettledAtBegin,
    /// The lease does not last as long as the request may.
    NoHold,
    /// A permit is used after its send budget.
    BegunLate,
    /// What may have been sent is given back.
    TimeoutIsNotSent,
}

#[derive(Clone, Debug)]
struct Permit {
    call: u64,
    origins: Vec<u64>,
    start_us: u64,
    use_before_us: u64,
    answer_before_us: u64,
}

#[derive(Clone, Debug)]
enum Fate {
    Answered(u64),
    NotSent(Vec<u64>),
}

/// A reply on its way.
#[derive(Clone, Debug)]
struct Unheard {
    departed_us: u64,
    call: u64,
    /// Waits and origins of the permits.
    granted: Vec<(u64, Vec<u64>)>,
}

#[derive(Clone, Debug)]
struct Worker {
    incarnation: u64,
    calls: u64,
    /// Jobs that have not begun, those with a permit among them.
    jobs: u32,
    unheard: Option<Unheard>,
    hands: Vec<Permit>,
    settled: Vec<(u64, Fate)>,
}

/// A request on the wire, and who waits for its answer.
#[derive(Clone, Debug)]
struct Request {
    permit: Permit,
    waits: Option<usize>,
    count_before_us: u64,
    is_counted: bool,
}

#[derive(Clone, Debug)]
struct World {
    quota: Quota,
    now_us: u64,
    workers: [Worker; 2],
    wire: Vec<Request>,
    counted_us: Vec<u64>,
    incarnations: u64,
    crashes_left: u32,
    /// Permits that are given back in time.
    returns_left: u32,
}

struct Explorer {
    spec: QuotaSpec,
    rules: Rules,
    window_us: u64,
    seen: HashSet<u128>,
    /// Most counted within one window.
    most: usize,
    breach: Option<World>,
}

impl Explorer {
    fn new(limit: u32, rules: Rules) -> Self {
        let hold_us = if rules == Rules::NoHold { 0 } else { SEND_BUDGET_US + TIMEOUT_US };
        let spec = QuotaSpec {
            hold_max: Duration::from_micros(hold_us),
            send_budget: Duration::from_micros(SEND_BUDGET_US),
            ..spec(&[("all", limit, WINDOW_MS)])
        };
        let window_us = padded_us(&spec, 0);
        Self { spec, rules, window_us, seen: HashSet::new(), most: 0, breach: None }
    }

    fn world(&self, Size { jobs, crashes, returns }: Size) -> World {
        let mut quota = Quota::default();
        let call = |number, rebuild| Call {
            incarnation: 9,
            number,
            wants: Vec::new(),
            settlements: Vec::new(),
            pause: None,
            rebuild,
            distrust: None,
            run_id: "run".to_owned(),
        };
        let long_ago = Micros(START_US - 10_000_000);
        let cold = quota.call(long_ago, &self.spec, &call(1, None));
        quota.call(long_ago, &self.spec, &call(2, Some(forgotten_nothing(cold.born))));
        let worker =
            |incarnation| Worker { incarnation, calls: 0, jobs, unheard: None, hands: Vec::new(), settled: Vec::new() };
        World {
            quota,
            now_us: START_US,
            workers: [worker(1), worker(2)],
            wire: Vec::new(),
            counted_us: Vec::new(),
            incarnations: 2,
            crashes_left: crashes,
            returns_left: returns,
        }
    }

    /// Depth first, each world once.
    fn explore(&mut self, from: World) {
        let mut open = vec![from];
        while let Some(world) = open.pop() {
            if !self.seen.insert(identity(&world)) {
                continue;
            }
            self.most = self.most.max(world.counted_us.len());
            if world.is_breached(u64::from(self.spec.limits[0].max_requests), self.window_us) {
                self.breach = Some(world);
                return;
            }
            self.steps(&world, &mut open);
        }
    }

    fn steps(&self, world: &World, next: &mut Vec<World>) {
        for number in 0..2 {
            let worker = &world.workers[number];
            if worker.unheard.is_some() {
                next.push(self.heard(world, number));
            } else if (worker.jobs > 0 && worker.hands.is_empty()) || !worker.settled.is_empty() {
                next.extend(self.asked(world, number));
            }
            for at in 0..worker.hands.len() {
                let permit = &worker.hands[at];
                if world.now_us >= permit.start_us {
                    next.push(self.begun(world, number, at));
                }
                if world.returns_left > 0 {
                    next.push(given_back(world, number, at));
                }
            }
            if world.crashes_left > 0 && worker.calls > 0 {
                next.push(crashed(world, number));
            }
        }
        for at in 0..world.wire.len() {
            let request = &world.wire[at];
            if !request.is_counted && world.now_us <= request.count_before_us {
                next.push(counted(world, at));
            }
            if request.is_counted && request.waits.is_some() && world.now_us <= request.permit.answer_before_us {
                next.push(self.answered(world, at));
            }
            if self.rules == Rules::TimeoutIsNotSent && !request.is_counted && request.waits.is_some() {
                next.push(timed_out(world, at));
            }
        }
        next.push(self.later(world));
    }

    /// One that settles nothing and is granted nothing changes nothing.
    fn asked(&self, world: &World, number: usize) -> Option<World> {
        let mut world = world.clone();
        let now_us = world.now_us;
        let worker = &mut world.workers[number];
        worker.calls += 1;
        let wanted = u32::from(worker.jobs > 0 && worker.hands.is_empty());
        let told = std::mem::take(&mut worker.settled);
        let settlements = told.iter().map(|(call, fate)| match fate {
            Fate::Answered(at_us) => used(*call, 1, now_us - at_us),
            Fate::NotSent(origins) => not_sent(*call, 1, origins),
        });
        let call = Call {
            incarnation: worker.incarnation,
            number: worker.calls,
            wants: if wanted > 0 { vec![Want::charges(wanted, 1)] } else { Vec::new() },
            settlements: settlements.collect(),
            pause: None,
            rebuild: None,
            distrust: None,
            run_id: "run".to_owned(),
        };
        let reply = world.quota.call(Micros(now_us), &self.spec, &call);
        // A repeat of the call, whenever it comes, says the same and changes nothing that counts.
        debug_assert_eq!(world.quota.clone().call(Micros(now_us), &self.spec, &call), reply);
        let granted = permits(&call, &reply).into_iter().map(|(_, wait_us, origins)| (wait_us, origins)).collect();
        if told.is_empty() && reply.granted.is_empty() {
            return None;
        }
        worker.unheard = Some(Unheard { departed_us: now_us, call: worker.calls, granted });
        Some(world)
    }

    fn heard(&self, world: &World, number: usize) -> World {
        let mut world = world.clone();
        let now_us = world.now_us;
        let worker = &mut world.workers[number];
        let Some(Unheard { departed_us, call, granted }) = worker.unheard.take() else { return world };
        worker.hands.extend(granted.into_iter().map(|(wait_us, origins)| Permit {
            call,
            origins,
            start_us: now_us + wait_us,
            use_before_us: departed_us + wait_us + SEND_BUDGET_US,
            answer_before_us: departed_us + wait_us + SEND_BUDGET_US + TIMEOUT_US,
        }));
        self.give_back_late(&mut world);
        world
    }

    /// The next tick, or the start of a permit before it. What can no longer happen is forgotten.
    fn later(&self, world: &World) -> World {
        let mut world = world.clone();
        let tick_us = (world.now_us - START_US) / TICK_US * TICK_US + TICK_US + START_US;
        let starts = world.workers.iter().flat_map(|worker| &worker.hands).map(|permit| permit.start_us);
        world.now_us = starts.filter(|at_us| *at_us > world.now_us).min().map_or(tick_us, |at_us| at_us.min(tick_us));
        let now_us = world.now_us;
        world.counted_us.retain(|at_us| now_us - at_us < self.window_us);
        world.wire.retain(|request| {
            let counts = !request.is_counted && now_us <= request.count_before_us;
            let answers = request.is_counted && request.waits.is_some() && now_us <= request.permit.answer_before_us;
            counts || answers
        });
        self.give_back_late(&mut world);
        world
    }

    /// A permit whose time has passed goes back with the next call. When none is left to give back, its job ends with it:
    /// else the world would have no end.
    fn give_back_late(&self, world: &mut World) {
        let now_us = world.now_us;
        let returns_left = &mut world.returns_left;
        for worker in world.workers.iter_mut().filter(|_| self.rules != Rules::BegunLate) {
            let (late, hands) = worker.hands.drain(..).partition(|permit| now_us > permit.use_before_us);
            worker.hands = hands;
            let late: Vec<Permit> = late;
            for permit in late {
                if *returns_left > 0 {
                    *returns_left -= 1;
                    worker.settled.push((permit.call, Fate::NotSent(permit.origins)));
                } else {
                    worker.jobs -= 1;
                }
            }
        }
    }

    fn begun(&self, world: &World, number: usize, at: usize) -> World {
        let mut world = world.clone();
        let now_us = world.now_us;
        let worker = &mut world.workers[number];
        worker.jobs -= 1;
        let permit = worker.hands.remove(at);
        if self.rules == Rules::SettledAtBegin {
            worker.settled.push((permit.call, Fate::Answered(now_us)));
        }
        let count_before_us = now_us + TIMEOUT_US;
        world.wire.push(Request { permit, waits: Some(number), count_before_us, is_counted: false });
        world
    }

    fn answered(&self, world: &World, at: usize) -> World {
        let mut world = world.clone();
        let request = world.wire.remove(at);
        if let Some(number) = request.waits
            && self.rules != Rules::SettledAtBegin
        {
            world.workers[number].settled.push((request.permit.call, Fate::Answered(world.now_us)));
        }
        world
    }
}

fn given_back(world: &World, number: usize, at: usize) -> World {
    let mut world = world.clone();
    let worker = &mut world.workers[number];
    let permit = worker.hands.remove(at);
    worker.settled.push((permit.call, Fate::NotSent(permit.origins)));
    world.returns_left -= 1;
    world
}

/// Broken: it is on the wire, and its worker says that it was not sent.
fn timed_out(world: &World, at: usize) -> World {
    let mut world = world.clone();
    let request = &mut world.wire[at];
    if let Some(number) = request.waits.take() {
        let (call, origins) = (request.permit.call, request.permit.origins.clone());
        world.workers[number].settled.push((call, Fate::NotSent(origins)));
    }
    world
}

/// The process ends; what it had begun is on its way, and somebody else has its jobs.
fn crashed(world: &World, number: usize) -> World {
    let mut world = world.clone();
    world.incarnations += 1;
    world.crashes_left -= 1;
    for request in world.wire.iter_mut().filter(|request| request.waits == Some(number)) {
        request.waits = None;
    }
    let jobs = world.workers[number].jobs;
    world.workers[number] = Worker {
        incarnation: world.incarnations,
        calls: 0,
        jobs,
        unheard: None,
        hands: Vec::new(),
        settled: Vec::new(),
    };
    world
}

fn counted(world: &World, at: usize) -> World {
    let mut world = world.clone();
    world.wire[at].is_counted = true;
    world.counted_us.push(world.now_us);
    world
}

impl World {
    /// Whether a window of this length holds more than the limit, at the provider.
    fn is_breached(&self, limit: u64, window_us: u64) -> bool {
        self.counted_us.iter().any(|end_us| {
            let within = self.counted_us.iter().filter(|at_us| **at_us <= *end_us && end_us - **at_us < window_us);
            within.count() as u64 > limit
        })
    }
}

/// What there is in a world: jobs of each worker, crashes, permits that are given back.
#[derive(Clone, Copy, Debug)]
struct Size {
    jobs: u32,
    crashes: u32,
    returns: u32,
}

fn explored(limit: u32, size: Size, rules: Rules) -> Explorer {
    let mut explorer = Explorer::new(limit, rules);
    let world = explorer.world(size);
    explorer.explore(world);
    explorer
}

fn no_interleaving_breaches(limit: u32, sizes: &[(u32, u32, u32)]) {
    // The largest takes minutes.
    let is_whole = std::env::var_os("WHOLE_MODEL").is_some();
    let largest = is_whole.then_some((2, 1, 1));
    for (jobs, crashes, returns) in sizes.iter().copied().chain(largest) {
        let explorer = explored(limit, Size { jobs, crashes, returns }, Rules::Kept);
        assert!(explorer.breach.is_none(), "{:#?}", explorer.breach);
        // An explorer that went nowhere, and a limiter that grants nothing, would find nothing either.
        assert_eq!(explorer.most, usize::try_from(limit).unwrap());
        assert!(explorer.seen.len() > 20_000, "only {} worlds", explorer.seen.len());
        if is_whole {
            println!(
                "limit {limit}, {jobs} jobs, {crashes} crashes, {returns} returns: {} worlds",
                explorer.seen.len()
            );
        }
    }
}

#[test]
fn no_interleaving_of_two_workers_with_a_crash_breaches_a_limit_of_one() {
    no_interleaving_breaches(1, &[(1, 1, 0)]);
}

#[test]
fn no_interleaving_of_two_workers_that_give_back_breaches_a_limit_of_one() {
    no_interleaving_breaches(1, &[(1, 0, 1)]);
}

#[test]
fn no_interleaving_of_two_workers_with_two_jobs_each_breaches_a_limit_of_one() {
    no_interleaving_breaches(1, &[(2, 0, 0)]);
}

#[test]
fn no_interleaving_of_two_workers_with_a_crash_breaches_a_limit_of_two() {
    no_interleaving_breaches(2, &[(1, 1, 0)]);
}

/// The explorer sees a broken rule: otherwise that it finds nothing would say nothing.
#[test]
fn every_broken_rule_is_found() {
    for rules in [Rules::SettledAtBegin, Rules::NoHold, Rules::BegunLate, Rules::TimeoutIsNotSent] {
        let explorer = explored(1, Size { jobs: 1, crashes: 0, returns: 1 }, rules);
        assert!(explorer.breach.is_some(), "{rules:?} was not found");
    }
}
