//! The waits of a lane's charges for their permits: they show whether a limit or the worker slots hold the lane back.
//!
//! A job at a limit of its account or reference waits as well, but then other jobs are granted at once. So the lane is
//! limited only if the last granted job waited, too, or if the gate is blocked; and if more jobs wait than it may start
//! soon. A lane that takes few jobs at a time has none that waits when the next one comes. So a grant that a limit has
//! made wait counts for as long as it waited.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::claimed_ahead::AHEAD_MIN;
use crate::domain::job::JobId;

/// A job that waits longer shows a limited lane. As long as permits are booked ahead at most.
pub const LIMITED_AFTER: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub struct PermitWaits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// New jobs on their way to the gate.
    admitted: HashSet<JobId>,
    /// When each waiting job began to wait, in this order.
    waiting: BTreeMap<u64, Instant>,
    next_number: u64,
    last_grant: Option<Grant>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    at: Instant,
    waited: Duration,
    /// A limit blocked the gate meanwhile. Other waits, as for a cold limiter, say nothing of the next job's.
    is_by_limit: bool,
}

impl Grant {
    fn shows_a_limited_lane(self) -> bool {
        self.is_by_limit && self.waited > LIMITED_AFTER && self.at.elapsed() < self.waited
    }
}

/// One job's wait; it ends when this is dropped.
#[derive(Debug)]
pub struct OngoingWait<'a> {
    waits: &'a PermitWaits,
    number: u64,
    began: Instant,
}

/// A new job on its way to the gate; it counts until it waits there, or until this is dropped.
#[derive(Debug)]
pub struct Admission<'a> {
    waits: &'a PermitWaits,
    job: JobId,
}

impl PermitWaits {
    pub fn admit(&self, job: &JobId) -> Admission<'_> {
        self.lock().admitted.insert(job.clone());
        Admission { waits: self, job: job.clone() }
    }

    pub fn begin(&self, job: &JobId) -> OngoingWait<'_> {
        let began = Instant::now();
        let mut state = self.lock();
        state.admitted.remove(job);
        let number = state.next_number;
        state.next_number += 1;
        state.waiting.insert(number, began);
        OngoingWait { waits: self, number, began }
    }

    /// Whether a job waits for longer than a free lane would let it, or surely will: more wait than the lane starts soon,
    /// or the last grant shows it.
    /// `is_blocked`: the gate is, by a limit.
    pub fn are_long(&self, startable_soon: impl FnOnce() -> u32, is_blocked: impl FnOnce() -> bool) -> bool {
        let state = self.lock();
        let pending = state.admitted.len() + state.waiting.len();
        let last_grant = state.last_grant;
        if pending >= AHEAD_MIN as usize && pending >= startable_soon() as usize
            || last_grant.is_some_and(Grant::shows_a_limited_lane)
        {
            return true;
        }
        let is_long = state.waiting.first_key_value().is_some_and(|(_, began)| began.elapsed() > LIMITED_AFTER);
        let last_was_long = last_grant.is_some_and(|grant| grant.waited > LIMITED_AFTER);
        drop(state);
        is_long && (last_was_long || is_blocked())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OngoingWait<'_> {
    /// The job has its permit; `is_by_limit`: a limit has blocked the gate since it came.
    pub fn record_grant(&self, is_by_limit: bool) {
        let grant = Grant { at: Instant::now(), waited: self.began.elapsed(), is_by_limit };
        self.waits.lock().last_grant = Some(grant);
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.waits.lock().admitted.remove(&self.job);
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

    fn job(number: u32) -> JobId {
        JobId::new(format!("job-{number}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn own_limit_of_one_job_is_no_limited_lane() {
        let waits = PermitWaits::default();
        let own_limit = waits.begin(&job(0));
        advance(LIMITED_AFTER * 2).await;
        assert!(!waits.are_long(|| 100, || false), "another job was never granted late");
        assert!(waits.are_long(|| 100, || true));
        let soon = waits.begin(&job(0));
        soon.record_grant(false);
        drop(soon);
        assert!(!waits.are_long(|| 100, || false));
        drop(own_limit);
        assert!(!waits.are_long(|| 100, || true), "no job waits");
    }

    /// A queue that was full when the lane started is not taken into memory first.
    #[tokio::test(start_paused = true)]
    async fn more_waits_than_start_soon_are_long_at_once() {
        let waits = PermitWaits::default();
        let is_long = |startable_soon| waits.are_long(|| startable_soon, || false);
        let mut admitted: Vec<Admission<'_>> = (0..50).map(|number| waits.admit(&job(number))).collect();
        assert_eq!([50, 51].map(is_long), [true, false]);
        // One that waits is counted once, and one that has gone no more.
        let waiting = waits.begin(&job(49));
        assert_eq!([50, 51].map(is_long), [true, false]);
        drop(admitted.pop());
        assert_eq!([50, 51].map(is_long), [true, false]);
        drop(waiting);
        assert_eq!([49, 50].map(is_long), [true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn late_grants_show_a_limited_lane() {
        let waits = PermitWaits::default();
        let (first, second) = (waits.begin(&job(0)), waits.begin(&job(0)));
        advance(LIMITED_AFTER * 2).await;
        first.record_grant(false);
        drop(first);
        assert!(waits.are_long(|| 100, || false));
        drop(second);
        let third = waits.begin(&job(0));
        assert!(!waits.are_long(|| 100, || true), "it has just begun");
        drop(third);
    }

    /// Of a lane with one place, no job waits when the next one comes.
    #[tokio::test(start_paused = true)]
    async fn grant_that_a_limit_delayed_counts_for_as_long_as_it_waited() {
        let waits = PermitWaits::default();
        let is_long = || waits.are_long(|| 100, || false);
        for (waited, is_by_limit, is_limited) in
            [(LIMITED_AFTER * 4, false, false), (LIMITED_AFTER, true, false), (LIMITED_AFTER * 4, true, true)]
        {
            let job = waits.begin(&job(0));
            advance(waited).await;
            job.record_grant(is_by_limit);
            drop(job);
            assert_eq!(is_long(), is_limited, "{waited:?}, by a limit: {is_by_limit}");
        }
        advance(LIMITED_AFTER * 3).await;
        assert!(is_long());
        advance(LIMITED_AFTER).await;
        assert!(!is_long());
    }
}
