//! Jobs that wait alone while their lane goes on: those that cost more than a limit has free, and those that the provider
//! refuses.

use std::time::Duration;

use tokio::time::Instant;

use super::LaneControl;
use crate::domain::account_faults::Requester;
use crate::domain::job::{Identifier, Job, JobId};
use crate::domain::time::millis_down;
use crate::domain::wait_reason::Wait;
use crate::fleet::report::{PauseCause, ReportedPause};
use crate::worker::backlog::cost_waits::{CostBound, CostWait};

/// A payment that the provider refuses, why, and until when it waits.
#[derive(Clone, Debug)]
pub(super) struct RefusedPayment {
    pub job: JobId,
    pub reason: String,
    pub until: Instant,
}

impl LaneControl {
    /// Jobs of at least this cost wait: a limit has too few free slots for them.
    pub fn record_cost_wait(&self, cost: u32, limit: &str, until: Instant) {
        self.cost_waits.lock().record(CostWait { cost, limit: limit.to_owned(), until }, Instant::now());
    }

    /// The wait of a job of this cost; `None`: it may ask for its permit.
    pub fn cost_wait(&self, cost: u32) -> Option<CostWait> {
        self.cost_waits.lock().of(cost, Instant::now()).cloned()
    }

    /// Why costly jobs wait, for reports.
    pub fn reported_cost_wait(&self) -> Option<ReportedPause> {
        let now = Instant::now();
        let waits = self.cost_waits.lock();
        let CostWait { cost, limit, until } = waits.least(now)?;
        let words = format!("payments that cost {cost} or more wait for limit {limit}; cheaper ones pass them");
        let ends_in_ms = Some(millis_down(until.saturating_duration_since(now)));
        Some(ReportedPause { by: PauseCause::Limit, limit: Some(limit.clone()), words, ends_in_ms, wait: None })
    }

    /// What the lane may send now; `None`: every job.
    pub fn cost_bound(&self) -> Option<CostBound> {
        self.cost_waits.lock().bound(Instant::now())
    }

    /// Records a payment that waits because it is refused, and until when, for reports: the last one of the lane.
    pub fn record_refused_payment(&self, job: &JobId, reason: &Wait, wait: Duration) {
        let refused = RefusedPayment { job: job.clone(), reason: reason.to_string(), until: Instant::now() + wait };
        *self.refused_payment.lock() = Some(refused);
    }

    /// The payment of the lane that was refused last, while it waits.
    pub fn reported_refusal(&self) -> Option<ReportedPause> {
        let refused = self.refused_payment.lock().clone()?;
        let left = refused.until.checked_duration_since(Instant::now())?;
        let words = format!("payment {} is refused, and waits alone: {}", refused.job, refused.reason);
        Some(ReportedPause { by: PauseCause::Setup, words, ends_in_ms: Some(millis_down(left)), ..Default::default() })
    }

    /// Until when a payment that was refused leaves the test of its account or lane to others; `None`: it may be sent.
    pub fn yields_for(&self, job: &Job) -> Option<Duration> {
        let now = self.since_origin(Instant::now());
        let of = Requester { account: job.account.as_ref().map(Identifier::as_str), job: &job.id };
        self.account_faults.lock().yields_until(of, now).map(|until| until.saturating_sub(now))
    }
}
