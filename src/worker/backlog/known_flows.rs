//! The flows of a lane that have jobs in the backlog, as far as this process knows.
//!
//! New jobs of such a flow are recorded in the backlog, behind the earlier ones. The ledger has all flows, and this
//! memory is bounded: a new job of a flow that is missing here asks for a permit like any other.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::job::{Flow, FlowClass};

/// Most flows that are known here: the memory of a few hundred jobs.
pub const KNOWN_FLOWS_MAX: u32 = 1_000;

/// A flow with jobs in the backlog, as the ledger had it at one instant.
#[derive(Clone, Debug)]
pub struct SeenFlow<A> {
    pub flow: Flow<A>,
    /// Time until its block ends; `None`: it has no block.
    pub blocked_for: Option<Duration>,
}

#[derive(Debug)]
pub struct KnownFlows<A>(HashMap<Flow<A>, KnownFlow>);

#[derive(Clone, Copy, Debug)]
struct KnownFlow {
    /// When a job last entered it, or when the ledger was last read.
    seen_at: Instant,
    blocked_until: Option<Instant>,
}

impl KnownFlow {
    fn is_free(&self, now: Instant) -> bool {
        self.blocked_until.is_none_or(|until| until <= now)
    }
}

impl<A> Default for KnownFlows<A> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<A: Clone + Eq + Hash> KnownFlows<A> {
    /// Whether jobs of this flow wait; for how long it is blocked does not matter.
    pub fn contains(&self, flow: &Flow<A>) -> bool {
        self.0.contains_key(flow)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records that a job has entered the flow. Returns whether a dispatcher may claim it now.
    pub fn record_new(&mut self, flow: &Flow<A>, now: Instant) -> bool {
        match self.0.get_mut(flow) {
            Some(known) => {
                known.seen_at = now;
                known.is_free(now)
            }
            None => {
                if self.0.len() < KNOWN_FLOWS_MAX as usize {
                    self.0.insert(flow.clone(), KnownFlow { seen_at: now, blocked_until: None });
                }
                true
            }
        }
    }

    /// The most urgent class of the flows that are not blocked.
    pub fn first_class(&self, now: Instant) -> Option<FlowClass> {
        self.0.iter().filter(|(_, known)| known.is_free(now)).map(|(flow, _)| flow.class).min()
    }

    /// Records that a job has returned to the flow, which is blocked until then.
    pub fn record_return(&mut self, flow: Flow<A>, blocked_until: Option<Instant>, now: Instant) {
        if self.0.len() >= KNOWN_FLOWS_MAX as usize && !self.0.contains_key(&flow) {
            return;
        }
        let blocked_until = blocked_until.max(self.0.get(&flow).and_then(|known| known.blocked_until));
        self.0.insert(flow, KnownFlow { seen_at: now, blocked_until });
    }

    /// Replaces what was known before `read_at` by the flows that the ledger had then.
    pub fn refresh(&mut self, read_at: Instant, flows: Vec<SeenFlow<A>>) {
        self.0.retain(|_, known| known.seen_at >= read_at);
        for SeenFlow { flow, blocked_for } in flows {
            let blocked_until = blocked_for.and_then(|left| read_at.checked_add(left));
            self.0.entry(flow).or_insert(KnownFlow { seen_at: read_at, blocked_until });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn flow(account: u32) -> Flow<u32> {
        Flow { class: FlowClass::LAST, account: Some(account) }
    }

    fn seen(account: u32, blocked_for: Option<Duration>) -> SeenFlow<u32> {
        SeenFlow { flow: flow(account), blocked_for }
    }

    #[test]
    fn refresh_keeps_what_came_later() {
        let (mut flows, began) = (KnownFlows::default(), Instant::now());
        let [old, new, stored] = [1, 2, 3].map(flow);
        flows.record_return(old, None, began);
        let read_at = began + Duration::from_millis(1);
        flows.record_return(new, None, read_at);
        flows.refresh(read_at, vec![seen(3, None)]);
        assert_eq!([old, new, stored].map(|flow| flows.contains(&flow)), [false, true, true]);
        flows.refresh(read_at + Duration::from_millis(1), Vec::new());
        assert!(flows.is_empty());
    }

    #[test]
    fn blocked_flow_needs_no_claim() {
        let (mut flows, now) = (KnownFlows::default(), Instant::now());
        let [blocked, free] = [1, 2].map(flow);
        flows.refresh(now, vec![seen(1, Some(HOUR)), seen(2, None)]);
        assert_eq!([blocked, free].map(|flow| flows.record_new(&flow, now)), [false, true]);
        flows.record_return(free, Some(now + HOUR), now);
        assert!(!flows.record_new(&free, now));
        assert!(flows.record_new(&free, now + HOUR) && flows.record_new(&blocked, now + HOUR));
    }

    #[test]
    fn first_class_is_that_of_a_free_flow() {
        let (mut flows, now) = (KnownFlows::<u32>::default(), Instant::now());
        assert_eq!(flows.first_class(now), None);
        let of_priority = |priority| Flow { class: FlowClass::of_priority(priority), account: None };
        flows.record_new(&of_priority(0), now);
        assert_eq!(flows.first_class(now), Some(FlowClass::LAST));
        flows.record_return(of_priority(9), Some(now + HOUR), now);
        flows.record_new(&of_priority(5), now);
        assert_eq!(flows.first_class(now), Some(FlowClass::of_priority(5)), "a blocked flow has no turn");
        assert_eq!(flows.first_class(now + HOUR), Some(FlowClass::of_priority(9)));
    }

    #[test]
    fn known_flows_are_bounded() {
        let (mut flows, now) = (KnownFlows::default(), Instant::now());
        for number in 0..=KNOWN_FLOWS_MAX {
            flows.record_return(flow(number), None, now);
        }
        assert_eq!(flows.0.len(), KNOWN_FLOWS_MAX as usize);
        flows.record_return(flow(0), None, now);
        assert!(flows.contains(&flow(0)) && !flows.contains(&flow(KNOWN_FLOWS_MAX)));
    }
}
