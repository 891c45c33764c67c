//! The egress of one lane: its worker slots and its leaky bucket. They bound for how many of its waiting jobs the gate
//! asks. It reads no clock.
//!
//! A job that waits for a limit holds neither a worker slot nor a place in the bucket, because both are taken with the
//! permit. So a job at a limit of its own costs the other jobs of its lane nothing.
//! See `docs/decisions/0038-permit-before-worker-slot.md`.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::domain::egress::LeakyBucket;

/// What a job waits for besides its permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressRule {
    /// A worker slot, at the egress rate.
    Paced,
    /// A worker slot alone: the limits apply their own pace.
    Exempt,
}

/// A job's claim on the egress of its lane.
#[derive(Clone, Debug)]
pub struct EgressRequest {
    pub lane: Arc<LaneEgress>,
    pub rule: EgressRule,
    /// Latest instant at which the job waits for a worker slot; then it is refused.
    pub wait_until: Instant,
}

/// Position of a job that waits for a worker slot or for the egress rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressPosition {
    /// Jobs of its lane that leave before it.
    pub jobs_ahead: u64,
    /// Wait by the egress rate alone: while all worker slots are in use, the job waits longer.
    pub egress_wait: Duration,
}

/// The egress of a lane in this process, shared by the lane and its gate.
#[derive(Debug)]
pub struct LaneEgress(Mutex<EgressState>);

#[derive(Debug)]
struct EgressState {
    workers: u32,
    busy: u32,
    /// Jobs at the gate that wait for the egress rate, too.
    paced: u32,
    bucket: LeakyBucket,
    origin: Instant,
    /// The gate waits for a worker slot.
    gate_waits: bool,
    /// Jobs at the gate that await a release of their own account or reference.
    release_waiters: u32,
}

/// Counts a job of a lane that waits for a slot in flight of its own account or reference, until it is dropped.
#[derive(Debug)]
pub(super) struct ReleaseWait(Arc<LaneEgress>);

impl ReleaseWait {
    pub fn new(lane: &Arc<LaneEgress>) -> Self {
        lane.0.lock().release_waiters += 1;
        Self(Arc::clone(lane))
    }
}

impl Drop for ReleaseWait {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.release_waiters = state.release_waiters.saturating_sub(1);
    }
}

/// The jobs of a lane that may leave now, and when the next one may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeEgress {
    slots: u32,
    ticks: u32,
    next_tick: Instant,
}

impl LaneEgress {
    /// An egress whose time begins at `origin`.
    pub(crate) fn starting_at(workers: u32, jobs_per_second: f64, origin: Instant) -> Arc<Self> {
        let bucket = LeakyBucket::new(jobs_per_second);
        let (busy, paced, release_waiters, gate_waits) = (0, 0, 0, false);
        Arc::new(Self(Mutex::new(EgressState { workers, busy, paced, bucket, origin, gate_waits, release_waiters })))
    }

    /// Jobs at the gate that wait for a slot in flight of their own account or reference. They hold up no others.
    pub(crate) fn release_waiters(&self) -> u32 {
        self.0.lock().release_waiters
    }

    /// The state, and the time since its origin.
    fn state_at(&self, now: Instant) -> (MutexGuard<'_, EgressState>, Duration) {
        let state = self.0.lock();
        let since_origin = now.saturating_duration_since(state.origin);
        (state, since_origin)
    }

    /// Applies a changed row; the caller wakes the gate.
    pub fn configure(&self, workers: u32, jobs_per_second: f64, now: Instant) {
        let (mut state, since_origin) = self.state_at(now);
        state.workers = workers;
        state.bucket.set_rate(jobs_per_second, since_origin);
        state.count_waiting(since_origin);
    }

    /// Number of its worker slots, free or not.
    pub(super) fn workers(&self) -> usize {
        usize::try_from(self.0.lock().workers).unwrap_or(usize::MAX)
    }

    /// Sets how many paced jobs wait at the gate. If a limit makes them wait, turns of the bucket that come meanwhile are
    /// kept for them: at most one for each free worker slot.
    pub(super) fn set_paced(&self, now: Instant, jobs: usize) {
        let (mut state, since_origin) = self.state_at(now);
        state.paced = u32::try_from(jobs).unwrap_or(u32::MAX);
        state.count_waiting(since_origin);
    }

    /// What is free now. A gate that finds no slot is notified when one is released.
    pub(super) fn free(&self, now: Instant) -> FreeEgress {
        let (mut state, since_origin) = self.state_at(now);
        let slots = state.free_slots();
        state.gate_waits = slots == 0;
        state.count_waiting(since_origin);
        let next_tick = now + state.bucket.wait(since_origin);
        FreeEgress { slots, ticks: state.bucket.ready(since_origin), next_tick }
    }

    /// Whether a job that comes now has a worker slot and a tick of the bucket.
    pub(crate) fn can_start(&self, now: Instant) -> bool {
        let (state, since_origin) = self.state_at(now);
        state.free_slots() > 0 && state.bucket.ready(since_origin) > 0
    }

    pub(crate) fn has_free_slot(&self) -> bool {
        self.0.lock().free_slots() > 0
    }

    /// Wait for the egress rate of a job with this many paced jobs before it.
    pub(super) fn wait_behind(&self, now: Instant, jobs_ahead: u64) -> Duration {
        let (state, since_origin) = self.state_at(now);
        state.bucket.wait_behind(since_origin, u32::try_from(jobs_ahead).unwrap_or(u32::MAX))
    }

    /// Takes a worker slot, and a tick of the bucket if the job is paced.
    pub(crate) fn occupy(&self, rule: EgressRule, now: Instant) {
        let (mut state, since_origin) = self.state_at(now);
        state.busy += 1;
        if rule == EgressRule::Paced {
            state.bucket.leak(since_origin);
        }
        state.count_waiting(since_origin);
    }

    /// Returns a worker slot, and the tick if it is refunded. Returns whether the gate should look at its waiters.
    pub(crate) fn vacate(&self, is_refunded: bool, now: Instant) -> bool {
        let (mut state, since_origin) = self.state_at(now);
        state.busy = state.busy.saturating_sub(1);
        if is_refunded {
            state.bucket.refund(since_origin);
        }
        state.count_waiting(since_origin);
        let is_awaited = state.busy < state.workers && std::mem::take(&mut state.gate_waits);
        is_awaited || is_refunded
    }
}

impl EgressState {
    fn free_slots(&self) -> u32 {
        self.workers.saturating_sub(self.busy)
    }

    fn count_waiting(&mut self, since_origin: Duration) {
        let waiting = self.paced.min(self.free_slots());
        self.bucket.set_waiting(since_origin, waiting);
    }
}

impl FreeEgress {
    /// Takes one job of what is free, if it may leave.
    pub fn take(&mut self, rule: EgressRule) -> bool {
        let may_leave = self.may_leave(rule);
        if may_leave {
            self.slots -= 1;
            self.ticks -= u32::from(rule == EgressRule::Paced);
        }
        may_leave
    }

    /// Whether a job may leave now.
    pub fn may_leave(&self, rule: EgressRule) -> bool {
        self.slots > 0 && (rule == EgressRule::Exempt || self.ticks > 0)
    }

    /// Whether no job may leave now; `has_exempt`: some do not wait for the egress rate.
    pub fn is_used_up(&self, has_exempt: bool) -> bool {
        self.slots == 0 || (self.ticks == 0 && !has_exempt)
    }

    /// When the next job may leave; `None`: when a worker slot is released.
    pub fn next_at(&self, rule: EgressRule, now: Instant) -> Option<Instant> {
        match rule {
            _ if self.slots == 0 => None,
            EgressRule::Exempt => Some(now),
            EgressRule::Paced => Some(self.next_tick),
        }
    }
}
