//! Since when a gate may judge by the store's clock: since its first exchange, or since somebody's word for the time before.
//!
//! Refuses to wait for ever: where nobody says anything, the state is begun anew.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_attestation::AttestationCheck;
use crate::domain::time::Micros;

/// Longer than others need to say their word: two polls of the row, and what a poll takes.
const ATTESTATION_WAIT_MAX: Duration = Duration::from_secs(4);

/// What the gate knows of the time before its own comparison.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ClockVerification {
    /// The store's clock at the exchange with which the comparison began.
    comparison_began: Micros,
    /// By the store's clock, when it is given.
    verified_since: Option<Micros>,
    missing_since: Option<Instant>,
}

/// What an exchange comes to.
#[must_use]
pub(super) enum VerifyResult {
    /// From now on, with what may have been hidden before.
    Verified { since: Micros, undetected_step: Duration },
    /// As before.
    AlreadyVerified { since: Micros },
    /// Nobody has said anything yet.
    Pending,
    /// The state is older than what anybody vouches for.
    Failed,
}

impl ClockVerification {
    /// The comparison began, or began anew, with this exchange.
    pub fn begin(&mut self, now: Micros) {
        *self = Self { comparison_began: now, verified_since: None, missing_since: None };
    }

    pub fn is_verified(&self) -> bool {
        self.verified_since.is_some()
    }

    /// An exchange showed a state that was born then. A state that is younger than our comparison needs nobody's word.
    pub fn verify(&mut self, born: Micros, now: Instant, witness: impl FnOnce() -> AttestationCheck) -> VerifyResult {
        if let Some(since) = self.verified_since {
            return VerifyResult::AlreadyVerified { since };
        }
        if born >= self.comparison_began {
            self.verified_since = Some(self.comparison_began);
            return VerifyResult::Verified { since: self.comparison_began, undetected_step: Duration::ZERO };
        }
        match witness() {
            AttestationCheck::Valid { since, undetected_step: hidden } if born >= since => {
                self.verified_since = Some(since);
                VerifyResult::Verified { since, undetected_step: hidden }
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

    fn verify_text(trust: &mut ClockVerification, born: u64, now: Instant, witness: AttestationCheck) -> String {
        match trust.verify(Micros(born), now, || witness) {
            VerifyResult::Verified { since, undetected_step: hidden } => {
                format!("given since {} but {hidden:?}", since.0)
            }
            VerifyResult::AlreadyVerified { since } => format!("kept since {}", since.0),
            VerifyResult::Pending => "wait".to_owned(),
            VerifyResult::Failed => "refused".to_owned(),
        }
    }

    #[test]
    fn state_is_verified_by_own_or_attested_comparison() {
        let (now, hidden) = (Instant::now(), Duration::from_millis(3));
        let vouched = |since| AttestationCheck::Valid { since: Micros(since), undetected_step: hidden };
        let begun = || {
            let mut trust = ClockVerification::default();
            trust.begin(Micros(100));
            trust
        };
        for (born, witness, wanted) in [
            (100, AttestationCheck::Missing, "given since 100 but 0ns"),
            (101, AttestationCheck::Mismatch, "given since 100 but 0ns"),
            (99, vouched(40), "given since 40 but 3ms"),
            (40, vouched(40), "given since 40 but 3ms"),
            (39, vouched(40), "refused"),
            (99, AttestationCheck::Mismatch, "refused"),
            (99, AttestationCheck::Missing, "wait"),
        ] {
            assert_eq!(verify_text(&mut begun(), born, now, witness), wanted, "{born} {witness:?}");
        }
        let mut trust = begun();
        let _ = verify_text(&mut trust, 99, now, vouched(40));
        assert_eq!(verify_text(&mut trust, 99, now, AttestationCheck::Mismatch), "kept since 40");
        // A step: what it was trusted for before says nothing any more.
        trust.begin(Micros(500));
        assert!(!trust.is_verified());
        assert_eq!(verify_text(&mut trust, 99, now, AttestationCheck::Missing), "wait");
        assert_eq!(verify_text(&mut trust, 99, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing), "refused");
        assert_eq!(
            verify_text(&mut trust, 501, now + ATTESTATION_WAIT_MAX, AttestationCheck::Missing),
            "given since 500 but 0ns"
        );
    }
}
