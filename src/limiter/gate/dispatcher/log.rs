//! The log of a gate: what its core notices, and quotas without permits.
//!
//! A cause that lasts is logged once a minute ([`StallMonitor`]).
//!
//! [`StallMonitor`]: crate::limiter::gate::stall::StallMonitor

use tokio::time::Instant;

use super::PermitDispatcher;
use crate::domain::provider::ProviderName;
use crate::limiter::LimiterError;
use crate::limiter::gate::GateView;
use crate::limiter::gate::core::Notice;
use crate::limiter::gate::stall::StallReport;

const LATE_PERMITS: &str = "permits arrive too late: the limiter takes longer than the send budget";
const IMPLAUSIBLE_VERSION: &str = "the limiter's settings version cannot be true";

impl PermitDispatcher {
    pub(super) fn log_notices(&mut self) {
        for notice in self.core.take_notices() {
            self.log_notice(&notice, Instant::now());
        }
    }

    fn log_notice(&mut self, notice: &Notice, now: Instant) {
        let quota = &self.core.spec().quota;
        match *notice {
            Notice::PauseLifted => tracing::info!(%quota, "an operator has lifted the wait that the provider named"),
            Notice::StoreReplaced => {
                tracing::warn!(%quota, "the limiter store was replaced: its clock must be verified first");
            }
            Notice::ClockStepped { by, direction } => {
                tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step: its state is reset");
            }
            Notice::StateTampered(problem) => {
                if self.stall.should_log(problem, now) {
                    tracing::error!(
                        %quota, "{problem}: it is reset. Find out which program writes keys of limiter.prefix"
                    );
                }
            }
            Notice::ImplausibleVersion { ours, theirs } => {
                if self.stall.should_log(IMPLAUSIBLE_VERSION, now) {
                    tracing::error!(
                        %quota,
                        ours,
                        theirs,
                        "{IMPLAUSIBLE_VERSION}; its state is reset. Find out which program writes to the keys of \
                         limiter.prefix"
                    );
                }
            }
            Notice::NewerSettings { ours, theirs } => {
                tracing::warn!(%quota, ours, theirs, "no permits: the limiter has newer settings than this worker");
            }
            // So it is after every pause of all workers, and on a busy machine when two of them start together.
            Notice::Unattested => tracing::info!(
                %quota, "no clock attestation covers the limiter's state; rebuilding it from the ledger"
            ),
            Notice::LatePermits => {
                let stalled = self.stall.observe(LATE_PERMITS.to_owned(), false, now, now);
                self.log_stall_report(stalled, &self.core.spec().quota);
            }
        }
    }

    pub(super) fn log_stall(&mut self, view: &GateView, now: Instant) {
        let Some((by, until)) = &view.block else {
            if !self.core.is_asking() {
                self.stall.end();
            }
            return;
        };
        let stalled = self.stall.observe_block(by, *until, now);
        self.log_stall_report(stalled, &self.core.spec().quota);
    }

    fn log_stall_report(&self, stalled: Option<StallReport>, quota: &ProviderName) {
        let Some(StallReport { cause, lasted, wait, is_expected }) = stalled else { return };
        let waiting = self.core.view().waiting;
        if is_expected {
            tracing::info!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        } else {
            tracing::warn!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        }
    }

    pub(super) fn log_failure(&self, error: &LimiterError) {
        if self.core.has_failed() {
            return;
        }
        let quota = &self.core.spec().quota;
        // A start takes a moment. If it takes longer, the stall is logged.
        if self.core.is_starting() && matches!(error, LimiterError::Unavailable(_)) {
            tracing::info!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
        } else {
            tracing::warn!(%quota, %error, "no permits: the limiter cannot be asked, retrying");
        }
    }
}
