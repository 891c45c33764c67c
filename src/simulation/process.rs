//! Worker process in virtual time: its prefetch, its leaky bucket with worker slots, its pauses and its gate.
//!
//! The rules are those of `worker::lane` and `worker::scheduler`. The simulation advances the time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::event::JobIndex;
use super::gate::SimulatedGate;
use crate::domain::deadline_misses::MissStreak;
use crate::domain::leaky_bucket::LeakyBucket;
use crate::domain::provider::Provider;
use crate::domain::time::micros_up;
use crate::worker::lane::{RESUME_AHEAD, prefetch};

#[derive(Debug)]
pub(super) struct SimulatedProcess {
    pub gate: SimulatedGate,
    pub free_prefetch: u16,
    /// Takes no jobs before this instant.
    paused_until_us: u64,
    pub deadline_misses: MissStreak,
    bucket: LeakyBucket,
    workers: u32,
    working: u32,
    entered: u64,
    waiting: BTreeMap<(u8, u64), JobIndex>,
    keys: HashMap<JobIndex, (u8, u64)>,
    /// Instant for which the next egress is scheduled.
    egress_at_us: Option<u64>,
}

/// Result of an attempt to let a job out of the bucket.
pub(super) enum EgressAdmission {
    Job(JobIndex),
    /// The egress rate allows the next job at this instant, and no event is scheduled for it.
    WakeAt(u64),
    None,
}

impl SimulatedProcess {
    pub fn new(provider: &Provider, incarnation: u64, now_us: u64) -> Self {
        Self {
            gate: SimulatedGate::new(incarnation, now_us),
            free_prefetch: prefetch(provider),
            paused_until_us: 0,
            deadline_misses: MissStreak::default(),
            bucket: LeakyBucket::new(provider.egress_per_second()),
            workers: provider.workers,
            working: 0,
            entered: 0,
            waiting: BTreeMap::new(),
            keys: HashMap::new(),
            egress_at_us: None,
        }
    }

    pub fn accepts_jobs(&self, now_us: u64) -> bool {
        self.free_prefetch > 0 && self.paused_until_us <= now_us
    }

    /// Takes no jobs until shortly before this wait is over. Returns the end of the pause, if it is later than before.
    pub fn pause_intake(&mut self, now_us: u64, wait_us: u64) -> Option<u64> {
        let until_us = (now_us + wait_us).saturating_sub(micros_up(RESUME_AHEAD));
        let is_later = until_us > self.paused_until_us && until_us > now_us;
        self.paused_until_us = self.paused_until_us.max(until_us);
        is_later.then_some(until_us)
    }

    pub fn enter(&mut self, job: JobIndex, priority: u8) {
        self.entered += 1;
        let key = (u8::MAX - priority, self.entered);
        self.waiting.insert(key, job);
        self.keys.insert(job, key);
    }

    #[must_use]
    pub fn waits(&self, job: JobIndex) -> bool {
        self.keys.contains_key(&job)
    }

    /// Removes the job from the bucket; returns whether it was still there.
    pub fn abandon(&mut self, job: JobIndex) -> bool {
        self.keys.remove(&job).is_some_and(|key| self.waiting.remove(&key).is_some())
    }

    /// Lets one job out, if a worker slot is free and the egress rate allows it. `since_start` is the bucket's clock at
    /// `now_us`.
    pub fn admit(&mut self, now_us: u64, since_start: Duration) -> EgressAdmission {
        if self.working >= self.workers || self.waiting.is_empty() {
            return EgressAdmission::None;
        }
        let wait = self.bucket.wait(since_start);
        if !wait.is_zero() {
            let at_us = now_us + micros_up(wait);
            let scheduled = self.egress_at_us.is_some_and(|told_us| told_us > now_us && told_us <= at_us);
            if scheduled {
                return EgressAdmission::None;
            }
            self.egress_at_us = Some(at_us);
            return EgressAdmission::WakeAt(at_us);
        }
        let Some((_, job)) = self.waiting.pop_first() else { return EgressAdmission::None };
        self.keys.remove(&job);
        self.bucket.leak(since_start);
        self.working += 1;
        EgressAdmission::Job(job)
    }

    /// Frees a worker slot. `unused`: the instant on the bucket's clock, if no request was sent.
    pub fn free_worker_slot(&mut self, unused: Option<Duration>) {
        self.working = self.working.saturating_sub(1);
        if let Some(since_start) = unused {
            self.bucket.refund(since_start);
        }
    }
}
