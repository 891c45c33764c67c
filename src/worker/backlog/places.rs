//! The jobs of each flow that this process has claimed from the backlog and that wait for their permits.
//!
//! A flow's own limit may grant only a few of its jobs. So no more than a few are claimed ahead, and the others leave
//! the lane to other flows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::ledger::backlog::FlowKey;

/// Jobs of one flow that one claim takes at most, and with which a flow is full.
pub const FLOW_MAX: u32 = 8;

#[derive(Debug, Default)]
pub struct FlowPlaces {
    waiting: Mutex<HashMap<FlowKey, u32>>,
    /// A flow is no longer full.
    room: Notify,
}

/// Counts one claimed job until its permit is granted, or until it is dropped.
#[derive(Debug)]
pub struct FlowPlace {
    places: Arc<FlowPlaces>,
    flow: FlowKey,
    is_released: AtomicBool,
}

impl FlowPlaces {
    pub fn occupy(self: &Arc<Self>, flow: FlowKey) -> FlowPlace {
        *self.lock().entry(flow.clone()).or_default() += 1;
        FlowPlace { places: Arc::clone(self), flow, is_released: AtomicBool::new(false) }
    }

    /// The flows of which no more jobs are claimed now.
    pub fn full_flows(&self) -> Vec<FlowKey> {
        self.lock().iter().filter(|(_, jobs)| **jobs >= FLOW_MAX).map(|(flow, _)| flow.clone()).collect()
    }

    /// Waits until a flow that was full is not full any more.
    pub async fn room(&self) {
        self.room.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FlowKey, u32>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FlowPlace {
    #[must_use]
    pub fn flow(&self) -> &FlowKey {
        &self.flow
    }

    /// The job has its permit.
    pub fn release(&self) {
        if self.is_released.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.places.lock();
        let Some(jobs) = waiting.get_mut(&self.flow) else { return };
        let was_full = *jobs >= FLOW_MAX;
        *jobs -= 1;
        if *jobs == 0 {
            waiting.remove(&self.flow);
        }
        drop(waiting);
        if was_full {
            self.places.room.notify_one();
        }
    }
}

impl Drop for FlowPlace {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::ledger::backlog::FlowClass;

    #[test]
    fn full_flow_has_room_after_a_grant() {
        let places = Arc::new(FlowPlaces::default());
        let flow = FlowKey { class: FlowClass::UNKNOWN, account: None };
        let mut jobs: Vec<FlowPlace> = (0..FLOW_MAX).map(|_| places.occupy(flow.clone())).collect();
        assert_eq!(places.full_flows(), [flow]);
        assert_eq!(places.room().now_or_never(), None);
        jobs[0].release();
        jobs[0].release();
        assert_eq!((places.full_flows().len(), places.room().now_or_never()), (0, Some(())));
        drop(jobs.pop());
        assert_eq!(places.lock().values().sum::<u32>(), FLOW_MAX - 2);
        drop(jobs);
        assert!(places.lock().is_empty());
    }
}
