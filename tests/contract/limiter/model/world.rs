//! The state of a small world: workers, requests in flight, requests that the provider may count, and the limiter's
//! store. [`super::steps`] computes the next worlds.

use std::rc::Rc;

use sluicegate::domain::quota::Quota;

use super::store::Store;
use super::*;

#[derive(Clone, Debug)]
pub struct Permit {
    pub call: u64,
    pub origins: Vec<u64>,
    pub start_us: u64,
    pub use_before_us: u64,
    pub answer_before_us: u64,
}

#[derive(Clone, Debug)]
pub enum Fate {
    Answered(u64),
    NotSent(Vec<u64>),
}

/// A reply in transit, with at least one permit.
#[derive(Clone, Debug)]
pub struct Unheard {
    pub departed_us: u64,
    pub call: u64,
    /// Waits and origins of the permits.
    pub granted: Vec<(u64, Vec<u64>)>,
}

#[derive(Clone, Debug)]
pub struct Worker {
    pub incarnation: u64,
    pub calls: u64,
    /// Jobs that have not begun, including jobs with a permit.
    pub jobs: u32,
    pub unheard: Option<Unheard>,
    pub permits: Vec<Permit>,
    pub releases: Vec<(u64, Fate)>,
}

/// A request whose answer its worker awaits.
#[derive(Clone, Debug)]
pub struct Request {
    pub permit: Permit,
    pub worker: usize,
    /// The provider counts it at some instant up to this one, or up to its answer if that is earlier.
    pub counts_until_us: u64,
}

#[derive(Clone, Debug)]
pub struct World {
    pub store: Rc<Store>,
    pub now_us: u64,
    pub workers: [Worker; 2],
    pub wire: Vec<Request>,
    /// Of requests that no worker awaits any more: the latest instant at which each may be counted. Youngest first, at
    /// most as many as the limit.
    pub ended_us: Vec<u64>,
    pub incarnations: u64,
    pub crashes_left: u32,
    /// Permits that may still be released unused in time.
    pub returns_left: u32,
    /// Most requests that one window may hold, at the last start.
    pub most: usize,
}

impl Worker {
    pub fn new(incarnation: u64, jobs: u32) -> Self {
        Self { incarnation, calls: 0, jobs, unheard: None, permits: Vec::new(), releases: Vec::new() }
    }
}

impl World {
    pub fn new(spec: &QuotaSpec, Size { jobs, crashes, returns }: Size) -> Self {
        let mut quota = Quota::default();
        let call = |number, rebuild| LimiterCall {
            incarnation: 9,
            number,
            requests: Vec::new(),
            releases: Vec::new(),
            pause: None,
            rebuild,
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".to_owned(),
        };
        let long_ago = Micros(START_US - 10_000_000);
        let cold = quota.call(long_ago, spec, &call(1, None));
        quota.call(long_ago, spec, &call(2, Some(forgotten_nothing(cold.state_epoch))));
        Self {
            store: Store::of(quota),
            now_us: START_US,
            workers: [Worker::new(1, jobs), Worker::new(2, jobs)],
            wire: Vec::new(),
            ended_us: Vec::new(),
            incarnations: 2,
            crashes_left: crashes,
            returns_left: returns,
            most: 0,
        }
    }

    /// Whether a worker has a release of a call that the store still counts; other releases have no effect.
    pub fn has_releases(&self, number: usize) -> bool {
        let worker = &self.workers[number];
        worker.releases.iter().any(|(call, _)| self.store.lease(worker.incarnation, *call).is_some())
    }

    /// Requests that may be counted within a window that ends now or later.
    pub fn counting(&self, window_us: u64) -> usize {
        let wire = self.wire.iter().map(|request| &request.counts_until_us);
        wire.chain(&self.ended_us).filter(|until_us| *until_us + window_us > self.now_us).count()
    }
}
