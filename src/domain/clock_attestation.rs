//! Whether a process may judge by the store's clock what was counted before its own first exchange with the store.
//!
//! Nobody can see a step that was made before he was there. Whoever compares clocks without a break ([`super::clock_comparison`])
//! leaves his word with the database: how far the store's clock is ahead of the database's, and since which instant of the
//! store's it has made no step. One who comes later holds his own reading of both clocks against it. Refuses all I/O and every
//! clock, and refuses a word that is too coarse: then the state is begun anew.
//!
//! Not covered: one step that moves both clocks by the same amount, as when store and database share a machine, between a
//! word and the first exchange of one who is granted permits before anybody else has compared.

use std::time::Duration;

use super::clock_comparison::DRIFT_PPM;
use super::time::Micros;

/// The longest step that may stay hidden by a word: permits are held back by as much for one window.
const UNDETECTED_STEP_MAX: Duration = Duration::from_millis(100);
/// A word of this age is given anew: the clocks drift apart, and with them what may be hidden.
pub const ATTESTATION_RENEW_AFTER: Duration = Duration::from_secs(10);

/// How far one clock is ahead of another, in microseconds: no less and no more than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    pub least_us: i64,
    pub most_us: i64,
}

impl ClockOffset {
    /// Of the store before the database, from what each reads at one instant, in nanoseconds.
    #[must_use]
    pub fn between(store: (i128, i128), database: (i128, i128)) -> Self {
        // Outwards, so that cutting to microseconds hides nothing.
        let down = |ns: i128| i64::try_from(ns.div_euclid(1_000)).unwrap_or(i64::MIN);
        let up = |ns: i128| i64::try_from((ns + 999).div_euclid(1_000)).unwrap_or(i64::MAX);
        Self { least_us: down(store.0 - database.1), most_us: up(store.1 - database.0) }
    }

    /// After a while in which both clocks drifted.
    fn aged(self, age: Duration) -> Self {
        let drift_us = i64::try_from(age.as_micros() * u128::from(2 * DRIFT_PPM) / 1_000_000).unwrap_or(i64::MAX);
        Self { least_us: self.least_us.saturating_sub(drift_us), most_us: self.most_us.saturating_add(drift_us) }
    }
}

/// What somebody who compared without a break said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockAttestation {
    pub offset: ClockOffset,
    /// By the store's clock: no step from then on until the word was given.
    pub since: Micros,
}

/// What a word is worth to one who comes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is not vouched for must be begun anew"]
pub enum AttestationCheck {
    /// No step since that instant of the store's clock, but for one forward of at most `hidden`.
    Valid { since: Micros, undetected_step: Duration },
    /// Nobody has said anything yet, or it cannot be compared yet: ask again.
    Missing,
    /// The clocks do not stand to each other as they did.
    Mismatch,
}

/// Holds a word of this age against one's own reading.
pub fn check(read: ClockOffset, word: ClockAttestation, age: Duration) -> AttestationCheck {
    let said = word.offset.aged(age);
    let (forward_us, back_us) =
        (read.most_us.saturating_sub(said.least_us), said.most_us.saturating_sub(read.least_us));
    let most_us = i64::try_from(UNDETECTED_STEP_MAX.as_micros()).unwrap_or(i64::MAX);
    if forward_us > most_us || back_us > most_us {
        return AttestationCheck::Mismatch;
    }
    let hidden = Duration::from_micros(u64::try_from(forward_us).unwrap_or(0));
    AttestationCheck::Valid { since: word.since, undetected_step: hidden }
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
        let word = ClockAttestation { offset: offset(-3 * MS, -MS), since: SINCE };
        let fresh = |read| check(read, word, Duration::ZERO);
        let vouched =
            |hidden_us| AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_micros(hidden_us) };
        assert_eq!(fresh(offset(-2 * MS, -2 * MS)), vouched(1_000));
        assert_eq!(fresh(offset(-3 * MS, -MS)), vouched(2_000));
        // A step back hides nothing that would be free too early.
        assert_eq!(fresh(offset(-40 * MS, -39 * MS)), vouched(0));
        // Up to a tenth of a second is waited for, more is a step, either way.
        assert_eq!(fresh(offset(96 * MS, 97 * MS)), vouched(100_000));
        assert_eq!(fresh(offset(97 * MS, 98 * MS)), AttestationCheck::Mismatch);
        assert_eq!(fresh(offset(-102 * MS, -100 * MS)), AttestationCheck::Mismatch);
        assert_eq!(fresh(offset(30_000 * MS, 30_000 * MS)), AttestationCheck::Mismatch);
    }

    #[test]
    fn old_attestation_is_weaker() {
        let word = ClockAttestation { offset: offset(0, 0), since: SINCE };
        let at = |age| check(offset(0, 0), word, Duration::from_secs(age));
        // Two clocks, 500 parts per million each.
        assert_eq!(at(10), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(10) });
        assert_eq!(at(100), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(100) });
        assert_eq!(at(101), AttestationCheck::Mismatch);
        assert_eq!(check(offset(0, 0), word, Duration::MAX), AttestationCheck::Mismatch);
    }

    #[test]
    fn truncation_widens_the_offset() {
        assert_eq!(ClockOffset::between((10_500, 11_400), (2_000, 3_900)), offset(6, 10));
        assert_eq!(ClockOffset::between((1_000, 1_000), (5_001, 5_001)), offset(-5, -4));
    }
}
