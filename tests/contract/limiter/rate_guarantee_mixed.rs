//! Guarantees of several limits with mixed algorithms at once, some of them per account. The store loses its state,
//! which is then rebuilt from a ledger, or its clock steps. Sliding logs are judged at the provider, other algorithms
//! by the permits' starts.
//!
//! Workers act as a gate does. They compare clocks before they use a grant, and release late permits unused, however
//! long they were frozen. They send the ledger's past use to a cold store once no permit of the lost state can still
//! start.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use sluicegate::domain::clock_comparison::{ClockComparison, Comparison};
use sluicegate::domain::limit::{Algorithm, Scope};
use sluicegate::domain::permit_protocol::{Shortage, SkippedRequest, SubjectHistory, UsageHistory};
use sluicegate::domain::quota::Quota;
use sluicegate::domain::time::micros_up;

use super::*;
use steps::{Step, Trouble, Use, step};

mod steps;

mod judge;

const START_US: u64 = 1_800_000_000_000_000;
const WORKERS: usize = 3;
const SEND_BUDGET_US: u64 = 40_000;
const TIMEOUT_US: u64 = 150_000;

struct Worker {
    incarnation: u64,
    calls: u64,
    free_us: u64,
    clock: ClockComparison,
    distrust: Option<Micros>,
    cold: Option<(Micros, u64)>,
    seeds: Option<CounterSeeds>,
    run: u32,
    unheard: Option<(LimiterCall, u64)>,
    releases: Vec<(u64, PermitRelease, u64)>,
}

/// A request that began, with its start by the store's clock.
#[derive(Clone, Debug)]
struct Attempt {
    start_us: u64,
    began_us: u64,
    arrived_us: u64,
    ended_us: Option<u64>,
    cost: u32,
    account: Option<u8>,
}

struct World {
    quota: Quota,
    spec: QuotaSpec,
    workers: Vec<Worker>,
    incarnations: u64,
    run: u32,
    now_us: u64,
    /// How far the store's clock is ahead of the world's clock.
    offset_us: i64,
    attempts: Vec<Attempt>,
    rebuilt: u32,
    seeded: u32,
    stepped: u32,
}

impl World {
    fn new(spec: QuotaSpec) -> Self {
        let mut world = Self {
            quota: Quota::default(),
            spec,
            workers: Vec::new(),
            incarnations: 0,
            run: 0,
            now_us: START_US,
            offset_us: 0,
            attempts: Vec::new(),
            rebuilt: 0,
            seeded: 0,
            stepped: 0,
        };
        world.workers = (0..WORKERS).map(|_| world.newborn()).collect();
        world
    }

    fn newborn(&mut self) -> Worker {
        self.incarnations += 1;
        Worker {
            incarnation: self.incarnations,
            calls: 0,
            free_us: self.now_us,
            clock: ClockComparison::default(),
            distrust: None,
            cold: None,
            seeds: None,
            run: self.run,
            unheard: None,
            releases: Vec::new(),
        }
    }

    fn live(&mut self, step: &Step) {
        match step {
            Step::Call { worker, wants, out_us, back_us, is_reply_lost, uses } => {
                self.call(*worker, wants, (*out_us, *back_us), *is_reply_lost, uses);
            }
            Step::Crash { worker } => self.workers[*worker] = self.newborn(),
            Step::Restart => self.run += 1,
            // A process that starts after a step needs a stored attestation, which the module `clock_attestation`
            // tests.
            Step::MoveClock { .. } if self.workers.iter().any(|worker| !worker.clock.is_known()) => {}
            Step::MoveClock { us } => self.offset_us += us,
        }
    }

    fn call(
        &mut self,
        worker: usize,
        wants: &[(Option<u8>, u32)],
        (out_us, back_us): (u64, u64),
        lost: bool,
        uses: &[Use],
    ) {
        if self.workers[worker].free_us > self.now_us {
            return;
        }
        let departed_us = (self.now_us - out_us).max(self.workers[worker].free_us);
        let (call, departed_us) = self.outgoing(worker, wants, departed_us);
        let reply = self.quota.call(Micros(self.now_us.strict_add_signed(self.offset_us)), &self.spec, &call);
        let me = &mut self.workers[worker];
        if lost {
            me.unheard = Some((call, departed_us));
            return;
        }
        let arrived_us = self.now_us + back_us;
        me.free_us = arrived_us;
        me.distrust.take_if(|born| call.invalidate_epoch == Some(*born));
        let since = |at_us: u64| Duration::from_micros(at_us - START_US);
        match me.clock.observe(since(departed_us), since(arrived_us), reply.now) {
            Comparison::First | Comparison::Agrees { .. } => {}
            Comparison::SteppedForward { .. } | Comparison::SteppedBack { .. } => {
                me.distrust = Some(reply.state_epoch);
                self.stepped += 1;
                return;
            }
        }
        let seeds = self.seeds(&call, &reply, arrived_us);
        let me = &mut self.workers[worker];
        me.seeds = seeds;
        let is_cold = reply.refused.is_some_and(|refused| refused.reason == RefusalReason::Cold);
        let known = me.cold.filter(|(born, _)| *born == reply.state_epoch);
        me.cold = is_cold.then(|| known.unwrap_or((reply.state_epoch, arrived_us)));
        self.begin(worker, (&call, departed_us), &reply, arrived_us, uses);
    }

    fn outgoing(&mut self, worker: usize, wants: &[(Option<u8>, u32)], departed_us: u64) -> (LimiterCall, u64) {
        let rebuild = self.rebuild(worker, departed_us);
        let run = self.run;
        let me = &mut self.workers[worker];
        let unheard = me.unheard.take();
        if me.run != run {
            (me.run, me.clock) = (run, ClockComparison::default());
        } else if let Some(unheard) = unheard {
            return unheard;
        }
        me.calls += 1;
        let (due, later) =
            std::mem::take(&mut me.releases).into_iter().partition(|(from_us, ..)| *from_us <= departed_us);
        me.releases = later;
        let due: Vec<(u64, PermitRelease, u64)> = due;
        let releases = due.into_iter().map(|(_, release, answered_us)| match release.release_kind {
            ReleaseKind::Used { .. } => PermitRelease {
                release_kind: ReleaseKind::Used { age: Duration::from_micros(departed_us - answered_us) },
                ..release
            },
            ReleaseKind::Unused { .. } => release,
        });
        let is_compared = me.clock.is_known() && me.distrust.is_none();
        let want = |(account, cost): &(Option<u8>, u32)| {
            let account = account.map(|account| account.to_string());
            PermitRequest {
                subjects: self.spec.subjects(account.as_deref(), None).unwrap(),
                ..PermitRequest::charges(1, *cost)
            }
        };
        self.rebuilt += u32::from(rebuild.is_some());
        let call = LimiterCall {
            incarnation: me.incarnation,
            number: me.calls,
            requests: if is_compared { wants.iter().map(want).collect() } else { Vec::new() },
            releases: releases.collect(),
            pause: None,
            rebuild,
            seeds: me.seeds.take(),
            invalidate_epoch: me.distrust,
            look_ahead: BOOKING_HORIZON,
            run_id: format!("run{run}"),
        };
        (call, departed_us)
    }

    /// The ledger's past use for a lost state, once no permit of that state can still start.
    fn rebuild(&self, worker: usize, at_us: u64) -> Option<RebuildData> {
        let (born, since_us) = self.workers[worker].cold?;
        if at_us < since_us + micros_up(BOOKING_HORIZON) + SEND_BUDGET_US {
            return None;
        }
        let within_us = self.spec.cold_start_us();
        let mut rebuild = forgotten_nothing(born);
        for attempt in self.attempts.iter().filter(|attempt| attempt.began_us <= at_us) {
            add(&mut rebuild.ended, &mut rebuild.in_flight, attempt, (at_us, within_us));
        }
        Some(rebuild)
    }

    /// The ledger's past use of accounts that the state has not counted, once all earlier grants have started.
    fn seeds(&mut self, call: &LimiterCall, reply: &LimiterReply, at_us: u64) -> Option<CounterSeeds> {
        let is_needed = |passed: &&SkippedRequest| passed.shortage == Shortage::NeedsHistory { readable_in_us: 0 };
        let mut subjects = Vec::new();
        for passed in reply.skipped.iter().filter(is_needed) {
            let subject = call.requests[passed.request_index].subjects[0].clone();
            let account: u8 = subject.key.rsplit(':').next().unwrap().parse().unwrap();
            let as_of = Micros(reply.now.0 - self.spec.start_delay_max_us());
            let (within, open) = (Duration::from_micros(self.spec.cold_start_us()), CostByKind::default());
            let mut history = UsageHistory { as_of, within, ended: Vec::new(), in_flight: open };
            let own = self.attempts.iter().filter(|attempt| attempt.account == Some(account));
            for attempt in own.filter(|attempt| attempt.began_us <= at_us) {
                add(&mut history.ended, &mut history.in_flight, attempt, (at_us, self.spec.cold_start_us()));
            }
            subjects.push(SubjectHistory { subject, history });
        }
        self.seeded += u32::try_from(subjects.len()).unwrap();
        (!subjects.is_empty()).then_some(CounterSeeds { state_epoch: reply.state_epoch, provider: None, subjects })
    }

    fn begin(
        &mut self,
        worker: usize,
        (call, departed_us): (&LimiterCall, u64),
        reply: &LimiterReply,
        arrived_us: u64,
        uses: &[Use],
    ) {
        let cells = self.spec.provider_counters();
        let mut uses = uses.iter().cycle();
        for run in &reply.grants {
            let want = &call.requests[run.request_index];
            let account = want.subjects.first().map(|subject| subject.key.rsplit(':').next().unwrap().parse().unwrap());
            for planned in uses.by_ref().take(usize::try_from(run.permits).unwrap()) {
                let clock = &self.workers[worker].clock;
                let mut start_us = arrived_us + run.wait_us;
                for (cell, origin_ms) in cells.iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0) {
                    let due = Micros((origin_ms * 1_000 + cell.window_us).min(reply.now.0 + run.wait_us));
                    let since = Duration::from_micros(arrived_us - START_US);
                    let not_before = clock.not_before(since, due, Duration::from_micros(cell.window_us));
                    start_us = start_us.max(START_US + micros_up(not_before));
                }
                let began_us = start_us + planned.begin_us;
                let release = |fate| PermitRelease {
                    call: call.number,
                    cost: want.cost,
                    kind: want.kind,
                    subjects: want.subjects.clone(),
                    release_kind: fate,
                };
                let releases = &mut self.workers[worker].releases;
                if began_us > departed_us + run.wait_us + SEND_BUDGET_US || !planned.is_sent {
                    releases.push((began_us, release(ReleaseKind::Unused { origins: run.origins.clone() }), 0));
                    continue;
                }
                let at_us = began_us + planned.transit_us.min(TIMEOUT_US);
                let answered_us = at_us + planned.answer_us;
                let is_answered = planned.is_answered && answered_us <= began_us + TIMEOUT_US;
                if is_answered {
                    releases.push((answered_us, release(ReleaseKind::Used { age: Duration::ZERO }), answered_us));
                }
                self.attempts.push(Attempt {
                    start_us: reply.now.0 + run.wait_us,
                    began_us,
                    arrived_us: at_us,
                    ended_us: is_answered.then_some(answered_us),
                    cost: want.cost,
                    account,
                });
            }
        }
    }
}

fn add(ended: &mut Vec<PastUse>, open: &mut CostByKind, attempt: &Attempt, (at_us, within_us): (u64, u64)) {
    match attempt.ended_us {
        Some(ended_us) if ended_us <= at_us => {
            let age = Duration::from_micros(at_us - ended_us);
            let past = PastUse { age, cost: CostByKind::charges(attempt.cost) };
            ended.extend((at_us - ended_us <= within_us).then_some(past));
        }
        // Its answer is lost or still to come.
        _ if at_us - attempt.began_us <= within_us => open.charges += attempt.cost,
        _ => {}
    }
}

/// Name, algorithm, scope, requests, window in milliseconds, burst.
type Limit = (&'static str, Algorithm, Scope, u32, u64, Option<u32>);

fn mixed(limits: &[Limit]) -> QuotaSpec {
    let limit = |&(name, algorithm, scope, max_requests, window_ms, burst): &Limit| LimitSpec {
        algorithm,
        scope,
        burst,
        offset: Duration::from_millis(if algorithm == Algorithm::FixedWindow { 70 } else { 0 }),
        ..LimitSpec::sliding_log(name, max_requests, Duration::from_millis(window_ms))
    };
    QuotaSpec {
        limits: limits.iter().map(limit).collect(),
        hold_max: Duration::from_micros(SEND_BUDGET_US + TIMEOUT_US),
        send_budget: Duration::from_micros(SEND_BUDGET_US),
        ..spec(&[])
    }
}

/// Plays new histories, and some that are the same in every run. The minimum counts are checked on those alone, so that
/// they do not depend on chance.
fn keeps_its_promises(trouble: Trouble, spec: &QuotaSpec) {
    live_through(Config { cases: 600, ..Config::default() }, trouble, spec);
    let lived = live_through(Config { cases: 400, rng_seed: RngSeed::Fixed(1), ..Config::default() }, trouble, spec);
    // A limiter that grants nothing would also pass.
    assert!(lived.requests > 1_000, "only {} requests were made", lived.requests);
    assert!(lived.full > 100, "a limit was used in full only {} times", lived.full);
    assert!(lived.seeded > 100, "histories of accounts were read only {} times", lived.seeded);
    assert!(lived.rebuilt > 160, "the ledger was read only {} times", lived.rebuilt);
    assert!(lived.stepped > 100 || trouble == Trouble::LostState, "only {} clock steps were detected", lived.stepped);
}

/// Totals over all histories of a run.
struct Lived {
    requests: usize,
    full: u64,
    rebuilt: u32,
    seeded: u32,
    stepped: u32,
}

fn live_through(histories: Config, trouble: Trouble, spec: &QuotaSpec) -> Lived {
    let (requests, full, rebuilt, stepped) = (Cell::new(0), Cell::new(0), Cell::new(0), Cell::new(0));
    let seeded = Cell::new(0);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..histories });
    let outcome = runner.run(&prop::collection::vec(step(trouble), 1..120), |steps| {
        let mut world = World::new(spec.clone());
        for (gap_us, step) in &steps {
            world.now_us += gap_us;
            world.live(step);
        }
        requests.set(requests.get() + world.attempts.len());
        rebuilt.set(rebuilt.get() + world.rebuilt);
        stepped.set(stepped.get() + world.stepped);
        seeded.set(seeded.get() + world.seeded);
        full.set(full.get() + world.judge_logs()?);
        if trouble == Trouble::LostState { world.judge_starts() } else { Ok(()) }
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    Lived {
        requests: requests.get(),
        full: full.get(),
        rebuilt: rebuilt.get(),
        seeded: seeded.get(),
        stepped: stepped.get(),
    }
}

use Algorithm::{FixedWindow, Gcra, SlidingLog, SlidingWindow, TokenBucket};
use Scope::{Account, Provider};

#[test]
fn shared_and_account_logs_survive_lost_state() {
    let limits = [("account", SlidingLog, Account, 2, 150, None), ("all", SlidingLog, Provider, 4, 100, None)];
    keeps_its_promises(Trouble::LostState, &mixed(&limits));
}

#[test]
fn log_with_windows_breaches_no_limit() {
    let limits = [
        ("account", SlidingLog, Account, 2, 200, None),
        ("calendar", FixedWindow, Provider, 7, 250, None),
        ("log", SlidingLog, Provider, 4, 100, None),
        ("rolling", SlidingWindow, Provider, 6, 300, None),
    ];
    keeps_its_promises(Trouble::LostState, &mixed(&limits));
}

#[test]
fn log_with_buckets_breaches_no_limit() {
    let limits = [
        ("account", SlidingLog, Account, 2, 200, None),
        ("bucket", TokenBucket, Provider, 6, 150, Some(5)),
        ("cells", Gcra, Provider, 10, 200, Some(5)),
        ("log", SlidingLog, Provider, 4, 100, None),
    ];
    keeps_its_promises(Trouble::LostState, &mixed(&limits));
}

#[test]
fn logs_survive_store_clock_steps() {
    // Long windows: within one window, several calls must detect a step, report it and go on.
    let limits = [("account", SlidingLog, Account, 5, 1_500, None), ("all", SlidingLog, Provider, 8, 1_000, None)];
    keeps_its_promises(Trouble::ClockSteps, &mixed(&limits));
}
