//! One worker process in virtual time: its places, its leaky bucket with workers, its rests and its gate.
//!
//! The rules are those of `worker::lane` and `worker::pool`. Refuses to move time: the world does.

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
    /// Takes nothing before.
    paused_until_us: u64,
    pub deadline_misses: MissStreak,
    bucket: LeakyBucket,
    workers: u32,
    working: u32,
    entered: u64,
    waiting: BTreeMap<(u8, u64), JobIndex>,
    places: HashMap<JobIndex, (u8, u64)>,
    /// For when the outflow's next wake-up is on the agenda.
    egress_at_us: Option<u64>,
}

/// What letting jobs out of the bucket comes to.
pub(super) enum EgressAdmission {
    Job(JobIndex),
    /// The outflow allows the next then, and nobody has been told yet.
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
            places: HashMap::new(),
            egress_at_us: None,
        }
    }

    pub fn accepts_jobs(&self, now_us: u64) -> bool {
        self.free_prefetch > 0 && self.paused_until_us <= now_us
    }

    /// Takes no more until shortly before this wait is over; returns until when, if that is news.
    pub fn pause_intake(&mut self, now_us: u64, wait_us: u64) -> Option<u64> {
        let until_us = (now_us + wait_us).saturating_sub(micros_up(RESUME_AHEAD));
        let news = until_us > self.paused_until_us && until_us > now_us;
        self.paused_until_us = self.paused_until_us.max(until_us);
        news.then_some(until_us)
    }

    pub fn enter(&mut self, job: JobIndex, priority: u8) {
        self.entered += 1;
        let place = (u8::MAX - priority, self.entered);
        self.waiting.insert(place, job);
        self.places.insert(job, place);
    }

    #[must_use]
    pub fn waits(&self, job: JobIndex) -> bool {
        self.places.contains_key(&job)
    }

    /// Whether the job still waited for a turn.
    pub fn abandon(&mut self, job: JobIndex) -> bool {
        self.places.remove(&job).is_some_and(|place| self.waiting.remove(&place).is_some())
    }

    /// One turn, if a worker is free and the outflow allows it. `since_start` is the bucket's clock at `now_us`.
    pub fn admit(&mut self, now_us: u64, since_start: Duration) -> EgressAdmission {
        if self.working >= self.workers || self.waiting.is_empty() {
            return EgressAdmission::None;
        }
        let wait = self.bucket.wait(since_start);
        if !wait.is_zero() {
            let at_us = now_us + micros_up(wait);
            let told = self.egress_at_us.is_some_and(|told_us| told_us > now_us && told_us <= at_us);
            if told {
                return EgressAdmission::None;
            }
            self.egress_at_us = Some(at_us);
            return EgressAdmission::WakeAt(at_us);
        }
        let Some((_, job)) = self.waiting.pop_first() else { return EgressAdmission::None };
        self.places.remove(&job);
        self.bucket.leak(since_start);
        self.working += 1;
        EgressAdmission::Job(job)
    }

    /// A turn is over; `unused`: at what instant of the bucket's clock, if no request came of it.
    pub fn free_worker_slot(&mut self, unused: Option<Duration>) {
        self.working = self.working.saturating_sub(1);
        if let Some(since_start) = unused {
            self.bucket.refund(since_start);
        }
    }
}
