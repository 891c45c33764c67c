//! Exact waits of refusals: right to the microsecond. If nothing else happens, the next permit starts at that instant
//! and never earlier, whenever it is requested.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::quota::Quota;
use sluicegate::domain::time::micros_up;

use super::*;

const START_US: u64 = 1_800_000_000_000_000;

/// A step of the history that leads to the refusal.
#[derive(Clone, Debug)]
struct Step {
    gap_us: u64,
    wants: Vec<u32>,
    /// Position among the open permits, and age of the answer; `None` releases the permit unused.
    releases: Vec<(usize, Option<u64>)>,
}

fn step() -> impl Strategy<Value = Step> {
    let gap = prop_oneof![3 => 0_u64..2_000, 3 => 0_u64..200_000, 1 => Just(700_000)];
    let fate = prop_oneof![5 => (0_u64..50_000).prop_map(Some), 1 => Just(None)];
    let wants = prop::collection::vec(prop_oneof![5 => Just(1_u32), 1 => 2_u32..4], 0..5);
    let releases = prop::collection::vec((any::<usize>(), fate), 0..5);
    (gap, wants, releases).prop_map(|(gap_us, wants, releases)| Step { gap_us, wants, releases })
}

struct Open {
    call: u64,
    cost: u32,
    origins: Vec<u64>,
}

struct History {
    quota: Quota,
    spec: QuotaSpec,
    now_us: u64,
    calls: u64,
    born: Option<Micros>,
    open: Vec<Open>,
}

impl History {
    fn new(limits: &[(&str, u32, u64)]) -> Self {
        // Holds outlive every history. One that ended would free a slot that no refusal can foresee.
        let spec = QuotaSpec { hold_max: Duration::from_secs(3_600), ..spec(limits) };
        let (quota, open) = (Quota::default(), Vec::new());
        let mut history = Self { quota, spec, now_us: START_US, calls: 0, born: None, open };
        history.born = Some(history.call(START_US, &[], Vec::new()).state_epoch);
        history
    }

    fn call(&mut self, at_us: u64, costs: &[u32], releases: Vec<PermitRelease>) -> LimiterReply {
        self.calls += 1;
        let call = LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests: wants(costs),
            releases,
            pause: None,
            rebuild: self.born.map(forgotten_nothing),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".to_owned(),
        };
        let reply = self.quota.call(Micros(at_us), &self.spec, &call);
        for (cost, _, origins) in permits(&call, &reply) {
            self.open.push(Open { call: self.calls, cost, origins });
        }
        reply
    }

    fn live(&mut self, step: &Step) -> LimiterReply {
        self.now_us += step.gap_us;
        let mut releases = Vec::new();
        for (position, fate) in &step.releases {
            if self.open.is_empty() {
                break;
            }
            let open = self.open.remove(position % self.open.len());
            releases.push(match fate {
                Some(age_us) => used(open.call, open.cost, *age_us),
                None => not_sent(open.call, open.cost, &open.origins),
            });
        }
        self.call(self.now_us, &step.wants, releases)
    }

    /// Calls a copy of this state at another instant.
    fn ask(&self, at_us: u64, cost: u32) -> LimiterReply {
        let mut copy = Self {
            quota: self.quota.clone(),
            spec: self.spec.clone(),
            now_us: at_us,
            calls: self.calls,
            born: self.born,
            open: Vec::new(),
        };
        copy.call(at_us, &[cost], Vec::new())
    }
}

/// Checks a refusal at several instants; returns whether its wait was exact.
fn hold_to(history: &History, reply: &LimiterReply, wants: &[u32]) -> Result<bool, TestCaseError> {
    let Some(refusal) = reply.refused.filter(|refusal| matches!(refusal.reason, RefusalReason::Limit { .. })) else {
        return Ok(false);
    };
    let (now_us, cost) = (history.now_us, wants[usize::try_from(reply.permits()).unwrap()]);
    let promised_us = now_us + refusal.wait_us;
    let horizon_us = micros_up(BOOKING_HORIZON);
    let start = |reply: &LimiterReply| reply.grants.first().map(|run| reply.now.0 + run.wait_us);
    if !refusal.exact {
        // The missing slots are in flight. Without an answer, nothing can be granted at the promised instant.
        prop_assert_eq!(start(&history.ask(promised_us.max(now_us), cost)), None);
        return Ok(false);
    }
    prop_assert!(promised_us > now_us + horizon_us, "a start within the booking horizon is granted, not refused");
    let before = history.ask(promised_us - horizon_us - 1, cost);
    prop_assert_eq!(start(&before), None, "one microsecond before it can be booked, the permit is refused");
    prop_assert_eq!(
        before.now.0 + before.refused.unwrap().wait_us,
        promised_us,
        "the earlier refusal promises the same instant"
    );
    for at_us in [promised_us - horizon_us, promised_us - 1_000, promised_us - 1, promised_us] {
        let then = history.ask(at_us, cost);
        prop_assert_eq!(start(&then), Some(promised_us), "called {} µs before the promised start", promised_us - at_us);
    }
    prop_assert_eq!(
        start(&history.ask(promised_us + 1, cost)),
        Some(promised_us + 1),
        "after the promised start it starts at once"
    );
    Ok(true)
}

#[test]
fn an_exact_wait_is_exact_to_the_microsecond() {
    let limits = (1_u32..6, prop_oneof![Just(300_u64), Just(1_000)], 1_u32..9, prop_oneof![Just(600_u64), Just(5_000)]);
    let histories = (limits, prop::collection::vec(step(), 1..40));
    let exact = Cell::new(0_u32);
    let mut runner = TestRunner::new(Config { cases: 2_000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&histories, |((short, short_ms, long, long_ms), steps)| {
        let mut history = History::new(&[("long", long, long_ms), ("short", short, short_ms)]);
        for step in &steps {
            let reply = history.live(step);
            exact.set(exact.get() + u32::from(hold_to(&history, &reply, &step.wants)?));
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    assert!(exact.get() > 1_000, "only {} exact refusals were met", exact.get());
}
