//! The fair order of a lane's backlog: classes strictly in their order, flows of a class by start-time fair queueing,
//! first in first out within a flow.
//!
//! The ledger has this order in SQL, because its jobs and all processes are there. Here are the same rules in memory, for
//! the simulation. `fair_order_is_that_of_the_ledger` holds the two against each other. It reads no clock.
//! See `docs/decisions/0040-flows-and-backlog.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::job::{Flow, FlowClass};
use super::provider::JobOrder;

/// A tag's units for each unit of cost, at weight 1. At the largest weight, 1,000, a cost of 1 is still 1,000 units.
pub const TAG_PER_COST: u32 = 1_000_000;

/// By how much the virtual time is ahead of the start tag that was served last: later flows go behind those that this
/// tag's service has passed over. Else one that is last among equals would wait for as long as new ones come.
pub const PASSED_OVER_FIRST: i64 = 1;

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

/// Bounds of one claim, from this order in memory or from the ledger's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FairClaim<A> {
    /// Most jobs in all.
    pub at_most: u32,
    /// Jobs of one flow in a row, at least 1: the quantum of fair queueing. A flow with a larger weight, or alone, has
    /// several quanta in one claim. Flows share the more exactly, the smaller it is; a claim is cheaper, the larger it
    /// is.
    pub quantum: u32,
    /// Most jobs of one flow, at least 1. A flow may have a limit of its own that grants only a few.
    pub flow_max: u32,
    /// Flows that are left out: the caller has enough of their jobs.
    pub except: Vec<Flow<A>>,
    /// Flows of later classes are left out. [`FlowClass::LAST`]: none is.
    pub class_max: FlowClass,
    /// Jobs that cost this or more are left out, and jobs behind them pass; `None`: none is. Where the order of accounts
    /// is kept, an account whose first job is left out has no other.
    pub cost_below: Option<u32>,
    /// With [`JobOrder::Account`], one job of an account is claimed, of its first class, and none while an earlier one
    /// that was claimed so is undecided and has not returned. A job in review is undecided.
    pub order: JobOrder,
}

/// The backlog of a lane, in order.
#[derive(Clone, Debug)]
pub struct FairOrder<A, J> {
    flows: BTreeMap<Flow<A>, FlowState<J>>,
    /// Flows with jobs that are not blocked, by class and tag.
    free: BTreeSet<(FlowClass, i64, Option<A>)>,
    blocked: BTreeSet<(Duration, Flow<A>)>,
    /// Of each class, just above the start tag that was served last.
    virtual_times: BTreeMap<FlowClass, i64>,
    /// Accounts with a job that was claimed in their order, and neither ended nor returned since.
    on_their_way: BTreeSet<A>,
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
            on_their_way: BTreeSet::new(),
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
    pub fn len(&self) -> usize {
        self.waiting
    }

    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// The flows with jobs in the order of their names, and until when each is blocked.
    pub fn waiting_flows(&self) -> impl Iterator<Item = (Flow<A>, Option<Duration>)> {
        let waiting = self.flows.iter().filter(|(_, state)| !state.jobs.is_empty());
        waiting.map(|(flow, state)| (flow.clone(), state.blocked_until))
    }

    /// When the next block ends.
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
        self.end(flow.account.as_ref());
        self.change(flow, weight, |state, virtual_time| {
            let refund = if how.was_claimed { tag_of(u64::from(job.cost), state.weight) } else { 0 };
            let least = if state.jobs.is_empty() { virtual_time } else { 0 };
            state.tag = (state.tag - refund).max(least);
            state.blocked_until = state.blocked_until.max(how.blocked_until);
            state.jobs.insert(job.seq, job);
        });
    }

    /// A job of this account that was claimed has ended.
    pub fn end(&mut self, account: Option<&A>) {
        if let Some(account) = account {
            self.on_their_way.remove(account);
        }
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
        let is_cheap = |job: &WaitingJob<J>| claim.cost_below.is_none_or(|bound| job.cost < bound);
        for (flow, pick) in self.picks(claim) {
            let mut served_to = None;
            self.change(flow.clone(), 1, |state, _| {
                let (tag, weight, mut cost) = (state.tag, state.weight, 0);
                for place in 0..pick.quota {
                    let next = state.jobs.iter().find(|(_, job)| is_cheap(job)).map(|(seq, _)| *seq);
                    let Some(job) = next.and_then(|seq| state.jobs.remove(&seq)) else { break };
                    cost += u64::from(job.cost);
                    served_to = Some(pick.start);
                    let start = tag + tag_of(place as u64, weight);
                    claimed.push(Claimed { flow: flow.clone(), start, job });
                }
                // Rounded once, as the ledger does.
                state.tag += tag_of(cost, weight);
            });
            if let Some(account) = flow.account.clone().filter(|_| claim.order == JobOrder::Account) {
                self.on_their_way.insert(account);
            }
            if let Some(start) = served_to {
                let virtual_time = self.virtual_times.entry(flow.class).or_default();
                *virtual_time = start.saturating_add(PASSED_OVER_FIRST).max(*virtual_time);
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
        let front = front.filter(|flow| claim.order == JobOrder::None || self.is_next_of_account(flow));
        let front = front.filter(|flow| self.has_cheap(flow, claim));
        for (place, flow) in front.take(at_most).enumerate() {
            let Some(state) = self.flows.get(&flow) else { continue };
            let is_ordered = claim.order == JobOrder::Account && flow.account.is_some();
            let waiting = state.jobs.len().min(if is_ordered { 1 } else { flow_max });
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

    /// Whether the flow has a job below the cost that the claim leaves out; an account in order: its first one.
    fn has_cheap(&self, flow: &Flow<A>, claim: &FairClaim<A>) -> bool {
        let (Some(bound), Some(state)) = (claim.cost_below, self.flows.get(flow)) else { return true };
        let looked_at = if claim.order == JobOrder::Account && flow.account.is_some() { 1 } else { usize::MAX };
        state.jobs.values().take(looked_at).any(|job| job.cost < bound)
    }

    /// Whether no job of the flow's account is on its way, and none of an earlier class waits.
    fn is_next_of_account(&self, flow: &Flow<A>) -> bool {
        let Some(account) = &flow.account else { return true };
        let mut earlier = (0..flow.class.number()).filter_map(FlowClass::from_number);
        let waits = |class| self.flows.get(&Flow { class, ..flow.clone() }).is_some_and(|state| !state.jobs.is_empty());
        !self.on_their_way.contains(account) && !earlier.any(waits)
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
mod tests;
