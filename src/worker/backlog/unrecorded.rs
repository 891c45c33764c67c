//! New payments of a lane that are not recorded yet: those of one flow are recorded in the order of their arrival.
//!
//! A new payment may wait at the gate for a while. If another payment of its flow must be recorded meanwhile, it stops
//! waiting there, and is recorded in its turn. So does each payment that arrives before the flow's last record is committed.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::domain::job::FlowKey;

#[derive(Debug, Default)]
pub struct Unrecorded(Mutex<Arrivals>);

#[derive(Debug, Default)]
struct Arrivals {
    count: u64,
    flows: HashMap<FlowKey, FlowArrivals>,
}

#[derive(Debug, Default)]
struct FlowArrivals {
    /// First arrived first.
    waiting: VecDeque<Entry>,
    /// Records under way.
    under_way: usize,
}

#[derive(Clone, Debug)]
struct Entry {
    number: u64,
    stage: watch::Sender<Stage>,
}

/// How far an unrecorded payment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// It may wait at the gate.
    Arrived,
    /// A payment of the flow must be recorded, and so this one must.
    GivesUp,
    /// Its record is under way, or it needs none.
    Done,
}

impl Entry {
    fn advance(&self, to: Stage) {
        self.stage.send_if_modified(|stage| {
            let is_later = *stage < to;
            *stage = to.max(*stage);
            is_later
        });
    }

    async fn reached(&self, wanted: Stage) {
        // The sender lives as long as this entry.
        let _ = self.stage.subscribe().wait_for(|stage| *stage >= wanted).await;
    }
}

/// One unrecorded payment, until this is dropped.
#[derive(Debug)]
pub struct UnrecordedPayment<'a> {
    all: &'a Unrecorded,
    flow: FlowKey,
    entry: Entry,
}

/// A record under way, until this is dropped.
#[derive(Debug)]
pub struct RecordUnderWay<'a> {
    all: &'a Unrecorded,
    flow: FlowKey,
}

impl Unrecorded {
    pub fn add(&self, flow: FlowKey) -> UnrecordedPayment<'_> {
        let mut arrivals = self.0.lock();
        arrivals.count += 1;
        let entry = Entry { number: arrivals.count, stage: watch::Sender::new(Stage::Arrived) };
        arrivals.flows.entry(flow.clone()).or_default().waiting.push_back(entry.clone());
        drop(arrivals);
        UnrecordedPayment { all: self, flow, entry }
    }

    /// Whether a payment of this flow is being recorded, or waits for its turn to be.
    pub fn is_recording(&self, flow: &FlowKey) -> bool {
        let arrivals = self.0.lock();
        let of_flow = arrivals.flows.get(flow);
        of_flow.is_some_and(|of| {
            of.under_way > 0 || of.waiting.iter().any(|entry| *entry.stage.borrow() >= Stage::GivesUp)
        })
    }

    fn change(&self, flow: &FlowKey, change: impl FnOnce(&mut FlowArrivals)) {
        let mut arrivals = self.0.lock();
        let Some(of_flow) = arrivals.flows.get_mut(flow) else { return };
        change(of_flow);
        if of_flow.waiting.is_empty() && of_flow.under_way == 0 {
            arrivals.flows.remove(flow);
        }
    }
}

impl<'a> UnrecordedPayment<'a> {
    /// Waits until a payment of the flow must be recorded.
    pub async fn gives_up(&self) {
        self.entry.reached(Stage::GivesUp).await;
    }

    /// This payment must be recorded, and so must all of its flow that wait at the gate.
    pub fn must_be_recorded(&self) {
        self.all.change(&self.flow, |of| of.waiting.iter().for_each(|entry| entry.advance(Stage::GivesUp)));
    }

    /// Waits until the records of all earlier payments of the flow are under way.
    pub async fn turn(&self) {
        let earlier: Vec<Entry> = {
            let arrivals = self.all.0.lock();
            let of_flow = arrivals.flows.get(&self.flow).into_iter().flat_map(|of| &of.waiting);
            of_flow.take_while(|other| other.number < self.entry.number).cloned().collect()
        };
        for other in earlier {
            other.reached(Stage::Done).await;
        }
    }

    /// The record is under way: the next payment of the flow takes its turn.
    pub fn under_way(self) -> RecordUnderWay<'a> {
        self.all.change(&self.flow, |of| of.under_way += 1);
        RecordUnderWay { all: self.all, flow: self.flow.clone() }
    }
}

impl Drop for UnrecordedPayment<'_> {
    fn drop(&mut self) {
        self.all.change(&self.flow, |of| of.waiting.retain(|other| other.number != self.entry.number));
        self.entry.advance(Stage::Done);
    }
}

impl Drop for RecordUnderWay<'_> {
    fn drop(&mut self) {
        self.all.change(&self.flow, |of| of.under_way -= 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::domain::job::tests::job;

    #[test]
    fn records_of_a_flow_are_in_order_of_arrival() {
        let all = Unrecorded::default();
        let flow = FlowKey::of(&job("p-1"));
        let add = || all.add(FlowKey::of(&job("p-1")));
        let first = add();
        let second = add();
        let third = add();
        assert!(first.gives_up().now_or_never().is_none() && !all.is_recording(&flow));
        second.must_be_recorded();
        assert!(all.is_recording(&flow), "one that arrives now is recorded, too");
        for payment in [&first, &second, &third] {
            assert!(payment.gives_up().now_or_never().is_some(), "{payment:?}");
        }
        let mut turn = Box::pin(third.turn());
        assert!((&mut turn).now_or_never().is_none(), "two wait before it");
        assert!(first.turn().now_or_never().is_some());
        let first = first.under_way();
        assert!((&mut turn).now_or_never().is_none(), "one waits before it");
        let second = second.under_way();
        assert!(turn.now_or_never().is_some());
        drop(third);
        drop(first);
        assert!(all.is_recording(&flow), "the second is not committed");
        drop(second);
        assert!(!all.is_recording(&flow) && all.0.lock().flows.is_empty());
    }

    #[test]
    fn flows_do_not_wait_for_each_other() {
        let all = Unrecorded::default();
        let urgent = crate::domain::job::Job { priority: 9, ..job("p-2") };
        let plain = all.add(FlowKey::of(&job("p-1")));
        let urgent = all.add(FlowKey::of(&urgent));
        urgent.must_be_recorded();
        assert!(urgent.turn().now_or_never().is_some());
        assert!(plain.gives_up().now_or_never().is_none() && !all.is_recording(&FlowKey::of(&job("p-1"))));
    }
}
