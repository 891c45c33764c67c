//! This worker's view of one quota's leadership: the leader row as last polled, and the store's reachability.
//!
//! A store counts as reachable only after it has responded; an open connection is not enough.
//!
//! The view has the clock attestations, too: the one in the leader row, and the one that is due. An attestation is the
//! offset between the store's clock and the database's. [`crate::domain::clock_comparison`] checks it. One of another
//! term does not count. See `docs/decisions/0013-verify-the-store-clock.md`.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_comparison::{
    ATTESTATION_RENEW_AFTER, AttestationCheck, ClockAttestation, ClockBounds, ClockOffset, DRIFT_PPM, LeaderRow,
    check_attestation,
};
use crate::domain::provider::StoreDown;
use crate::domain::time::Micros;
use crate::limiter::leader_election::{
    LeadershipDecision, LeadershipTiming, ObservedLeader, ObservedStore, PollResult, SHARE_HOLDER, decide,
};
use crate::limiter::{LimiterError, StoreClockReading, StoreConnection};

/// The database cuts its clock to milliseconds.
const TRUNCATION_NS: i128 = 1_000_000;

pub(super) struct LeadershipView {
    policy: StoreDown,
    timing: LeadershipTiming,
    polled: Option<PolledRow>,
    /// Arrival of the last reply that showed another holder than the reply before.
    changed_at: Option<Instant>,
    store: StoreStatus,
    /// The last comparison of a gate.
    compared: Option<ComparedClock>,
}

/// The row as of the last successful poll.
struct PolledRow {
    sent_at: Instant,
    received_at: Instant,
    row: Option<LeaderRow>,
    /// Arrival of the first reply that showed this holder in this term.
    first_seen_at: Instant,
}

enum StoreStatus {
    Unavailable { since: Instant, error: LimiterError },
    Reachable { connection: StoreConnection, since: Instant },
}

impl LeadershipView {
    /// The view of a quota that opens now: nothing polled, nothing connected.
    pub fn new(policy: StoreDown, timing: LeadershipTiming, now: Instant) -> Self {
        let error = LimiterError::Unavailable("not connected yet".to_owned());
        let store = StoreStatus::Unavailable { since: now, error };
        Self { policy, timing, polled: None, changed_at: None, store, compared: None }
    }

    /// Applies changed settings of the quota.
    pub fn apply_settings(&mut self, policy: StoreDown, timing: LeadershipTiming) {
        (self.policy, self.timing) = (policy, timing);
    }

    /// Records the row that a poll or a change of the row returned; it was sent and answered at these instants.
    pub fn record_row(&mut self, row: Option<LeaderRow>, sent_at: Instant, received_at: Instant) {
        let holder_and_term = |row: &Option<LeaderRow>| row.as_ref().map(|row| (row.holder.clone(), row.term));
        let known = self.polled.as_ref().filter(|polled| holder_and_term(&polled.row) == holder_and_term(&row));
        let first_seen_at = known.map_or(received_at, |polled| polled.first_seen_at);
        let before = self.polled.as_ref().and_then(|polled| polled.row.as_ref());
        if before.zip(row.as_ref()).is_some_and(|(before, row)| before.holder != row.holder) {
            self.changed_at = Some(received_at);
        }
        self.polled = Some(PolledRow { sent_at, received_at, row, first_seen_at });
    }

    /// Records that the store responded over this connection. `true` if that is a change.
    pub fn record_reachable(&mut self, connection: StoreConnection, now: Instant) -> bool {
        let (since, is_change) = match &self.store {
            StoreStatus::Unavailable { .. } => (now, true),
            StoreStatus::Reachable { connection: known, since } => (*since, *known != connection),
        };
        self.store = StoreStatus::Reachable { connection, since };
        is_change
    }

    /// Records that the store did not respond. `true` if that is a change.
    pub fn record_unavailable(&mut self, error: &LimiterError, now: Instant) -> bool {
        let (since, is_change) = match &self.store {
            StoreStatus::Unavailable { since, .. } => (*since, false),
            StoreStatus::Reachable { .. } => (now, true),
        };
        self.store = StoreStatus::Unavailable { since, error: error.clone() };
        is_change
    }

    pub fn decide(&self, now: Instant) -> LeadershipDecision {
        let since = |at: Instant| -> Duration { now.saturating_duration_since(at) };
        let store = match &self.store {
            StoreStatus::Unavailable { since: at, .. } => ObservedStore::Unavailable { unavailable_for: since(*at) },
            StoreStatus::Reachable { connection, since: at } => ObservedStore::Reachable {
                run_id: &connection.run_id,
                connected_for: since(connection.connected_at),
                reachable_for: since(*at),
            },
        };
        let polled = self.polled.as_ref().map(|polled| PollResult {
            age: since(polled.sent_at),
            row: polled.row.as_ref().map(|row| ObservedLeader {
                holder: &row.holder,
                age: row.age,
                known_for: since(polled.first_seen_at),
            }),
        });
        decide(store, polled, self.policy, self.timing)
    }

    /// Whether this worker has seen the holder change within this last time. The first holder is no change.
    pub fn changed_within(&self, time: Duration, now: Instant) -> bool {
        self.changed_at.is_some_and(|at| now.saturating_duration_since(at) < time)
    }

    /// Run id of the limiter state in the current holder's term.
    pub fn term_run_id(&self) -> Option<String> {
        let row = self.polled.as_ref()?.row.as_ref()?;
        let holder = row.holder.strip_prefix("redis:").unwrap_or(SHARE_HOLDER);
        Some(format!("{holder}/{}", row.term))
    }

    /// The connection over which the store is reachable.
    pub fn connection(&self) -> Option<&StoreConnection> {
        match &self.store {
            StoreStatus::Reachable { connection, .. } => Some(connection),
            StoreStatus::Unavailable { .. } => None,
        }
    }

    /// Why the store is unavailable, as the store or the connection reported it.
    pub fn unavailable_error(&self) -> LimiterError {
        match &self.store {
            StoreStatus::Unavailable { error, .. } => error.clone(),
            StoreStatus::Reachable { .. } => {
                LimiterError::Unavailable("the limiter store is only just available again".to_owned())
            }
        }
    }

    /// Records a gate's comparison with the clock of the store with this run id. `true` if its run id or begin is new.
    pub fn record_comparison(&mut self, run_id: &str, since: Micros, read: StoreClockReading) -> bool {
        let is_new = self.compared.as_ref().is_none_or(|known| known.run_id != run_id || known.since != since);
        self.compared = Some(ComparedClock { run_id: run_id.to_owned(), since, reading: read });
        is_new
    }

    /// Checks the row's attestation against a gate's reading of the store's clock.
    pub fn check_attestation(&self, read: &StoreClockReading) -> AttestationCheck {
        let check = |polled: &PolledRow| {
            let row = polled.row.as_ref()?;
            let (attestation, age) = row.attestation?;
            Some(check_attestation(polled.offset(row, read), attestation, age))
        };
        self.polled.as_ref().and_then(check).unwrap_or(AttestationCheck::Missing)
    }

    /// The attestation to record now, with the row's term, if the row's is missing, old or wrong.
    pub fn attestation_due(&self) -> Option<(i64, ClockAttestation)> {
        let (polled, run_id) = (self.polled.as_ref()?, self.term_run_id()?);
        let row = polled.row.as_ref()?;
        let compared = self.compared.as_ref().filter(|compared| compared.run_id == run_id)?;
        let ours = ClockAttestation { offset: polled.offset(row, &compared.reading), since: compared.since };
        let is_current = row.attestation.is_some_and(|(stored, age)| {
            let is_valid = matches!(check_attestation(ours.offset, stored, age), AttestationCheck::Valid { .. });
            stored.since > ours.since || (stored.since == ours.since && is_valid && age < ATTESTATION_RENEW_AFTER)
        });
        (!is_current).then_some((row.term, ours))
    }
}

/// The store's clock as a gate knows it that has compared it without a break since `since`.
struct ComparedClock {
    run_id: String,
    since: Micros,
    reading: StoreClockReading,
}

impl PolledRow {
    /// How far the store's clock is ahead of the database's, both at the instant at which the row arrived.
    fn offset(&self, row: &LeaderRow, read: &StoreClockReading) -> ClockOffset {
        let apart = nanos_from(read.at, self.received_at);
        let drift = apart.abs() * i128::from(DRIFT_PPM) / 1_000_000 + 1;
        let store = ClockBounds { least_ns: read.least_ns + apart - drift, most_ns: read.most_ns + apart + drift };
        let least_ns = i128::from(row.now.0) * 1_000;
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

    /// Workers that start together set the first holder. A fail-over a moment later is no change back and forth.
    #[test]
    fn first_holder_is_no_change() {
        let begin = Instant::now();
        let at = |s: u64| begin + Duration::from_secs(s);
        let minute = Duration::from_secs(60);
        let timing = LeadershipTiming::with_poll_interval(Duration::from_secs(1));
        let mut view = LeadershipView::new(StoreDown::Wait, timing, begin);
        let mut changed = |s: u64, holder: Option<&str>| {
            let row = holder.map(|holder| LeaderRow { holder: holder.to_owned(), ..row(at(s) - begin, None) });
            view.record_row(row, at(s), at(s));
            view.changed_within(minute, at(s))
        };
        assert_eq!([changed(1, None), changed(2, Some("redis:a")), changed(3, Some("redis:a"))], [false; 3]);
        assert_eq!([changed(4, Some("redis:b")), changed(63, Some("redis:b"))], [true; 2]);
        assert!(!changed(64, Some("redis:b")));
    }

    #[test]
    fn missing_old_or_wrong_attestation_is_renewed() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let read = |ms: u64, stepped: i128| {
            let ns = STORE_NS + stepped + i128::from(ms) * MS;
            StoreClockReading { at: at(ms), least_ns: ns, most_ns: ns + MS / 2 }
        };
        let timing = LeadershipTiming::with_poll_interval(Duration::from_secs(1));
        let mut clocks = LeadershipView::new(StoreDown::Wait, timing, begin);
        assert_eq!(
            (clocks.check_attestation(&read(0, 0)), clocks.attestation_due()),
            (AttestationCheck::Missing, None)
        );
        clocks.record_row(Some(row(Duration::from_millis(1_000), None)), at(1_000), at(1_002));
        assert_eq!(clocks.check_attestation(&read(900, 0)), AttestationCheck::Missing);
        assert!(
            clocks.record_comparison("a/3", SINCE, read(900, 0))
                && !clocks.record_comparison("a/3", SINCE, read(950, 0))
        );
        let other = LeaderRow { holder: "redis:b".to_owned(), ..row(Duration::from_millis(1_000), None) };
        clocks.record_row(Some(other), at(1_000), at(1_002));
        assert_eq!(clocks.attestation_due(), None, "a comparison with another store does not count");
        clocks.record_row(Some(row(Duration::from_millis(1_000), None)), at(1_000), at(1_002));
        let (term, word) = clocks.attestation_due().unwrap();
        assert_eq!((term, word.since), (3, SINCE));
        // 5 s, within the poll's 2 ms, the cut of 1 ms, the reading's half millisecond and the drift over 50 ms.
        let apart = [5_000_000 - word.offset.least_us, word.offset.most_us - 5_000_000];
        assert!((900..=1_200).contains(&apart[0]) && (2_400..=2_600).contains(&apart[1]), "{apart:?}");

        clocks.record_row(
            Some(row(Duration::from_millis(2_000), Some((word, Duration::from_secs(1))))),
            at(2_000),
            at(2_001),
        );
        assert_eq!(clocks.attestation_due(), None);
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
            Some(row(Duration::from_millis(2_000), Some((word, ATTESTATION_RENEW_AFTER)))),
            at(2_000),
            at(2_001),
        );
        assert!(clocks.attestation_due().is_some());
        clocks.record_row(Some(row(Duration::from_millis(2_000), Some((word, Duration::ZERO)))), at(2_000), at(2_001));
        clocks.record_comparison("a/3", Micros(SINCE.0 + 1), read(2_000, 30_000 * MS));
        assert!(clocks.attestation_due().is_some());
        // Another worker has seen a later step.
        let later = ClockAttestation { since: Micros(SINCE.0 + 2), ..word };
        clocks.record_row(Some(row(Duration::from_millis(2_000), Some((later, Duration::ZERO)))), at(2_000), at(2_001));
        assert_eq!(clocks.attestation_due(), None);
    }
}
