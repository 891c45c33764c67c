//! What a job counts for at its lane's dispatcher while it is on its way. It counts no more when the guard is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::Instant;

use super::LaneBacklog;
use super::permit_waits::{GateTimes, OngoingWait};
use crate::domain::job::{FlowKey, JobId};

/// Counts one claimed job until its permit is granted, or until it is dropped.
#[derive(Debug)]
pub struct AheadGuard {
    backlog: Arc<LaneBacklog>,
    flow: FlowKey,
    is_released: AtomicBool,
}

/// A new job on its way to the gate; it counts until it waits there, or until this is dropped.
#[derive(Debug)]
pub struct Admission<'a> {
    backlog: &'a LaneBacklog,
    job: JobId,
}

/// A charge that waits for its permit; the wait ends when this is dropped.
#[derive(Debug)]
pub struct ChargeWait<'a> {
    backlog: &'a LaneBacklog,
    wait: OngoingWait,
}

impl AheadGuard {
    /// Of a job that the core has counted.
    pub(super) fn new(backlog: &Arc<LaneBacklog>, flow: FlowKey) -> Self {
        Self { backlog: Arc::clone(backlog), flow, is_released: AtomicBool::new(false) }
    }

    pub fn flow(&self) -> &FlowKey {
        &self.flow
    }

    /// The job has its permit.
    pub fn release(&self) {
        if !self.is_released.swap(true, Ordering::Relaxed) {
            self.backlog.wake_if(|core| core.release_ahead(&self.flow));
        }
    }
}

impl Drop for AheadGuard {
    fn drop(&mut self) {
        self.release();
    }
}

impl LaneBacklog {
    /// Counts a new job until it waits at the gate.
    pub fn admit(&self, job: &JobId) -> Admission<'_> {
        self.core.lock().waits.admit(job.clone());
        Admission { backlog: self, job: job.clone() }
    }

    /// Counts a charge that waits for its permit.
    pub fn begin_wait(&self, job: &JobId) -> ChargeWait<'_> {
        let wait = self.core.lock().waits.begin(job, Instant::now());
        ChargeWait { backlog: self, wait }
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.backlog.core.lock().waits.leave(&self.job);
    }
}

impl ChargeWait<'_> {
    /// The job has its permit.
    pub fn record_grant(&self, gate: GateTimes) {
        self.backlog.core.lock().waits.record_grant(self.wait, gate, Instant::now());
    }
}

impl Drop for ChargeWait<'_> {
    fn drop(&mut self) {
        self.backlog.core.lock().waits.end(self.wait);
    }
}
