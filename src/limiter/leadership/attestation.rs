//! The clock attestations of one quota in this worker: the one in the leader row, and the one that is due.
//!
//! An attestation is the offset between the store's clock and the database's. [`crate::domain::clock_comparison`]
//! checks it. One of another term does not count. See `docs/decisions/0013-verify-the-store-clock.md`.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_comparison::{
    ATTESTATION_RENEW_AFTER, AttestationCheck, ClockAttestation, ClockBounds, ClockOffset, DRIFT_PPM, LeaderRow,
    check_attestation,
};
use crate::domain::time::Micros;
use crate::limiter::StoreClockReading;

/// The database cuts its clock to milliseconds.
const TRUNCATION_NS: i128 = 1_000_000;

/// The database's clock and the row's attestation, as of the last poll.
struct PolledClock {
    sent_at: Instant,
    received_at: Instant,
    term: i64,
    now: Micros,
    attestation: Option<(ClockAttestation, Duration)>,
}

/// The store's clock as a gate knows it that has compared it without a break since `since`.
struct ComparedClock {
    run_id: String,
    since: Micros,
    reading: StoreClockReading,
}

#[derive(Default)]
pub(super) struct AttestationTracker {
    polled: Option<PolledClock>,
    compared: Option<ComparedClock>,
}

impl AttestationTracker {
    /// Records the row of a poll that was sent and answered at these instants.
    pub fn record_row(&mut self, row: Option<&LeaderRow>, sent_at: Instant, received_at: Instant) {
        self.polled = row.map(|row| PolledClock {
            sent_at,
            received_at,
            term: row.term,
            now: row.now,
            attestation: row.attestation,
        });
    }

    /// Records a gate's comparison with the clock of the store with this run id. `true` if its run id or begin is new.
    pub fn record_comparison(&mut self, run_id: &str, since: Micros, read: StoreClockReading) -> bool {
        let is_new = self.compared.as_ref().is_none_or(|known| known.run_id != run_id || known.since != since);
        self.compared = Some(ComparedClock { run_id: run_id.to_owned(), since, reading: read });
        is_new
    }

    /// Checks the row's attestation against a gate's reading of the store's clock.
    pub fn check_attestation(&self, read: &StoreClockReading) -> AttestationCheck {
        let Some(polled) = &self.polled else { return AttestationCheck::Missing };
        let Some((attestation, age)) = polled.attestation else { return AttestationCheck::Missing };
        check_attestation(polled.offset(read), attestation, age)
    }

    /// The attestation to record now, with the row's term, if the row's is missing, old or wrong.
    pub fn attestation_due(&self, run_id: &str) -> Option<(i64, ClockAttestation)> {
        let polled = self.polled.as_ref()?;
        let compared = self.compared.as_ref().filter(|compared| compared.run_id == run_id)?;
        let ours = ClockAttestation { offset: polled.offset(&compared.reading), since: compared.since };
        let is_current = polled.attestation.is_some_and(|(stored, age)| {
            let is_valid = matches!(check_attestation(ours.offset, stored, age), AttestationCheck::Valid { .. });
            stored.since > ours.since || (stored.since == ours.since && is_valid && age < ATTESTATION_RENEW_AFTER)
        });
        (!is_current).then_some((polled.term, ours))
    }
}

impl PolledClock {
    /// How far the store's clock is ahead of the database's, both at the instant at which the row arrived.
    fn offset(&self, read: &StoreClockReading) -> ClockOffset {
        let apart = nanos_from(read.at, self.received_at);
        let drift = apart.abs() * i128::from(DRIFT_PPM) / 1_000_000 + 1;
        let store = ClockBounds { least_ns: read.least_ns + apart - drift, most_ns: read.most_ns + apart + drift };
        let least_ns = i128::from(self.now.0) * 1_000;
        let most_ns = least_ns + TRUNCATION_NS + nanos_from(self.sent_at, self.received_at);
        ClockOffset::between(store, ClockBounds { least_ns, most_ns })
    }
}

/// Nanoseconds from one instant to the other; negative if `to` is the earlier one.
fn nanos_from(from: Instant, to: Instant) -> i128 {
    let nanos = |duration: Duration| i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX);
    nanos(to.saturating_duration_since(from)) - nanos(from.saturating_duration_since(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i128 = 1_000_000;
    /// The store's clock when the test begins, 5 s ahead of the database's.
    const STORE_NS: i128 = 1_800_000_005_000 * MS;
    const SINCE: Micros = Micros(1_800_000_000_000_000);

    fn row(at: Duration, attestation: Option<(ClockAttestation, Duration)>) -> LeaderRow {
        let now = Micros(1_800_000_000_000_000 + u64::try_from(at.as_micros()).unwrap());
        LeaderRow { holder: "redis:a".to_owned(), term: 3, age: Duration::ZERO, now, attestation }
    }

    #[test]
    fn missing_old_or_wrong_attestation_is_renewed() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let read = |ms: u64, stepped: i128| {
            let ns = STORE_NS + stepped + i128::from(ms) * MS;
            StoreClockReading { at: at(ms), least_ns: ns, most_ns: ns + MS / 2 }
        };
        let mut clocks = AttestationTracker::default();
        assert_eq!(
            (clocks.check_attestation(&read(0, 0)), clocks.attestation_due("a/3")),
            (AttestationCheck::Missing, None)
        );
        clocks.record_row(Some(&row(Duration::from_millis(1_000), None)), at(1_000), at(1_002));
        assert_eq!(clocks.check_attestation(&read(900, 0)), AttestationCheck::Missing);
        assert!(
            clocks.record_comparison("a/3", SINCE, read(900, 0))
                && !clocks.record_comparison("a/3", SINCE, read(950, 0))
        );
        assert_eq!(clocks.attestation_due("b/3"), None, "a comparison with another store does not count");
        let (term, word) = clocks.attestation_due("a/3").unwrap();
        assert_eq!((term, word.since), (3, SINCE));
        // 5 s, within the poll's 2 ms, the cut of 1 ms, the reading's half millisecond and the drift over 50 ms.
        let apart = [5_000_000 - word.offset.least_us, word.offset.most_us - 5_000_000];
        assert!((900..=1_200).contains(&apart[0]) && (2_400..=2_600).contains(&apart[1]), "{apart:?}");

        clocks.record_row(
            Some(&row(Duration::from_millis(2_000), Some((word, Duration::from_secs(1))))),
            at(2_000),
            at(2_001),
        );
        assert_eq!(clocks.attestation_due("a/3"), None);
        let AttestationCheck::Valid { since, undetected_step: hidden } = clocks.check_attestation(&read(2_100, 0))
        else {
            panic!("not attested")
        };
        assert!(since == SINCE && hidden < Duration::from_millis(8), "{hidden:?}");
        for step in [30_000 * MS, -30_000 * MS, 150 * MS] {
            assert_eq!(clocks.check_attestation(&read(2_100, step)), AttestationCheck::Mismatch, "{step}");
        }
        // Old, or from before a step that this worker has seen.
        clocks.record_row(
            Some(&row(Duration::from_millis(2_000), Some((word, ATTESTATION_RENEW_AFTER)))),
            at(2_000),
            at(2_001),
        );
        assert!(clocks.attestation_due("a/3").is_some());
        clocks.record_row(Some(&row(Duration::from_millis(2_000), Some((word, Duration::ZERO)))), at(2_000), at(2_001));
        clocks.record_comparison("a/3", Micros(SINCE.0 + 1), read(2_000, 30_000 * MS));
        assert!(clocks.attestation_due("a/3").is_some());
        // Another worker has seen a later step.
        let later = ClockAttestation { since: Micros(SINCE.0 + 2), ..word };
        clocks.record_row(
            Some(&row(Duration::from_millis(2_000), Some((later, Duration::ZERO)))),
            at(2_000),
            at(2_001),
        );
        assert_eq!(clocks.attestation_due("a/3"), None);
    }
}
