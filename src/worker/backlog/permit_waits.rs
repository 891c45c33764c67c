//! The waits of a lane's charges for their permits: they show whether a limit or the worker slots hold the lane back.
//!
//! A job at a limit of its account or reference waits as well, but then other jobs are granted at once. So the lane is
//! limited only if the last granted job waited, too, or if the gate is blocked.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A job that waits longer shows a limited lane. As long as permits are booked ahead at most.
const LIMITED_AFTER: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub struct PermitWaits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When each waiting job began to wait, in this order.
    waiting: BTreeMap<u64, Instant>,
    next_number: u64,
    last_granted_after: Duration,
}

/// One job's wait; it ends when this is dropped.
#[derive(Debug)]
pub struct OngoingWait<'a> {
    waits: &'a PermitWaits,
    number: u64,
    began: Instant,
}

impl PermitWaits {
    pub fn begin(&self) -> OngoingWait<'_> {
        let began = Instant::now();
        let mut state = self.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.waiting.insert(number, began);
        OngoingWait { waits: self, number, began }
    }

    /// Whether a job waits for longer than a free lane would let it. `is_blocked`: the gate is, by a limit.
    pub fn are_long(&self, is_blocked: impl FnOnce() -> bool) -> bool {
        let state = self.lock();
        let is_long = state.waiting.first_key_value().is_some_and(|(_, began)| began.elapsed() > LIMITED_AFTER);
        let last_was_long = state.last_granted_after > LIMITED_AFTER;
        drop(state);
        is_long && (last_was_long || is_blocked())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OngoingWait<'_> {
    /// The job has its permit.
    pub fn record_grant(&self) {
        self.waits.lock().last_granted_after = self.began.elapsed();
    }
}

impl Drop for OngoingWait<'_> {
    fn drop(&mut self) {
        self.waits.lock().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn own_limit_of_one_job_is_no_limited_lane() {
        let waits = PermitWaits::default();
        let own_limit = waits.begin();
        advance(LIMITED_AFTER * 2).await;
        assert!(!waits.are_long(|| false), "another job was never granted late");
        assert!(waits.are_long(|| true));
        let soon = waits.begin();
        soon.record_grant();
        drop(soon);
        assert!(!waits.are_long(|| false));
        drop(own_limit);
        assert!(!waits.are_long(|| true), "no job waits");
    }

    #[tokio::test(start_paused = true)]
    async fn late_grants_show_a_limited_lane() {
        let waits = PermitWaits::default();
        let (first, second) = (waits.begin(), waits.begin());
        advance(LIMITED_AFTER * 2).await;
        first.record_grant();
        drop(first);
        assert!(waits.are_long(|| false));
        drop(second);
        let third = waits.begin();
        assert!(!waits.are_long(|| true), "it has just begun");
        drop(third);
    }
}
