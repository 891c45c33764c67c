//! Since when a gate may judge by the store's clock: since its first exchange, or since somebody's word for the time before.
//!
//! Refuses to wait for ever: where nobody says anything, the state is begun anew.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_witness::Witness;
use crate::domain::time::Micros;

/// Longer than others need to say their word: two polls of the row, and what a poll takes.
const SILENCE_MAX: Duration = Duration::from_secs(4);

/// What the gate knows of the time before its own comparison.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trust {
    /// The store's clock at the exchange with which the comparison began.
    begun: Micros,
    /// By the store's clock, when it is given.
    since: Option<Micros>,
    silent_since: Option<Instant>,
}

/// What an exchange comes to.
#[must_use]
pub(super) enum Sought {
    /// From now on, with what may have been hidden before.
    Given { since: Micros, hidden: Duration },
    /// As before.
    Kept { since: Micros },
    /// Nobody has said anything yet.
    Wait,
    /// The state is older than what anybody vouches for.
    Refused,
}

impl Trust {
    /// The comparison began, or began anew, with this exchange.
    pub fn begin(&mut self, now: Micros) {
        *self = Self { begun: now, since: None, silent_since: None };
    }

    pub fn is_given(&self) -> bool {
        self.since.is_some()
    }

    /// An exchange showed a state that was born then. A state that is younger than our comparison needs nobody's word.
    pub fn seek(&mut self, born: Micros, now: Instant, witness: impl FnOnce() -> Witness) -> Sought {
        if let Some(since) = self.since {
            return Sought::Kept { since };
        }
        if born >= self.begun {
            self.since = Some(self.begun);
            return Sought::Given { since: self.begun, hidden: Duration::ZERO };
        }
        match witness() {
            Witness::Vouched { since, hidden } if born >= since => {
                self.since = Some(since);
                Sought::Given { since, hidden }
            }
            Witness::Silent if now < *self.silent_since.get_or_insert(now) + SILENCE_MAX => Sought::Wait,
            Witness::Vouched { .. } | Witness::Silent | Witness::Contradicted => {
                self.silent_since = None;
                Sought::Refused
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sought(trust: &mut Trust, born: u64, now: Instant, witness: Witness) -> String {
        match trust.seek(Micros(born), now, || witness) {
            Sought::Given { since, hidden } => format!("given since {} but {hidden:?}", since.0),
            Sought::Kept { since } => format!("kept since {}", since.0),
            Sought::Wait => "wait".to_owned(),
            Sought::Refused => "refused".to_owned(),
        }
    }

    #[test]
    fn a_state_is_trusted_when_we_or_somebody_who_vouches_saw_all_of_it() {
        let (now, hidden) = (Instant::now(), Duration::from_millis(3));
        let vouched = |since| Witness::Vouched { since: Micros(since), hidden };
        let begun = || {
            let mut trust = Trust::default();
            trust.begin(Micros(100));
            trust
        };
        for (born, witness, wanted) in [
            (100, Witness::Silent, "given since 100 but 0ns"),
            (101, Witness::Contradicted, "given since 100 but 0ns"),
            (99, vouched(40), "given since 40 but 3ms"),
            (40, vouched(40), "given since 40 but 3ms"),
            (39, vouched(40), "refused"),
            (99, Witness::Contradicted, "refused"),
            (99, Witness::Silent, "wait"),
        ] {
            assert_eq!(sought(&mut begun(), born, now, witness), wanted, "{born} {witness:?}");
        }
        let mut trust = begun();
        let _ = sought(&mut trust, 99, now, vouched(40));
        assert_eq!(sought(&mut trust, 99, now, Witness::Contradicted), "kept since 40");
        // A step: what it was trusted for before says nothing any more.
        trust.begin(Micros(500));
        assert!(!trust.is_given());
        assert_eq!(sought(&mut trust, 99, now, Witness::Silent), "wait");
        assert_eq!(sought(&mut trust, 99, now + SILENCE_MAX, Witness::Silent), "refused");
        assert_eq!(sought(&mut trust, 501, now + SILENCE_MAX, Witness::Silent), "given since 500 but 0ns");
    }
}
