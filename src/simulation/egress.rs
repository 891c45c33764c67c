//! Egress of one lane in virtual time: its worker slots and its leaky bucket.
//!
//! The rules are those of `limiter::gate::egress`: a job takes both with its permit.

use std::time::Duration;

use crate::domain::leaky_bucket::LeakyBucket;
use crate::domain::provider::Provider;
use crate::domain::time::micros_up;

#[derive(Debug)]
pub(super) struct SimulatedEgress {
    bucket: LeakyBucket,
    workers: u32,
    busy: u32,
    started_us: u64,
    /// Jobs in the wait queue.
    waiting: u32,
}

impl SimulatedEgress {
    pub fn new(provider: &Provider, started_us: u64) -> Self {
        let bucket = LeakyBucket::new(provider.egress_per_second());
        Self { bucket, workers: provider.workers, busy: 0, started_us, waiting: 0 }
    }

    /// When the next job may leave; `None`: when a worker slot is released.
    pub fn next_at(&self, now_us: u64) -> Option<u64> {
        (self.free_slots() > 0).then(|| now_us + micros_up(self.bucket_at(now_us).wait(self.since_start(now_us))))
    }

    /// Jobs that may leave now.
    pub fn ready(&self, now_us: u64) -> usize {
        let ready = self.bucket_at(now_us).ready(self.since_start(now_us));
        usize::try_from(self.free_slots().min(ready)).unwrap_or(usize::MAX)
    }

    /// Sets how many jobs are in the wait queue.
    pub fn set_waiting(&mut self, now_us: u64, jobs: usize) {
        self.waiting = u32::try_from(jobs).unwrap_or(u32::MAX);
        self.bucket = self.bucket_at(now_us);
    }

    /// Takes a worker slot and a tick of the bucket.
    pub fn take(&mut self, now_us: u64) {
        self.busy += 1;
        let since_start = self.since_start(now_us);
        self.bucket.leak(since_start);
        self.bucket = self.bucket_at(now_us);
    }

    /// Releases a worker slot; `is_unused`: no request was sent, so the bucket is refunded.
    pub fn release(&mut self, now_us: u64, is_unused: bool) {
        self.busy = self.busy.saturating_sub(1);
        if is_unused {
            let since_start = self.since_start(now_us);
            self.bucket.refund(since_start);
        }
        self.bucket = self.bucket_at(now_us);
    }

    fn free_slots(&self) -> u32 {
        self.workers.saturating_sub(self.busy)
    }

    /// The bucket with the turns that waiting jobs keep.
    fn bucket_at(&self, now_us: u64) -> LeakyBucket {
        let mut bucket = self.bucket;
        bucket.set_waiting(self.since_start(now_us), self.waiting.min(self.free_slots()));
        bucket
    }

    fn since_start(&self, now_us: u64) -> Duration {
        Duration::from_micros(now_us.saturating_sub(self.started_us))
    }
}
