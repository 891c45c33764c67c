//! Guarantee G1 at a provider with a clock of its own: whatever the delays, losses and crashes, no window of the
//! provider holds more than the limit.
//!
//! Workers call the limiter over a slow connection and begin requests when their permits start. They crash, repeat
//! calls whose reply was lost, and read changed limits late. The provider counts each request on arrival. The judge is
//! the strict provider, which shares no code with the limiter.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::limit::Rate;
use sluicegate::domain::quota::Quota;
use sluicegate::domain::time::micros_up;
use sluicegate::provider::simulated::{FakeOptions, OnLimit, StrictProvider};

use super::*;

const START_US: u64 = 1_800_000_000_000_000;
const WORKERS: usize = 3;
const SEND_BUDGET_US: u64 = 40_000;
const TIMEOUT_US: u64 = 150_000;

/// The course of one permit.
#[derive(Clone, Debug)]
struct Use {
    /// Delay after the permit's start.
    begin_us: u64,
    transit_us: u64,
    answer_us: u64,
    end: End,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Answered,
    NotSent,
    /// The request arrives, its response is lost.
    Unanswered,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trip {
    Whole,
    CallLost,
    ReplyLost,
}

#[derive(Clone, Debug)]
enum Step {
    Call {
        worker: usize,
        wants: Vec<u32>,
        out_us: u64,
        back_us: u64,
        trip: Trip,
        uses: Vec<Use>,
    },
    Crash {
        worker: usize,
    },
    Limits {
        first: u32,
        second: u32,
    },
    /// A worker reads the newest settings.
    Learn {
        worker: usize,
    },
    /// The store loses its state.
    Restart,
}

fn step() -> impl Strategy<Value = (u64, Step)> {
    let gap = prop_oneof![4 => 0_u64..2_000, 3 => 0_u64..60_000, 1 => Just(130_000_u64), 1 => Just(420_000)];
    let trip = prop_oneof![8 => Just(Trip::Whole), 1 => Just(Trip::CallLost), 1 => Just(Trip::ReplyLost)];
    let end = prop_oneof![8 => Just(End::Answered), 2 => Just(End::NotSent), 2 => Just(End::Unanswered)];
    let delay = || prop_oneof![3 => 0_u64..500, 2 => 0_u64..30_000, 2 => 100_000_u64..160_000];
    let one = (prop_oneof![3 => Just(0_u64), 2 => 0_u64..50_000], delay(), delay(), end);
    let one = one.prop_map(|(begin_us, transit_us, answer_us, end)| Use { begin_us, transit_us, answer_us, end });
    let wants = prop::collection::vec(prop_oneof![6 => Just(1_u32), 1 => 2_u32..4], 1..6);
    let call = (0..WORKERS, wants, 0_u64..8_000, 0_u64..8_000, trip, prop::collection::vec(one, 6));
    let call = call.prop_map(|(worker, wants, out_us, back_us, trip, uses)| Step::Call {
        worker,
        wants,
        out_us,
        back_us,
        trip,
        uses,
    });
    let step = prop_oneof![
        40 => call,
        2 => (0..WORKERS).prop_map(|worker| Step::Crash { worker }),
        2 => (0_u32..7, 0_u32..7).prop_map(|(first, second)| Step::Limits { first, second }),
        6 => (0..WORKERS).prop_map(|worker| Step::Learn { worker }),
        1 => Just(Step::Restart),
    ];
    (gap, step)
}

/// A call in transit, with the version of the settings that it was made under.
struct Outstanding {
    call: LimiterCall,
    version: usize,
    departed_us: u64,
}

struct Worker {
    incarnation: u64,
    calls: u64,
    knows: usize,
    free_us: u64,
    outstanding: Option<Outstanding>,
    /// Releases, each with the instant from which it can be reported.
    releases: Vec<(u64, PendingRelease)>,
}

#[derive(Clone)]
struct PendingRelease {
    call: u64,
    cost: u32,
    /// The instant of the answer, or the origins to restore.
    fate: Result<u64, Vec<u64>>,
}

/// One request at the provider.
#[derive(Clone, Copy)]
struct Arrival {
    at_us: u64,
    cost: u32,
    version: usize,
}

struct World {
    quota: Quota,
    specs: Vec<QuotaSpec>,
    workers: Vec<Worker>,
    incarnations: u64,
    run: u32,
    now_us: u64,
    arrivals: Vec<Arrival>,
    /// The latest deadline of all requests sent.
    last_on_wire_us: u64,
    born: Option<(Micros, u64)>,
    jitter: Option<Duration>,
}

impl World {
    fn new(limits: &[(&str, u32, u64)], jitter: Option<Duration>) -> Self {
        let first = QuotaSpec {
            hold_max: Duration::from_micros(SEND_BUDGET_US + TIMEOUT_US),
            send_budget: Duration::from_micros(SEND_BUDGET_US),
            grant_jitter: jitter,
            ..spec(limits)
        };
        let mut world = Self {
            quota: Quota::default(),
            specs: vec![first],
            workers: Vec::new(),
            incarnations: 0,
            run: 0,
            now_us: START_US,
            arrivals: Vec::new(),
            last_on_wire_us: 0,
            born: None,
            jitter,
        };
        world.workers = (0..WORKERS).map(|_| world.newborn()).collect();
        world
    }

    fn newborn(&mut self) -> Worker {
        self.incarnations += 1;
        Worker {
            incarnation: self.incarnations,
            calls: 0,
            knows: self.specs.len() - 1,
            free_us: self.now_us,
            outstanding: None,
            releases: Vec::new(),
        }
    }

    fn live(&mut self, step: &Step) {
        match step {
            Step::Call { worker, wants, out_us, back_us, trip, uses } => {
                self.call(*worker, wants, *out_us, *back_us, *trip, uses);
            }
            Step::Crash { worker } => self.workers[*worker] = self.newborn(),
            Step::Limits { first, second } => {
                let mut next = self.specs.last().unwrap().clone();
                next.version += 1;
                next.limits.iter_mut().zip([*first, *second]).for_each(|(limit, max)| limit.max_requests = max);
                self.specs.push(next);
            }
            Step::Learn { worker } => self.workers[*worker].knows = self.specs.len() - 1,
            Step::Restart => {
                self.run += 1;
                self.born = None;
            }
        }
    }

    /// One call of a worker, to the store and back. A worker makes one call at a time.
    fn call(&mut self, worker: usize, wants: &[u32], out_us: u64, back_us: u64, trip: Trip, uses: &[Use]) {
        if self.workers[worker].free_us > self.now_us {
            return;
        }
        let departed_us = (self.now_us - out_us).max(self.workers[worker].free_us);
        let outgoing = self.outgoing(worker, wants, departed_us);
        if trip == Trip::CallLost {
            self.workers[worker].outstanding = Some(outgoing);
            return;
        }
        let reply = self.quota.call(Micros(self.now_us), &self.specs[outgoing.version], &outgoing.call);
        let born_at_us =
            self.born.filter(|(born, _)| *born == reply.state_epoch).map_or(self.now_us, |(_, at_us)| at_us);
        self.born = Some((reply.state_epoch, born_at_us));
        if trip == Trip::ReplyLost {
            self.workers[worker].outstanding = Some(outgoing);
            return;
        }
        let arrived_us = self.now_us + back_us;
        self.workers[worker].free_us = arrived_us;
        if reply.refused.is_some_and(|refused| refused.reason == RefusalReason::StaleVersion) {
            let again = outgoing.call.releases.iter().map(|release| (arrived_us, pending_release(release, &outgoing)));
            self.workers[worker].releases.extend(again.collect::<Vec<_>>());
            return;
        }
        self.begin(worker, &outgoing, &reply, arrived_us, uses);
    }

    /// The lost call again, or a new one with all releases that can be reported by now.
    fn outgoing(&mut self, worker: usize, wants: &[u32], departed_us: u64) -> Outstanding {
        let run_id = format!("run{}", self.run);
        let rebuildable = self.rebuildable();
        let me = &mut self.workers[worker];
        if let Some(lost) = me.outstanding.take()
            && lost.call.run_id == run_id
        {
            return lost;
        }
        me.calls += 1;
        let (due, later) =
            std::mem::take(&mut me.releases).into_iter().partition(|(from_us, _)| *from_us <= departed_us);
        me.releases = later;
        let due: Vec<(u64, PendingRelease)> = due;
        let releases = due.into_iter().map(|(_, release)| match release.fate {
            Ok(answered_us) => used(release.call, release.cost, departed_us - answered_us),
            Err(origins) => not_sent(release.call, release.cost, &origins),
        });
        let call = LimiterCall {
            incarnation: me.incarnation,
            number: me.calls,
            requests: self::wants(wants),
            releases: releases.collect(),
            pause: None,
            rebuild: rebuildable.map(forgotten_nothing),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id,
        };
        Outstanding { call, version: me.knows, departed_us }
    }

    /// The rebuild as a gate does it: it waits until no permit of the lost state can still start, then reads the
    /// ledger.
    fn rebuildable(&self) -> Option<Micros> {
        let (born, at_us) = self.born?;
        let last_start_us = at_us + micros_up(BOOKING_HORIZON) + SEND_BUDGET_US;
        let cold_us = self.specs.iter().map(QuotaSpec::cold_start_us).max().unwrap();
        (self.now_us >= last_start_us && self.last_on_wire_us + cold_us <= self.now_us).then_some(born)
    }

    /// Each permit is begun, released unused, or late.
    fn begin(&mut self, worker: usize, outgoing: &Outstanding, reply: &LimiterReply, arrived_us: u64, uses: &[Use]) {
        let budget_us = self.jitter.map_or(SEND_BUDGET_US, |jitter| micros_up(jitter).min(SEND_BUDGET_US));
        let granted = permits(&outgoing.call, reply);
        for ((cost, wait_us, origins), planned) in granted.iter().zip(uses.iter().cycle()) {
            {
                let begin_us = arrived_us + *wait_us + planned.begin_us;
                let late = begin_us > outgoing.departed_us + *wait_us + budget_us;
                let (call, cost) = (outgoing.call.number, *cost);
                let release = |fate| PendingRelease { call, cost, fate };
                if late || planned.end == End::NotSent {
                    self.workers[worker].releases.push((begin_us, release(Err(origins.clone()))));
                    continue;
                }
                // With a jitter bound, the provider is assumed to count a request within that bound from its start.
                let at_us = begin_us + planned.transit_us.min(TIMEOUT_US);
                let at_us = self.jitter.map_or(at_us, |jitter| at_us.min(reply.now.0 + *wait_us + micros_up(jitter)));
                self.arrivals.push(Arrival { at_us, cost, version: outgoing.version });
                let answered_us = at_us + planned.answer_us;
                let in_time = answered_us <= begin_us + TIMEOUT_US;
                self.last_on_wire_us = self.last_on_wire_us.max(begin_us + TIMEOUT_US);
                if planned.end == End::Answered && in_time {
                    self.workers[worker].releases.push((answered_us, release(Ok(answered_us))));
                }
            }
        }
    }

    /// For every range of versions up to the last: the requests granted under them, against the largest of their
    /// limits.
    fn judge(&self) -> Result<u64, TestCaseError> {
        let mut arrivals = self.arrivals.clone();
        arrivals.sort_by_key(|arrival| arrival.at_us);
        let mut full = 0;
        for since in 0..self.specs.len() {
            for limit in 0..self.specs[0].limits.len() {
                let most = self.specs[since..].iter().map(|spec| spec.limits[limit].max_requests).max().unwrap();
                let rate = Rate::new(most, self.specs[0].limits[limit].window).unwrap();
                let options = FakeOptions { limits: vec![rate], on_limit: OnLimit::Count, ..FakeOptions::default() };
                let mut provider = StrictProvider::new(options);
                for arrival in arrivals.iter().filter(|arrival| arrival.version >= since) {
                    (0..arrival.cost).for_each(|_| {
                        let _booked = provider.record_arrival(arrival.at_us);
                    });
                }
                let report = &provider.report().limits[0];
                prop_assert_eq!(report.breaches, 0, "{} of {} since version {}", report.largest, rate, since + 1);
                full += u64::from(most > 0 && report.largest == u64::from(most));
            }
        }
        Ok(full)
    }
}

fn pending_release(release: &PermitRelease, outgoing: &Outstanding) -> PendingRelease {
    let fate = match &release.release_kind {
        ReleaseKind::Used { age } => Ok(outgoing.departed_us - micros_up(*age)),
        ReleaseKind::Unused { origins } => Err(origins.clone()),
    };
    PendingRelease { call: release.call, cost: release.cost, fate }
}

fn never_more_than_the_limit(jitter: Option<Duration>, limits: [(&'static str, u32, u64); 2]) {
    let (requests, full) = (Cell::new(0), Cell::new(0));
    let mut runner = TestRunner::new(Config { cases: 900, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&prop::collection::vec(step(), 1..120), |steps| {
        let mut world = World::new(&limits, jitter);
        for (gap_us, step) in &steps {
            world.now_us += gap_us;
            world.live(step);
        }
        requests.set(requests.get() + world.arrivals.len());
        full.set(full.get() + world.judge()?);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    // A limiter that grants nothing would also pass, so requests are counted.
    assert!(requests.get() > 5_000, "only {} requests were made", requests.get());
    assert!(full.get() > 500, "a limit was used in full only {} times", full.get());
}

#[test]
fn delays_never_breach_a_window() {
    never_more_than_the_limit(None, [("a", 4, 100), ("b", 6, 400)]);
}

/// With so few slots, each slot that is free too early is detected.
#[test]
fn smallest_limits_never_breach_a_window() {
    never_more_than_the_limit(None, [("a", 1, 100), ("b", 2, 200)]);
}

#[test]
fn bounded_jitter_never_breaches_a_window() {
    never_more_than_the_limit(Some(Duration::from_millis(30)), [("a", 4, 100), ("b", 6, 400)]);
}
