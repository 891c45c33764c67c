//! Clock attestation: a database record that lets a new process trust what was counted before its own first exchange
//! with the store.
//!
//! A process cannot see a step of the store's clock from before it ran. A process that compares clocks without a break
//! ([`super::clock_comparison`]) stores an attestation in the database. It contains the offset of the store's clock
//! from the database's clock, and the instant since which the store's clock made no step. A later process checks its
//! own reading of both clocks against it. If they differ too much, the state is reset.
//!
//! Not covered: one step that moves both clocks by the same amount, as when store and database share a machine. It must
//! come after an attestation and before the first comparison of a process that is granted permits. This module does no
//! I/O and reads no clock. See `docs/decisions/0013-verify-the-store-clock.md`.

use std::time::Duration;

use super::clock_comparison::DRIFT_PPM;
use super::provider::ProviderName;
use super::time::Micros;

/// The longest step that an attestation may leave undetected: permits are delayed by this for one window.
const UNDETECTED_STEP_MAX: Duration = Duration::from_millis(100);
/// Age at which an attestation is renewed: the clocks drift apart, and the step that may be undetected grows.
pub const ATTESTATION_RENEW_AFTER: Duration = Duration::from_secs(10);

/// Bounds of the offset of one clock from another, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    pub least_us: i64,
    pub most_us: i64,
}

impl ClockOffset {
    /// Offset of the store's clock from the database's, from the bounds of both at one instant, in nanoseconds.
    pub fn between(store: (i128, i128), database: (i128, i128)) -> Self {
        // Rounded outwards, so that the truncation to microseconds hides nothing.
        let down = |ns: i128| i64::try_from(ns.div_euclid(1_000)).unwrap_or(i64::MIN);
        let up = |ns: i128| i64::try_from((ns + 999).div_euclid(1_000)).unwrap_or(i64::MAX);
        Self { least_us: down(store.0 - database.1), most_us: up(store.1 - database.0) }
    }

    /// The offset after a time in which both clocks drifted.
    fn aged(self, age: Duration) -> Self {
        let drift_us = i64::try_from(age.as_micros() * u128::from(2 * DRIFT_PPM) / 1_000_000).unwrap_or(i64::MAX);
        Self { least_us: self.least_us.saturating_sub(drift_us), most_us: self.most_us.saturating_add(drift_us) }
    }
}

/// Statement of a process that compared the clocks without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockAttestation {
    pub offset: ClockOffset,
    /// Instant by the store's clock from which on it made no step, until the attestation was stored.
    pub since: Micros,
}

/// An attestation for one quota, in a term of its leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaAttestation {
    pub quota: ProviderName,
    pub term: i64,
    pub attestation: ClockAttestation,
}

/// Result of checking an attestation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a state without a valid attestation must be reset"]
pub enum AttestationCheck {
    /// The store's clock made no step since that instant, except one forward of at most `undetected_step`.
    Valid { since: Micros, undetected_step: Duration },
    /// There is no attestation, or it cannot be compared yet: ask again.
    Missing,
    /// The offset between the clocks has changed.
    Mismatch,
}

/// Checks an attestation of this age against one's own reading.
pub fn check(reading: ClockOffset, attestation: ClockAttestation, age: Duration) -> AttestationCheck {
    let attested = attestation.offset.aged(age);
    let (forward_us, back_us) =
        (reading.most_us.saturating_sub(attested.least_us), attested.most_us.saturating_sub(reading.least_us));
    let most_us = i64::try_from(UNDETECTED_STEP_MAX.as_micros()).unwrap_or(i64::MAX);
    if forward_us > most_us || back_us > most_us {
        return AttestationCheck::Mismatch;
    }
    let undetected_step = Duration::from_micros(u64::try_from(forward_us).unwrap_or(0));
    AttestationCheck::Valid { since: attestation.since, undetected_step }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000;
    const SINCE: Micros = Micros(77);

    fn offset(least_us: i64, most_us: i64) -> ClockOffset {
        ClockOffset { least_us, most_us }
    }

    #[test]
    fn attestation_bounds_the_undetected_step() {
        let attestation = ClockAttestation { offset: offset(-3 * MS, -MS), since: SINCE };
        let fresh = |reading| check(reading, attestation, Duration::ZERO);
        let valid =
            |hidden_us| AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_micros(hidden_us) };
        assert_eq!(fresh(offset(-2 * MS, -2 * MS)), valid(1_000));
        assert_eq!(fresh(offset(-3 * MS, -MS)), valid(2_000));
        // A step back frees no slot too early.
        assert_eq!(fresh(offset(-40 * MS, -39 * MS)), valid(0));
        // A step of up to a tenth of a second is waited for; a longer one is a mismatch, in both directions.
        assert_eq!(fresh(offset(96 * MS, 97 * MS)), valid(100_000));
        assert_eq!(fresh(offset(97 * MS, 98 * MS)), AttestationCheck::Mismatch);
        assert_eq!(fresh(offset(-102 * MS, -100 * MS)), AttestationCheck::Mismatch);
        assert_eq!(fresh(offset(30_000 * MS, 30_000 * MS)), AttestationCheck::Mismatch);
    }

    #[test]
    fn old_attestation_is_weaker() {
        let attestation = ClockAttestation { offset: offset(0, 0), since: SINCE };
        let at = |age| check(offset(0, 0), attestation, Duration::from_secs(age));
        // Two clocks, 500 parts per million each.
        assert_eq!(at(10), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(10) });
        assert_eq!(at(100), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(100) });
        assert_eq!(at(101), AttestationCheck::Mismatch);
        assert_eq!(check(offset(0, 0), attestation, Duration::MAX), AttestationCheck::Mismatch);
    }

    #[test]
    fn truncation_widens_the_offset() {
        assert_eq!(ClockOffset::between((10_500, 11_400), (2_000, 3_900)), offset(6, 10));
        assert_eq!(ClockOffset::between((1_000, 1_000), (5_001, 5_001)), offset(-5, -4));
    }
}
