//! The fair order of a lane's backlog: classes strictly in their order, flows of a class by start-time fair queueing,
//! first in first out within a flow.
//!
//! The ledger has this order in SQL, because its jobs and all processes are there. Here are the same rules in memory, for
//! the simulation. `fair_order_is_that_of_the_ledger` holds the two against each other. It reads no clock.
//! See `docs/decisions/0040-flows-and-backlog.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::flow::{Flow, FlowClass};

/// A tag's units for each unit of cost, at weight 1: thousandths of it are exact at the largest weight.
pub const TAG_PER_COST: u32 = 1_000_000;

/// A waiting job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingJob<J> {
    /// Its place in the flow, by its first arrival.
    pub seq: u64,
    pub cost: u32,
    pub job: J,
}

/// How a job returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairReturn {
    /// It was claimed from here, so its flow's tag has moved on by its cost, and moves back.
    pub was_claimed: bool,
    /// The flow is blocked until then, since any one origin; a block that ends later stays.
    pub blocked_until: Option<Duration>,
}

/// Bounds of one claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FairClaim<A> {
    pub at_most: u32,
    /// Jobs of one flow in a row, at least 1.
    pub quantum: u32,
    /// Most jobs of one flow.
    pub flow_max: u32,
    /// Flows that are left out.
    pub except: Vec<Flow<A>>,
    /// Later classes are left out.
    pub class_max: FlowClass,
}

/// The backlog of a lane, in order.
#[derive(Clone, Debug)]
pub struct FairOrder<A, J> {
    flows: BTreeMap<Flow<A>, FlowState<J>>,
    /// Flows with jobs that are not blocked, by class and tag.
    free: BTreeSet<(FlowClass, i64, Option<A>)>,
    blocked: BTreeSet<(Duration, Flow<A>)>,
    /// Of each class, the start tag that was served last.
    virtual_times: BTreeMap<FlowClass, i64>,
    waiting: usize,
}

#[derive(Clone, Debug)]
struct FlowState<J> {
    tag: i64,
    weight: i64,
    blocked_until: Option<Duration>,
    jobs: BTreeMap<u64, WaitingJob<J>>,
}

/// A few jobs of a flow in a row.
struct Quantum<A> {
    flow: Flow<A>,
    start: i64,
    jobs: usize,
}

/// A flow's part of a claim.
struct Pick {
    start: i64,
    quota: usize,
}

/// A claimed job, with what orders it among the others.
struct Claimed<A, J> {
    flow: Flow<A>,
    start: i64,
    job: WaitingJob<J>,
}

impl<A, J> Default for FairOrder<A, J> {
    fn default() -> Self {
        Self {
            flows: BTreeMap::new(),
            free: BTreeSet::new(),
            blocked: BTreeSet::new(),
            virtual_times: BTreeMap::new(),
            waiting: 0,
        }
    }
}

/// A number of jobs as an index.
fn as_index(jobs: u32) -> usize {
    usize::try_from(jobs).unwrap_or(usize::MAX)
}

/// By how much a tag moves on.
fn tag_of(cost: u64, weight: i64) -> i64 {
    i64::try_from(cost).unwrap_or(i64::MAX).saturating_mul(i64::from(TAG_PER_COST)) / weight.max(1)
}

impl<A: Clone + Ord, J: Copy> FairOrder<A, J> {
    /// Jobs that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// The flows with jobs in the order of their names, and until when each is blocked.
    pub fn waiting_flows(&self) -> impl Iterator<Item = (Flow<A>, Option<Duration>)> {
        let waiting = self.flows.iter().filter(|(_, state)| !state.jobs.is_empty());
        waiting.map(|(flow, state)| (flow.clone(), state.blocked_until))
    }

    /// When the next block ends.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        self.blocked.first().map(|(until, _)| *until)
    }

    /// Adds a new job; the weight counts if its flow is new. A flow without jobs starts at its class's virtual time.
    pub fn add(&mut self, flow: Flow<A>, weight: u32, job: WaitingJob<J>) {
        self.change(flow, weight, |state, virtual_time| {
            if state.jobs.is_empty() {
                state.tag = state.tag.max(virtual_time);
            }
            state.jobs.insert(job.seq, job);
        });
    }

    /// Adds a job again that has left the order, and may block its flow.
    pub fn put_back(&mut self, flow: Flow<A>, weight: u32, job: WaitingJob<J>, how: FairReturn) {
        self.change(flow, weight, |state, virtual_time| {
            let refund = if how.was_claimed { tag_of(u64::from(job.cost), state.weight) } else { 0 };
            let least = if state.jobs.is_empty() { virtual_time } else { 0 };
            state.tag = (state.tag - refund).max(least);
            state.blocked_until = state.blocked_until.max(how.blocked_until);
            state.jobs.insert(job.seq, job);
        });
    }

    /// Ends the blocks that end by then. Such a flow does not make up for the past.
    pub fn wake(&mut self, now: Duration) {
        while let Some((_, flow)) = self.blocked.first().cloned().filter(|(until, _)| *until <= now) {
            self.change(flow, 1, |state, virtual_time| {
                state.blocked_until = None;
                state.tag = state.tag.max(virtual_time);
            });
        }
    }

    /// Takes the next jobs. If a block ends by now, the flow follows behind those that were free.
    pub fn claim(&mut self, now: Duration, claim: &FairClaim<A>) -> Vec<(Flow<A>, WaitingJob<J>)> {
        let mut jobs = self.claim_free(claim);
        if self.next_wake().is_some_and(|until| until <= now) {
            self.wake(now);
            let at_most = claim.at_most.saturating_sub(u32::try_from(jobs.len()).unwrap_or(u32::MAX));
            let rest = FairClaim { at_most, ..claim.clone() };
            jobs.extend(self.claim_free(&rest));
        }
        jobs
    }

    /// Takes the jobs of the quanta that start first.
    fn claim_free(&mut self, claim: &FairClaim<A>) -> Vec<(Flow<A>, WaitingJob<J>)> {
        let mut claimed = Vec::new();
        for (flow, pick) in self.picks(claim) {
            let mut served_to = None;
            self.change(flow.clone(), 1, |state, _| {
                let (tag, weight, mut cost) = (state.tag, state.weight, 0);
                for place in 0..pick.quota {
                    let Some((_, job)) = state.jobs.pop_first() else { break };
                    cost += u64::from(job.cost);
                    served_to = Some(pick.start);
                    let start = tag + tag_of(place as u64, weight);
                    claimed.push(Claimed { flow: flow.clone(), start, job });
                }
                // Rounded once, as the ledger does.
                state.tag += tag_of(cost, weight);
            });
            if let Some(start) = served_to {
                let virtual_time = self.virtual_times.entry(flow.class).or_default();
                *virtual_time = start.max(*virtual_time);
            }
        }
        let key = |one: &Claimed<A, J>| (one.flow.class, one.start, one.flow.account.clone(), one.job.seq);
        claimed.sort_by_cached_key(key);
        claimed.into_iter().map(|one| (one.flow, one.job)).collect()
    }

    /// How many jobs of which flows are claimed. Each flow has quanta, and each quantum a start tag, as if a job cost 1.
    fn picks(&self, claim: &FairClaim<A>) -> BTreeMap<Flow<A>, Pick> {
        let [at_most, quantum, flow_max] = [claim.at_most, claim.quantum.max(1), claim.flow_max].map(as_index);
        let mut quanta = Vec::new();
        let free = self.free.iter().map(|(class, _, account)| Flow { class: *class, account: account.clone() });
        let front = free.take_while(|flow| flow.class <= claim.class_max).filter(|flow| !claim.except.contains(flow));
        for (place, flow) in front.take(at_most).enumerate() {
            let Some(state) = self.flows.get(&flow) else { continue };
            let waiting = state.jobs.len().min(flow_max);
            let firsts = (0..waiting).step_by(quantum).take_while(|first| place + first < at_most);
            quanta.extend(firsts.map(|first| Quantum {
                flow: flow.clone(),
                start: state.tag + tag_of(first as u64, state.weight),
                jobs: quantum.min(waiting - first),
            }));
        }
        quanta.sort_by(|a, b| (a.flow.class, a.start, &a.flow.account).cmp(&(b.flow.class, b.start, &b.flow.account)));
        let (mut picks, mut left) = (BTreeMap::<Flow<A>, Pick>::new(), at_most);
        for quantum in quanta {
            let jobs = quantum.jobs.min(left);
            if jobs == 0 {
                break;
            }
            left -= jobs;
            let pick = picks.entry(quantum.flow).or_insert(Pick { start: quantum.start, quota: 0 });
            pick.start = pick.start.max(quantum.start);
            pick.quota += jobs;
        }
        picks
    }

    /// Changes a flow, and its entries in the indexes. `change` gets the virtual time of the flow's class.
    fn change(&mut self, flow: Flow<A>, weight: u32, change: impl FnOnce(&mut FlowState<J>, i64)) {
        let virtual_time = self.virtual_times.get(&flow.class).copied().unwrap_or_default();
        let new =
            || FlowState { tag: virtual_time, weight: i64::from(weight), blocked_until: None, jobs: BTreeMap::new() };
        let state = self.flows.entry(flow.clone()).or_insert_with(new);
        let before = state.jobs.len();
        let entry = |tag: i64| (flow.class, tag, flow.account.clone());
        match state.blocked_until {
            Some(until) => drop(self.blocked.remove(&(until, flow.clone()))),
            None => drop(self.free.remove(&entry(state.tag))),
        }
        change(state, virtual_time);
        self.waiting = self.waiting + state.jobs.len() - before;
        match state.blocked_until {
            Some(until) => drop(self.blocked.insert((until, flow.clone()))),
            None if state.jobs.is_empty() => {}
            None => drop(self.free.insert(entry(state.tag))),
        }
        let is_over = state.jobs.is_empty() && state.blocked_until.is_none() && state.tag <= virtual_time;
        if is_over {
            // It would start at the virtual time again.
            self.flows.remove(&flow);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Order = FairOrder<u8, u64>;

    fn claim(at_most: u32) -> FairClaim<u8> {
        FairClaim { at_most, quantum: 1, flow_max: u32::MAX, except: Vec::new(), class_max: FlowClass::LAST }
    }

    fn fill(order: &mut Order, flow: Flow<u8>, weight: u32, seqs: std::ops::Range<u64>) {
        seqs.for_each(|seq| order.add(flow, weight, WaitingJob { seq, cost: 1, job: seq }));
    }

    fn flow(account: u8) -> Flow<u8> {
        Flow { class: FlowClass::LAST, account: Some(account) }
    }

    /// How many of the next jobs belong to each account.
    fn shares<const N: usize>(order: &mut Order, rounds: usize, at_most: u32) -> [usize; N] {
        let mut shares = [0; N];
        for _ in 0..rounds {
            for (flow, _) in order.claim(Duration::ZERO, &claim(at_most)) {
                shares[usize::from(flow.account.unwrap())] += 1;
            }
        }
        shares
    }

    #[test]
    fn weights_divide_the_order() {
        let mut order = Order::default();
        fill(&mut order, flow(0), 1, 0..400);
        fill(&mut order, flow(1), 3, 400..800);
        assert_eq!(shares(&mut order, 50, 4), [50, 150]);
    }

    #[test]
    fn costs_count_against_a_share() {
        let mut order = Order::default();
        (0..100).for_each(|seq| order.add(flow(0), 1, WaitingJob { seq, cost: 4, job: seq }));
        fill(&mut order, flow(1), 1, 100..400);
        assert_eq!(shares(&mut order, 50, 1), [10, 40]);
    }

    #[test]
    fn late_or_blocked_flow_does_not_make_up_for_the_past() {
        let mut order = Order::default();
        fill(&mut order, flow(0), 1, 0..400);
        assert_eq!(shares(&mut order, 10, 10), [100]);
        fill(&mut order, flow(1), 1, 400..500);
        let [_, late] = shares(&mut order, 20, 2);
        assert!((19..=21).contains(&late), "{late}");
        let how = FairReturn { was_claimed: false, blocked_until: Some(Duration::from_secs(9)) };
        order.put_back(flow(1), 1, WaitingJob { seq: 900, cost: 1, job: 900 }, how);
        assert_eq!(shares(&mut order, 10, 10), [100, 0]);
        order.wake(Duration::from_secs(9));
        let [_, woken] = shares(&mut order, 20, 2);
        assert!((19..=21).contains(&woken), "{woken}");
    }

    #[test]
    fn higher_class_is_always_first() {
        let mut order = Order::default();
        fill(&mut order, flow(0), 1, 0..9);
        let urgent = Flow { class: FlowClass::of_priority(9), account: Some(7) };
        fill(&mut order, urgent, 1, 9..11);
        let waiting: Vec<Flow<u8>> = order.waiting_flows().map(|(flow, _)| flow).collect();
        assert_eq!(waiting, [urgent, flow(0)]);
        let next: Vec<u64> = order.claim(Duration::ZERO, &claim(3)).iter().map(|(_, job)| job.job).collect();
        assert_eq!(next, [9, 10, 0]);
        let bounds = FairClaim { class_max: urgent.class, ..claim(3) };
        assert_eq!(order.claim(Duration::ZERO, &bounds), []);
    }

    #[test]
    fn returned_job_is_first_again() {
        let mut order = Order::default();
        fill(&mut order, flow(0), 1, 0..3);
        let (of, first) = order.claim(Duration::ZERO, &claim(1))[0];
        let how = FairReturn { was_claimed: true, blocked_until: None };
        order.put_back(of, 1, first, how);
        let next: Vec<u64> = order.claim(Duration::ZERO, &claim(9)).iter().map(|(_, job)| job.job).collect();
        assert_eq!((next, order.len(), order.flows.len()), (vec![0, 1, 2], 0, 1));
    }

    proptest! {
        /// Classes are strict, each flow is first in first out, and no flow falls behind its share by more than a few
        /// quanta while all of them have jobs.
        #[test]
        fn each_flow_gets_its_share(
            weights in prop::collection::vec(1..5_u32, 2..6),
            (quantum, at_most, rounds) in (1..5_u32, 1..20_u32, 1..40_usize),
        ) {
            let mut order = Order::default();
            let mut seq = 0;
            for (account, weight) in weights.iter().enumerate() {
                let of = flow(u8::try_from(account).unwrap());
                fill(&mut order, of, *weight, seq..seq + 1_000);
                seq += 1_000;
            }
            let mut served = vec![Vec::new(); weights.len()];
            for _ in 0..rounds {
                for (of, job) in order.claim(Duration::ZERO, &FairClaim { quantum, ..claim(at_most) }) {
                    served[usize::from(of.account.unwrap())].push(job.seq);
                }
            }
            prop_assert!(served.iter().all(|seqs| seqs.is_sorted()));
            let all = served.iter().map(Vec::len).sum::<usize>();
            prop_assert_eq!(all, at_most as usize * rounds);
            prop_assert_eq!(order.len(), weights.len() * 1_000 - all);
            let sum = f64::from(weights.iter().sum::<u32>());
            for (seqs, weight) in served.iter().zip(&weights) {
                let share = all as f64 * f64::from(*weight) / sum;
                let apart = (seqs.len() as f64 - share).abs();
                // A claim takes whole quanta, and as many as start in it.
                prop_assert!(apart <= (2 * quantum as usize * weights.len() + at_most as usize) as f64, "{served:?} for {weights:?}");
            }
        }

        /// Whatever happens, jobs are neither lost nor doubled, and flows without jobs are forgotten.
        #[test]
        fn no_job_is_lost(steps in prop::collection::vec((0..5_u8, 0..3_u8, 0..3_u8, 1..4_u32), 1..200)) {
            let (mut order, mut out, mut seq) = (Order::default(), BTreeMap::new(), 0_u64);
            for (step, account, priority, cost) in steps {
                let class = FlowClass::of_priority(priority);
                let at = Duration::from_millis(seq);
                match step {
                    0..3 => {
                        order.add(Flow { class, account: Some(account) }, cost, WaitingJob { seq, cost, job: seq });
                        seq += 1;
                    }
                    3 => {
                        for (of, job) in order.claim(at, &FairClaim { class_max: class, ..claim(cost) }) {
                            prop_assert!(of.class <= class);
                            prop_assert!(out.insert(job.seq, (of, job)).is_none(), "claimed twice");
                        }
                    }
                    _ => if let Some((_, (of, job))) = out.pop_first() {
                        let blocked_until = (cost > 1).then(|| at + Duration::from_millis(u64::from(cost) * 5));
                        order.put_back(of, 1, job, FairReturn { was_claimed: true, blocked_until });
                    },
                }
                prop_assert_eq!(order.len() + out.len(), usize::try_from(seq).unwrap());
            }
            order.wake(Duration::MAX);
            let left = order.claim(Duration::MAX, &claim(u32::MAX)).len();
            prop_assert_eq!((left + out.len(), order.is_empty()), (usize::try_from(seq).unwrap(), true));
            prop_assert!(order.free.is_empty() && order.blocked.is_empty());
        }
    }
}
