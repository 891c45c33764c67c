//! The flows of a lane that have jobs in the backlog, as far as this process knows.
//!
//! New jobs of such a flow are recorded in the backlog, behind the earlier ones. The ledger has all flows, and this
//! memory is bounded: a new job of a flow that is missing here asks for a permit like any other.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use crate::ledger::backlog::{FlowClass, FlowKey, FlowStatus};

/// Most flows that are known here: the memory of a few hundred jobs.
pub const KNOWN_FLOWS_MAX: u32 = 1_000;

#[derive(Debug, Default)]
pub struct KnownFlows(Mutex<HashMap<FlowKey, KnownFlow>>);

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

impl KnownFlows {
    /// Whether jobs of this flow wait; for how long it is blocked does not matter.
    pub fn contains(&self, flow: &FlowKey) -> bool {
        self.lock().contains_key(flow)
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Records that a job has entered the flow. Returns whether a dispatcher may claim it now.
    pub fn record_new(&self, flow: &FlowKey) -> bool {
        let now = Instant::now();
        let mut flows = self.lock();
        match flows.get_mut(flow) {
            Some(known) => {
                known.seen_at = now;
                known.is_free(now)
            }
            None => {
                if flows.len() < KNOWN_FLOWS_MAX as usize {
                    flows.insert(flow.clone(), KnownFlow { seen_at: now, blocked_until: None });
                }
                true
            }
        }
    }

    /// The most urgent class of the flows that are not blocked.
    pub fn first_class(&self) -> Option<FlowClass> {
        let now = Instant::now();
        let flows = self.lock();
        flows.iter().filter(|(_, known)| known.is_free(now)).map(|(flow, _)| flow.class).min()
    }

    /// Records that a job has returned to the flow, which is blocked until then.
    pub fn record_return(&self, flow: FlowKey, blocked_until: Option<Instant>) {
        let mut flows = self.lock();
        if flows.len() >= KNOWN_FLOWS_MAX as usize && !flows.contains_key(&flow) {
            return;
        }
        let seen_at = Instant::now();
        let blocked_until = blocked_until.max(flows.get(&flow).and_then(|known| known.blocked_until));
        flows.insert(flow, KnownFlow { seen_at, blocked_until });
    }

    /// Replaces what was known before `read_at` by the flows that the ledger has.
    pub fn refresh(&self, read_at: Instant, statuses: &[FlowStatus]) {
        let mut flows = self.lock();
        flows.retain(|_, known| known.seen_at >= read_at);
        for status in statuses {
            let flow = FlowKey { class: status.class, account: status.account.clone() };
            let blocked_until = status.blocked.as_ref().and_then(|blocked| read_at.checked_add(blocked.left));
            flows.entry(flow).or_insert(KnownFlow { seen_at: read_at, blocked_until });
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FlowKey, KnownFlow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::domain::job::Identifier;
    use crate::ledger::backlog::{BlockedFlow, BlockedReason};

    fn flow(account: &str) -> FlowKey {
        FlowKey { class: FlowClass::of_priority(0), account: Some(Identifier::new(account).unwrap()) }
    }

    fn status(account: &str, blocked: Option<Duration>) -> FlowStatus {
        let FlowKey { class, account } = flow(account);
        let blocked = blocked.map(|left| BlockedFlow { left, reason: BlockedReason::Limit, limit: None });
        FlowStatus { class, account, waiting: 1, blocked }
    }

    #[tokio::test(start_paused = true)]
    async fn refresh_keeps_what_came_later() {
        let flows = KnownFlows::default();
        flows.record_return(flow("old"), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        let read_at = Instant::now();
        flows.record_return(flow("new"), None);
        flows.refresh(read_at, &[status("stored", None)]);
        assert_eq!(["old", "new", "stored"].map(|account| flows.contains(&flow(account))), [false, true, true]);
        flows.refresh(read_at + Duration::from_millis(1), &[]);
        assert!(flows.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn blocked_flow_needs_no_claim() {
        let (flows, hour) = (KnownFlows::default(), Duration::from_secs(3_600));
        flows.refresh(Instant::now(), &[status("blocked", Some(hour)), status("free", None)]);
        assert_eq!(["blocked", "free"].map(|account| flows.record_new(&flow(account))), [false, true]);
        flows.record_return(flow("free"), Some(Instant::now() + hour));
        assert!(!flows.record_new(&flow("free")));
        tokio::time::advance(hour).await;
        assert!(flows.record_new(&flow("free")) && flows.record_new(&flow("blocked")));
    }

    #[tokio::test(start_paused = true)]
    async fn first_class_is_that_of_a_free_flow() {
        let (flows, hour) = (KnownFlows::default(), Duration::from_secs(3_600));
        assert_eq!(flows.first_class(), None);
        let of_priority = |priority| FlowKey { class: FlowClass::of_priority(priority), account: None };
        flows.record_new(&of_priority(0));
        assert_eq!(flows.first_class(), Some(FlowClass::LAST));
        flows.record_return(of_priority(9), Some(Instant::now() + hour));
        flows.record_new(&of_priority(5));
        assert_eq!(flows.first_class(), Some(FlowClass::of_priority(5)), "a blocked flow has no turn");
        tokio::time::advance(hour).await;
        assert_eq!(flows.first_class(), Some(FlowClass::of_priority(9)));
    }

    #[test]
    fn known_flows_are_bounded() {
        let flows = KnownFlows::default();
        for number in 0..=KNOWN_FLOWS_MAX {
            flows.record_return(flow(&format!("acct_{number}")), None);
        }
        assert_eq!(flows.lock().len(), KNOWN_FLOWS_MAX as usize);
        flows.record_return(flow("acct_0"), None);
        assert!(flows.contains(&flow("acct_0")) && !flows.contains(&flow(&format!("acct_{KNOWN_FLOWS_MAX}"))));
    }
}
