//! The verification of the store's clock: the instant since which the gate may trust it.
//!
//! The gate's own comparison covers the time since its first exchange. The time before needs a clock attestation of
//! another process. If none comes in time, verification fails, and the state is reset.
//! See `docs/decisions/0013-verify-the-store-clock.md`.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_comparison::AttestationCheck;
use crate::domain::time::Micros;

/// Longer than another process needs to record an attestation: two polls of the row, and the time of a poll.
const ATTESTATION_WAIT_MAX: Duration = Duration::from_secs(4);

/// The verification as far as it has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClockVerification {
    /// The store's clock at the exchange with which the comparison began.
    comparison_began: Micros,
    /// The verified time begins here, by the store's clock; `None` before verification.
    verified_since: Option<Micros>,
    missing_since: Option<Instant>,
}

/// The result of one exchange with the store.
#[must_use]
pub(super) enum VerifyResult {
    /// Verified with this exchange; before, a step of at most this size may have gone undetected.
    Verified { since: Micros, undetected_step: Duration },
    /// Verified earlier.
    AlreadyVerified { since: Micros },
    /// No attestation yet.
    Pending,
    /// No attestation covers the age of the state.
    Failed,
}

impl ClockVerification {
    /// The comparison begins with this exchange, for the first time or again.
    pub fn begin(&mut self, now: Micros) {
        *self = Self { comparison_began: now, verified_since: None, missing_since: None };
    }

    pub fn is_verified(&self) -> bool {
        self.verified_since.is_some()
    }

    /// Verifies the clock for a state that began at `born`. A state that is younger than the gate's own comparison
    /// needs no attestation.
    pub fn verify(&mut self, born: Micros, now: Instant, attested: impl FnOnce() -> AttestationCheck) -> VerifyResult {
        if let Some(since) = self.verified_since {
            return VerifyResult::AlreadyVerified { since };
        }
        if born >= self.comparison_began {
            self.verified_since = Some(self.comparison_began);
            return VerifyResult::Verified { since: self.comparison_began, undetected_step: Duration::ZERO };
        }
        match attested() {
            AttestationCheck::Valid { since, undetected_step } if born >= since => {
                self.verified_since = Some(since);
                VerifyResult::Verified { since, undetected_step }
            }
            AttestationCheck::Missing if now < *self.missing_since.get_or_insert(now) + ATTESTATION_WAIT_MAX => {
                VerifyResult::Pending
            }
            AttestationCheck::Valid { .. } | AttestationCheck::Missing | AttestationCheck::Mismatch => {
                self.missing_since = None;
                VerifyResult::Failed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verify_text(
        verification: &mut ClockVerification,
        born: u64,
        now: Instant,
        attested: AttestationCheck,
    ) -> String {
        match verification.verify(Micros(born), now, || attested) {
            VerifyResult::Verified { since, undetected_step } => {
                format!("verified since {} but {undetected_step:?}", since.0)
            }
            VerifyResult::AlreadyVerified { since } => format!("already since {}", since.0),
            VerifyResult::Pending => "pending".to_owned(),
            VerifyResult::Failed => "failed".to_owned(),
        }
    }

    #[test]
    fn state_is_verified_by_own_or_attested_comparison() {
        let (now, hidden) = (Instant::now(), Duration::from_millis(3));
        let attested_since = |since| AttestationCheck::Valid { since: Micros(since), undetected_step: hidden };
        let started = || {
            let mut verification = ClockVerification::default();
            verification.begin(Micros(100));
            verification
        };
        for (born, attested, expected) in [
            (100, AttestationCheck::Missing, "verified since 100 but 0ns"),
            (101, AttestationCheck::Mismatch, "verified since 100 but 0ns"),
            (99, attested_since(40), "verified since 40 but 3ms"),
            (40, attested_since(40), "verified since 40 but 3ms"),
            (39, attested_since(40), "failed"),
            (99, AttestationCheck::Mismatch, "failed"),
            (99, AttestationCheck::Missing, "pending"),
        ] {
            assert_eq!(verify_text(&mut started(), born, now, attested), expected, "{born} {attested:?}");
        }
        let mut verification = started();
        let _ = verify_text(&mut verification, 99, now, attested_since(40));
        assert_eq!(verify_text(&mut verification, 99, now, AttestationCheck::Mismatch), "already since 40");
        // After a step the earlier verification does not count any more.
        verification.begin(Micros(500));
        assert!(!verification.is_verified());
        assert_eq!(verify_text(&mut verification, 99, now, AttestationCheck::Missing), "pending");
        assert_eq!(verify_text(&mut verification, 99, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing), "failed");
        assert_eq!(
            verify_text(&mut verification, 501, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing),
            "verified since 500 but 0ns"
        );
    }
}
