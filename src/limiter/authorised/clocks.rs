//! The store's clock beside the database's, as this worker sees them for one quota: what is said of them in the row, and what
//! is to be said anew.
//!
//! Refuses to judge: [`crate::domain::clock_witness`] does. Refuses what was said or kept in another term.

use std::time::Duration;

use tokio::time::Instant;

use crate::domain::clock_comparison::DRIFT_PPM;
use crate::domain::clock_witness::{Ahead, GIVEN_ANEW_AFTER, Witness, Word, judge};
use crate::domain::time::Micros;
use crate::limiter::{AuthorityRow, StoreReading};

/// The database cuts its clock to milliseconds.
const CUT_NS: i128 = 1_000_000;

/// The row as it was polled.
struct Told {
    departed: Instant,
    arrived: Instant,
    term: i64,
    now: Micros,
    word: Option<(Word, Duration)>,
}

/// What a gate knows that compares without a break.
struct Kept {
    run_id: String,
    since: Micros,
    read: StoreReading,
}

#[derive(Default)]
pub(super) struct Clocks {
    told: Option<Told>,
    kept: Option<Kept>,
}

impl Clocks {
    /// A poll that departed and arrived at these instants showed this row.
    pub fn told(&mut self, row: Option<&AuthorityRow>, departed: Instant, arrived: Instant) {
        self.told = row.map(|row| Told { departed, arrived, term: row.term, now: row.now, word: row.word });
    }

    /// A gate has compared the clock of the store that it calls by this id since then. True if that is news.
    pub fn kept(&mut self, run_id: &str, since: Micros, read: StoreReading) -> bool {
        let news = self.kept.as_ref().is_none_or(|kept| kept.run_id != run_id || kept.since != since);
        self.kept = Some(Kept { run_id: run_id.to_owned(), since, read });
        news
    }

    /// What the row's word is worth to a gate that reads the store's clock so.
    pub fn witness(&self, read: &StoreReading) -> Witness {
        let Some(told) = &self.told else { return Witness::Silent };
        let Some((word, age)) = told.word else { return Witness::Silent };
        judge(told.ahead(read), word, age)
    }

    /// The word that should be in the row now, with the row's term, if there is none, an old one, or another one.
    pub fn word_due(&self, run_id: &str) -> Option<(i64, Word)> {
        let told = self.told.as_ref()?;
        let kept = self.kept.as_ref().filter(|kept| kept.run_id == run_id)?;
        let word = Word { ahead: told.ahead(&kept.read), since: kept.since };
        let holds = told.word.is_some_and(|(said, age)| {
            let vouches = matches!(judge(word.ahead, said, age), Witness::Vouched { .. });
            said.since > word.since || (said.since == word.since && vouches && age < GIVEN_ANEW_AFTER)
        });
        (!holds).then_some((told.term, word))
    }
}

impl Told {
    /// Of the store before the database, both brought to the instant at which the row arrived.
    fn ahead(&self, read: &StoreReading) -> Ahead {
        let apart = nanos_from(read.at, self.arrived);
        let drift = apart.abs() * i128::from(DRIFT_PPM) / 1_000_000 + 1;
        let store = (read.least_ns + apart - drift, read.most_ns + apart + drift);
        let now_ns = i128::from(self.now.0) * 1_000;
        Ahead::of(store, (now_ns, now_ns + CUT_NS + nanos_from(self.departed, self.arrived)))
    }
}

/// Negative if the second instant is the earlier one.
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

    fn row(at: Duration, word: Option<(Word, Duration)>) -> AuthorityRow {
        let now = Micros(1_800_000_000_000_000 + u64::try_from(at.as_micros()).unwrap());
        AuthorityRow { holder: "redis:a".to_owned(), term: 3, age: Duration::ZERO, now, word }
    }

    #[test]
    fn a_word_is_given_when_there_is_none_and_again_when_it_is_old_or_wrong() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let read = |ms: u64, stepped: i128| {
            let ns = STORE_NS + stepped + i128::from(ms) * MS;
            StoreReading { at: at(ms), least_ns: ns, most_ns: ns + MS / 2 }
        };
        let mut clocks = Clocks::default();
        assert_eq!((clocks.witness(&read(0, 0)), clocks.word_due("a/3")), (Witness::Silent, None));
        clocks.told(Some(&row(Duration::from_millis(1_000), None)), at(1_000), at(1_002));
        assert_eq!(clocks.witness(&read(900, 0)), Witness::Silent);
        assert!(clocks.kept("a/3", SINCE, read(900, 0)) && !clocks.kept("a/3", SINCE, read(950, 0)));
        assert_eq!(clocks.word_due("b/3"), None, "what was kept of another store says nothing");
        let (term, word) = clocks.word_due("a/3").unwrap();
        assert_eq!((term, word.since), (3, SINCE));
        // 5 s, but for the poll's 2 ms, the cut of 1 ms, the reading's half and the drift over 50 ms.
        let apart = [5_000_000 - word.ahead.least_us, word.ahead.most_us - 5_000_000];
        assert!((900..=1_200).contains(&apart[0]) && (2_400..=2_600).contains(&apart[1]), "{apart:?}");

        clocks.told(
            Some(&row(Duration::from_millis(2_000), Some((word, Duration::from_secs(1))))),
            at(2_000),
            at(2_001),
        );
        assert_eq!(clocks.word_due("a/3"), None);
        let Witness::Vouched { since, hidden } = clocks.witness(&read(2_100, 0)) else { panic!("not vouched for") };
        assert!(since == SINCE && hidden < Duration::from_millis(8), "{hidden:?}");
        for step in [30_000 * MS, -30_000 * MS, 150 * MS] {
            assert_eq!(clocks.witness(&read(2_100, step)), Witness::Contradicted, "{step}");
        }
        // Old, or given before a step that we have seen.
        clocks.told(Some(&row(Duration::from_millis(2_000), Some((word, GIVEN_ANEW_AFTER)))), at(2_000), at(2_001));
        assert!(clocks.word_due("a/3").is_some());
        clocks.told(Some(&row(Duration::from_millis(2_000), Some((word, Duration::ZERO)))), at(2_000), at(2_001));
        clocks.kept("a/3", Micros(SINCE.0 + 1), read(2_000, 30_000 * MS));
        assert!(clocks.word_due("a/3").is_some());
        // Somebody else knows of a later step.
        let later = Word { since: Micros(SINCE.0 + 2), ..word };
        clocks.told(Some(&row(Duration::from_millis(2_000), Some((later, Duration::ZERO)))), at(2_000), at(2_001));
        assert_eq!(clocks.word_due("a/3"), None);
    }
}
