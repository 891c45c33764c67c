//! A payment whose request as such is refused, or cannot be built: how often, until when it waits, and what reports say.
//!
//! Whose trouble it is, `domain::account_faults` judges. The payment itself waits longer each time, and goes to review
//! where others pass between its refusals. The count is in the ledger: another worker may send it the next time.

use tokio::time::Instant;

use super::{JobRun, WaitCause};
use crate::domain::account_faults::FaultScope;
use crate::domain::disposition::{AttemptHistory, MISCONFIGURED_PAUSE, Refusals, Transition, after_refusal};
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::Outcome;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::PauseCause;
use crate::worker::intake::DeliveryAction;
use crate::worker::log_throttle::log_fault;

impl JobRun<'_> {
    /// Counts a refusal of this payment. If the ledger cannot, it counts as the first: the payment goes to review later.
    /// No second try: until the outcome is written, or known to be unwritten, others may take the payment over.
    pub(super) async fn count_refusal(&self) -> Refusals {
        let (ledger, version) = (&self.lane.worker.backends.ledger, self.settings.provider.version);
        match ledger.record_refusal(&self.active.lease, version).await {
            Ok(counted) => counted.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(job = %self.job.id, %error, "failed to count a refusal of a payment");
                Refusals::default()
            }
        }
    }

    /// Tells reports that this payment is refused and waits.
    pub(super) fn report_refusal(&self, next: &Transition) {
        if let Transition::Retry { after, reason, .. } = next {
            self.lane.control.record_refused_payment(&self.job.id, reason, *after);
        }
    }

    /// The cause of a pause, with the payment that was refused last.
    pub(super) fn naming_this_payment(&self, cause: Wait) -> Wait {
        let detail = cause.detail.unwrap_or_default();
        Wait { detail: Some(format!("{detail} (last refused: payment {})", self.job.id)), ..cause }
    }

    /// Ends the run of a payment that leaves the test of its account or lane to others; `None`: it does not.
    pub(super) async fn yield_test(&self) -> Option<DeliveryAction> {
        let wait = self.lane.control.yields_for(&self.job)?;
        let reason =
            Wait::with_detail(WaitReason::Misconfigured, "it was refused, and another payment is tried before");
        Some(self.delay(wait, WaitCause::new("misconfigured", reason)).await)
    }

    /// Delays a payment whose request cannot be built from the row or its secrets, as if it were refused.
    pub(super) async fn delay_unbuildable(&self, fault: LocalFault) -> DeliveryAction {
        let (reason, lane) = (fault.wait(), self.lane);
        let scope = lane.control.judge_refusal(&self.job, &Outcome::LocalFault(fault.clone()), Instant::now());
        let history = AttemptHistory { refusals: self.count_refusal().await, ..self.attempt_history() };
        let disposition = after_refusal(reason.clone(), &history, &self.settings.provider.retry_policy());
        self.report_refusal(&disposition.transition);
        if scope == Some(FaultScope::Lane) {
            lane.control.pause_sending(MISCONFIGURED_PAUSE, PauseCause::Setup, self.naming_this_payment(reason));
        }
        log_fault(lane, &fault, "the request of a payment cannot be built from the provider row");
        self.transition(disposition.transition, "misconfigured").await
    }
}
