//! The steps of a small world: every event that may happen next.
//!
//! Left out are steps that change nothing, and steps after which nothing new can happen.

use super::store::Store;
use super::world::{Fate, Permit, Request, Unheard, Worker, World};
use super::*;

/// The parameters of all steps: spec, rules, limit, window and tick.
#[derive(Clone)]
pub struct Laws {
    pub spec: QuotaSpec,
    pub rules: Rules,
    pub limit: usize,
    pub window_us: u64,
    /// Length of a time step, which is shorter if a permit starts before its end.
    pub tick_us: u64,
}

impl Laws {
    pub fn new(limit: u32, rules: Rules) -> Self {
        let hold_us = if rules == Rules::NoHold { 0 } else { SEND_BUDGET_US + TIMEOUT_US };
        let spec = QuotaSpec {
            hold_max: Duration::from_micros(hold_us),
            send_budget: Duration::from_micros(SEND_BUDGET_US),
            ..spec(&[("all", limit, WINDOW_MS)])
        };
        let window_us = padded_us(&spec, 0);
        Self { spec, rules, limit: usize::try_from(limit).unwrap(), window_us, tick_us: TICK_US }
    }

    /// The same with time steps of half the length.
    pub fn in_half_ticks(&self) -> Self {
        Self { tick_us: self.tick_us / 2, ..self.clone() }
    }

    pub fn steps(&self, world: &World) -> Vec<World> {
        let mut next = Vec::new();
        for number in 0..2 {
            let worker = &world.workers[number];
            let waits = world.wire.iter().any(|request| request.worker == number);
            if worker.unheard.is_some() {
                next.push(self.heard(world, number));
            } else if (worker.jobs > 0 && worker.permits.is_empty()) || !worker.releases.is_empty() {
                next.extend(self.asked(world, number));
            }
            for at in 0..worker.permits.len() {
                if world.now_us >= worker.permits[at].start_us {
                    next.push(self.start_request(world, number, at));
                }
                if world.returns_left > 0 {
                    next.push(returned(world, number, at));
                }
            }
            // A worker that loses nothing by a crash is the same after it, in a world with one crash less.
            let loses = waits || worker.unheard.is_some() || !worker.permits.is_empty() || world.has_releases(number);
            if world.crashes_left > 0 && loses {
                next.push(self.crashed(world, number));
            }
        }
        for at in 0..world.wire.len() {
            if world.now_us <= world.wire[at].permit.answer_before_us {
                next.push(self.answered(world, at));
            }
            if self.rules == Rules::TimeoutIsNotSent {
                next.push(self.timed_out(world, at));
            }
        }
        next.push(self.later(world));
        next
    }

    /// Makes a call. A call that releases nothing and is granted nothing changes nothing, so it is no step.
    fn asked(&self, world: &World, number: usize) -> Option<World> {
        let now_us = world.now_us;
        let worker = &world.workers[number];
        let wanted = if worker.permits.is_empty() { worker.jobs } else { 0 };
        let has_releases = world.has_releases(number);
        if !has_releases && (wanted == 0 || world.store.has_refused(now_us, wanted)) {
            return None;
        }
        let releases = worker.releases.iter().map(|(call, fate)| match fate {
            Fate::Answered(at_us) => used(*call, 1, now_us - at_us),
            Fate::NotSent(origins) => not_sent(*call, 1, origins),
        });
        let call = LimiterCall {
            incarnation: worker.incarnation,
            number: worker.calls + 1,
            requests: if wanted > 0 { vec![PermitRequest::charges(wanted, 1)] } else { Vec::new() },
            releases: releases.collect(),
            pause: None,
            rebuild: None,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".to_owned(),
        };
        let mut quota = world.store.quota.clone();
        let reply = quota.call(Micros(now_us), &self.spec, &call);
        // A repeat of the call at any later time has the same reply and changes no usage.
        debug_assert_eq!(quota.clone().call(Micros(now_us), &self.spec, &call), reply);
        if !has_releases && reply.grants.is_empty() {
            world.store.refuses(now_us, wanted);
            return None;
        }
        let granted: Vec<_> =
            permits(&call, &reply).into_iter().map(|(_, wait_us, origins)| (wait_us, origins)).collect();
        let mut world = World { store: Store::of(quota), ..world.clone() };
        let worker = &mut world.workers[number];
        worker.calls += 1;
        worker.releases.clear();
        // A reply without permits enables no further step, so it counts as received.
        worker.unheard = (!granted.is_empty()).then_some(Unheard { departed_us: now_us, call: worker.calls, granted });
        Some(world)
    }

    fn heard(&self, world: &World, number: usize) -> World {
        let mut world = world.clone();
        let now_us = world.now_us;
        let worker = &mut world.workers[number];
        let Some(Unheard { departed_us, call, granted }) = worker.unheard.take() else { return world };
        worker.permits.extend(granted.into_iter().map(|(wait_us, origins)| Permit {
            call,
            origins,
            start_us: now_us + wait_us,
            use_before_us: departed_us + wait_us + SEND_BUDGET_US,
            answer_before_us: departed_us + wait_us + SEND_BUDGET_US + TIMEOUT_US,
        }));
        self.release_late(&mut world);
        world
    }

    /// Time passes to the next tick, or to the start of a permit before it. Requests past their timeout end.
    fn later(&self, world: &World) -> World {
        let mut world = world.clone();
        let tick_us = (world.now_us - START_US) / self.tick_us * self.tick_us + self.tick_us + START_US;
        let starts = world.workers.iter().flat_map(|worker| &worker.permits).map(|permit| permit.start_us);
        world.now_us = starts.filter(|at_us| *at_us > world.now_us).min().map_or(tick_us, |at_us| at_us.min(tick_us));
        let now_us = world.now_us;
        let (waits, over) = world.wire.drain(..).partition(|request| now_us <= request.permit.answer_before_us);
        world.wire = waits;
        self.ended(&mut world, over);
        self.release_late(&mut world);
        world
    }

    /// A late permit is released with the next call. If no release is left, its job ends with it, because otherwise the
    /// world would not end.
    fn release_late(&self, world: &mut World) {
        let now_us = world.now_us;
        let returns_left = &mut world.returns_left;
        for worker in world.workers.iter_mut().filter(|_| self.rules != Rules::StartedLate) {
            let (late, permits) = worker.permits.drain(..).partition(|permit| now_us > permit.use_before_us);
            worker.permits = permits;
            let late: Vec<Permit> = late;
            for permit in late {
                if *returns_left > 0 {
                    *returns_left -= 1;
                    worker.releases.push((permit.call, Fate::NotSent(permit.origins)));
                } else {
                    worker.jobs -= 1;
                }
            }
        }
    }

    fn start_request(&self, world: &World, number: usize, at: usize) -> World {
        let mut world = world.clone();
        let now_us = world.now_us;
        let worker = &mut world.workers[number];
        worker.jobs -= 1;
        let permit = worker.permits.remove(at);
        let request = Request { permit, worker: number, counts_until_us: now_us + TIMEOUT_US };
        world.most = world.counting(self.window_us) + 1;
        let worker = &mut world.workers[number];
        if self.rules == Rules::ReleasedAtBegin {
            worker.releases.push((request.permit.call, Fate::Answered(now_us)));
            self.ended(&mut world, vec![request]);
        } else {
            world.wire.push(request);
        }
        world
    }

    fn answered(&self, world: &World, at: usize) -> World {
        let mut world = world.clone();
        let now_us = world.now_us;
        let request = world.wire.remove(at);
        world.workers[request.worker].releases.push((request.permit.call, Fate::Answered(now_us)));
        let counts_until_us = request.counts_until_us.min(now_us);
        self.ended(&mut world, vec![Request { counts_until_us, ..request }]);
        world
    }

    /// Breaks a rule: the request is in flight, and its worker releases it as unused.
    fn timed_out(&self, world: &World, at: usize) -> World {
        let mut world = world.clone();
        let request = world.wire.remove(at);
        let release = (request.permit.call, Fate::NotSent(request.permit.origins.clone()));
        world.workers[request.worker].releases.push(release);
        self.ended(&mut world, vec![request]);
        world
    }

    /// The process ends. Its requests stay in flight, and the next incarnation gets its jobs.
    fn crashed(&self, world: &World, number: usize) -> World {
        let mut world = world.clone();
        world.crashes_left -= 1;
        let (lost, wire) = world.wire.drain(..).partition(|request| request.worker == number);
        world.wire = wire;
        self.ended(&mut world, lost);
        let Worker { incarnation, jobs, .. } = world.workers[number];
        if self.rules != Rules::SameAfterCrash {
            world.incarnations += 1;
        }
        let incarnation = if self.rules == Rules::SameAfterCrash { incarnation } else { world.incarnations };
        world.workers[number] = Worker::new(incarnation, jobs);
        world
    }

    /// No worker awaits these any more. More of them than the limit make no difference. If the youngest are within a
    /// window of a start, they are enough for a breach; otherwise the older ones are not within it either.
    fn ended(&self, world: &mut World, requests: Vec<Request>) {
        let now_us = world.now_us;
        world.ended_us.extend(requests.into_iter().map(|request| request.counts_until_us));
        world.ended_us.retain(|until_us| until_us + self.window_us > now_us);
        world.ended_us.sort_unstable_by(|first, second| second.cmp(first));
        world.ended_us.truncate(self.limit);
    }
}

fn returned(world: &World, number: usize, at: usize) -> World {
    let mut world = world.clone();
    let worker = &mut world.workers[number];
    let permit = worker.permits.remove(at);
    worker.releases.push((permit.call, Fate::NotSent(permit.origins)));
    world.returns_left -= 1;
    world
}
