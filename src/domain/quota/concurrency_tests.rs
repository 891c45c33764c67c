//! Concurrency limits at a provider whose clock we do not share: whatever the delays, crashes, lost replies and losses
//! of the state, never more requests are in flight there than the limit allows.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::domain::permit_protocol::{CallKind, CostByKind, PermitRelease, ReleaseKind};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota_spec::{CONCURRENCY_RETRY, LimitSpec};

const START_US: u64 = 1_800_000_000_000_000;
const WORKERS: usize = 3;
const SEND_BUDGET_US: u64 = 40_000;
const TIMEOUT_US: u64 = 150_000;

fn spec(version: i64, max_requests: u32, jitter: Option<Duration>) -> QuotaSpec {
    QuotaSpec {
        quota: ProviderName::new("p").unwrap(),
        version,
        limits: vec![LimitSpec::concurrency("slots", max_requests)],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: jitter,
        hold_max: Duration::from_micros(SEND_BUDGET_US + TIMEOUT_US),
        send_budget: Duration::from_micros(SEND_BUDGET_US),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Answered,
    NotSent,
    Unanswered,
}

#[derive(Clone, Debug)]
enum Step {
    Call { worker: usize, permits: u32, cost: u32, is_reply_lost: bool, uses: Vec<(u64, u64, End)> },
    Crash { worker: usize },
    Limit { max_requests: u32 },
    LoseState,
}

fn step() -> impl Strategy<Value = (u64, Step)> {
    let gap = prop_oneof![4 => 0_u64..2_000, 3 => 0_u64..60_000, 1 => Just(200_000_u64), 1 => Just(600_000)];
    let end = prop_oneof![8 => Just(End::Answered), 1 => Just(End::NotSent), 2 => Just(End::Unanswered)];
    let length = prop_oneof![3 => 0_u64..20_000, 1 => Just(TIMEOUT_US)];
    let uses = prop::collection::vec((0..SEND_BUDGET_US, length, end), 6);
    let call = (0..WORKERS, 1_u32..7, prop_oneof![5 => Just(1_u32), 1 => 2_u32..4], prop::bool::weighted(0.1), uses);
    let call = call.prop_map(|(worker, permits, cost, is_reply_lost, uses)| Step::Call {
        worker,
        permits,
        cost,
        is_reply_lost,
        uses,
    });
    let step = prop_oneof![
        40 => call,
        2 => (0..WORKERS).prop_map(|worker| Step::Crash { worker }),
        2 => (1_u32..6).prop_map(|max_requests| Step::Limit { max_requests }),
        1 => Just(Step::LoseState),
    ];
    (gap, step)
}

/// One request at the provider.
#[derive(Clone, Copy, Debug)]
struct Flight {
    granted: usize,
    max_requests: u32,
    begins_us: u64,
    ends_us: u64,
    cost: u32,
}

/// A call, and when it departed.
#[derive(Clone)]
struct Departed {
    call: LimiterCall,
    at_us: u64,
    /// Its place among all calls, and the limit then: a repeated call has been decided already.
    order: usize,
    max_requests: u32,
}

#[derive(Default)]
struct Worker {
    incarnation: u64,
    number: u64,
    /// The last call, if its reply was lost.
    unanswered: Option<Departed>,
    /// Releases, with the instant from which they can be sent.
    releases: Vec<(u64, PermitRelease, u64)>,
}

struct World {
    quota: Quota,
    spec: QuotaSpec,
    now_us: u64,
    run: u32,
    incarnations: u64,
    calls: usize,
    workers: Vec<Worker>,
    flights: Vec<Flight>,
    epoch: Option<Micros>,
}

impl World {
    fn call(&mut self, index: usize, permits: u32, cost: u32) -> Departed {
        let (now_us, epoch) = (self.now_us, self.epoch);
        let worker = &mut self.workers[index];
        if let Some(unanswered) = worker.unanswered.take() {
            return unanswered;
        }
        worker.number += 1;
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut worker.releases).into_iter().partition(|(from_us, ..)| *from_us <= now_us);
        worker.releases = later;
        let releases = due.into_iter().map(|(_, release, ended_us)| match release.release_kind {
            ReleaseKind::Used { .. } => PermitRelease {
                release_kind: ReleaseKind::Used { age: Duration::from_micros(now_us - ended_us) },
                ..release
            },
            ReleaseKind::Unused { .. } => release,
        });
        let in_flight = self.flights.iter().filter(|flight| flight.begins_us <= now_us && flight.ends_us > now_us);
        let charges = in_flight.map(|flight| flight.cost).sum();
        // By then no permit of the lost state may begin.
        let is_known = |epoch: &Micros| now_us >= epoch.0 + micros_up(BOOKING_HORIZON) + SEND_BUDGET_US;
        let rebuild = epoch.filter(|epoch| is_known(epoch) || self.flights.is_empty()).map(|state_epoch| RebuildData {
            state_epoch,
            ended: Vec::new(),
            in_flight: CostByKind { charges, lookups: 0 },
        });
        let call = LimiterCall {
            incarnation: worker.incarnation,
            number: worker.number,
            requests: vec![PermitRequest::charges(permits, cost)],
            releases: releases.collect(),
            pause: None,
            rebuild,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: self.run.to_string(),
        };
        self.calls += 1;
        Departed { call, at_us: now_us, order: self.calls, max_requests: self.spec.limits[0].max_requests }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Call { worker, permits, cost, is_reply_lost, uses } => {
                let departed = self.call(worker, permits, cost);
                let Departed { call, at_us: departed_us, order, max_requests } = departed.clone();
                let reply = self.quota.call(Micros(self.now_us), &self.spec, &call);
                self.epoch = Some(reply.state_epoch);
                if is_reply_lost && call.run_id == self.run.to_string() {
                    self.workers[worker].unanswered = Some(departed);
                    return;
                }
                let mut uses = uses.into_iter();
                let cost = call.requests[0].cost;
                for grant in &reply.grants {
                    for _ in 0..grant.permits {
                        let Some((begin_us, length_us, end)) = uses.next() else { break };
                        let start_us = (departed_us + grant.wait_us).max(self.now_us);
                        let begins_us = start_us + begin_us;
                        let is_late = begins_us > departed_us + grant.wait_us + SEND_BUDGET_US;
                        let end = if is_late { End::NotSent } else { end };
                        let flight =
                            Flight { granted: order, max_requests, begins_us, ends_us: begins_us + length_us, cost };
                        self.end(worker, call.number, flight, end, &grant.origins);
                    }
                }
            }
            Step::Crash { worker } => {
                self.incarnations += 1;
                // What it has not started never arrives; what is on its way stays.
                self.workers[worker] = Worker { incarnation: self.incarnations, ..Worker::default() };
            }
            Step::Limit { max_requests } => {
                self.spec = spec(self.spec.version + 1, max_requests, self.spec.grant_jitter);
            }
            Step::LoseState => {
                self.now_us += 1;
                self.run += 1;
                self.workers.iter_mut().for_each(|worker| worker.unanswered = None);
            }
        }
    }

    fn end(&mut self, worker: usize, call: u64, flight: Flight, end: End, origins: &[u64]) {
        let release = |release_kind| PermitRelease {
            call,
            cost: flight.cost,
            kind: CallKind::Charge,
            subjects: Vec::new(),
            release_kind,
        };
        let Flight { begins_us, ends_us, .. } = flight;
        let releases = &mut self.workers[worker].releases;
        match end {
            End::Answered => releases.push((ends_us, release(ReleaseKind::Used { age: Duration::ZERO }), ends_us)),
            End::NotSent => {
                let unused = ReleaseKind::Unused { origins: origins.to_vec() };
                releases.push((begins_us, release(unused), begins_us));
                return;
            }
            End::Unanswered => {}
        }
        self.flights.push(flight);
    }

    /// Requests in flight when each begins, against the limit of the one that was granted last.
    fn check(&self) -> Result<(), TestCaseError> {
        for flight in &self.flights {
            let at_us = flight.begins_us;
            let flying = || self.flights.iter().filter(|flight| flight.begins_us <= at_us && at_us < flight.ends_us);
            let count: u32 = flying().map(|flight| flight.cost).sum();
            let most = flying().max_by_key(|flight| flight.granted).map_or(count, |flight| flight.max_requests);
            prop_assert!(count <= most, "{count} of {most} in flight at {}", at_us - START_US);
        }
        Ok(())
    }
}

fn run(jitter: Option<Duration>, max_requests: u32, steps: Vec<(u64, Step)>) -> Result<usize, TestCaseError> {
    let worker = |incarnation| Worker { incarnation, ..Worker::default() };
    let mut world = World {
        quota: Quota::default(),
        spec: spec(1, max_requests, jitter),
        now_us: START_US,
        run: 0,
        incarnations: WORKERS as u64,
        calls: 0,
        workers: (1..=WORKERS as u64).map(worker).collect(),
        flights: Vec::new(),
        epoch: None,
    };
    for (gap_us, step) in steps {
        world.now_us += gap_us;
        world.step(step);
    }
    world.check()?;
    Ok(world.flights.len())
}

#[test]
fn provider_never_has_more_in_flight() {
    let histories = (prop::bool::ANY, 1_u32..6, prop::collection::vec(step(), 1..80));
    let flights = std::cell::Cell::new(0);
    let config = ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() };
    let outcome = proptest::test_runner::TestRunner::new(config).run(&histories, |(by_start, max_requests, steps)| {
        let jitter = by_start.then_some(Duration::from_millis(30));
        flights.set(flights.get() + run(jitter, max_requests, steps)?);
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    assert!(flights.get() > 20_000, "only {} requests", flights.get());
}

#[test]
fn released_slot_is_free_at_once() {
    let spec = spec(1, 2, None);
    let mut quota = Quota::default();
    let mut number = 0;
    let mut call = |now_us: u64, permits: u32, releases: Vec<PermitRelease>| {
        number += 1;
        let rebuild =
            RebuildData { state_epoch: Micros(START_US), ended: Vec::new(), in_flight: CostByKind::default() };
        let call = LimiterCall {
            incarnation: 1,
            number,
            requests: vec![PermitRequest::charges(permits, 1)],
            releases,
            pause: None,
            rebuild: Some(rebuild),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".to_owned(),
        };
        quota.call(Micros(now_us), &spec, &call)
    };
    call(START_US, 0, Vec::new());
    let granted = call(START_US, 3, Vec::new());
    assert_eq!((granted.permits(), granted.remaining), (2, 0));
    let refusal = granted.refused.unwrap();
    assert_eq!((refusal.wait_us, refusal.exact), (micros_up(CONCURRENCY_RETRY), false));
    let used = |call| PermitRelease {
        call,
        cost: 1,
        kind: CallKind::Charge,
        subjects: Vec::new(),
        release_kind: ReleaseKind::Used { age: Duration::from_millis(1) },
    };
    let next = call(START_US + 1, 2, vec![used(2)]);
    assert_eq!((next.permits(), next.grants[0].wait_us), (1, 0));
    // The holder of the others is gone: their lease ends them, and nothing before.
    let lease_us = padded_us(SEND_BUDGET_US + TIMEOUT_US);
    assert_eq!(call(START_US + lease_us - 1, 2, Vec::new()).permits(), 0);
    assert_eq!(call(START_US + lease_us, 2, Vec::new()).permits(), 1);
    assert_eq!(call(START_US + 1 + lease_us, 2, Vec::new()).permits(), 1);
}
