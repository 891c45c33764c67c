//! How often in a row a provider has refused for its limit what ours allowed, and let none through: whom it tells no wait,
//! waits longer with each round.
//!
//! A round is all requests that were under way when the refusal came: a hundred that are refused together ask for one
//! wait, not for a hundred doublings. Refuses to lengthen a wait that the provider names, and to learn a limit from
//! refusals: the row is an operator's.

use std::time::Duration;

/// The rounds of one kind of request at one provider. Instants are durations since any one origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleStreak {
    generations: u32,
    /// Requests that began earlier belong to a round before the last.
    since: Duration,
    /// Requests that began earlier belong to the last round.
    until: Duration,
}

impl ThrottleStreak {
    /// Which round in a row, counted from 1, the refusal of a request is that began then.
    #[must_use]
    pub fn generation(&self, began: Duration) -> u32 {
        if began < self.until { self.generations.max(1) } else { self.generations.saturating_add(1) }
    }

    /// The refusals of this round are waited for until then.
    pub fn record_throttled(&mut self, round: u32, until: Duration) {
        if round > self.generations {
            self.since = self.until;
        }
        self.generations = self.generations.max(round);
        self.until = self.until.max(until);
    }

    /// A request that began then was let through, and with it some of its round: the next refusal is the first in a row. A
    /// charge takes longer than its refusal, so that this is known after the round was refused.
    pub fn record_passed(&mut self, began: Duration) {
        if began >= self.since {
            self.generations = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At the second; a refusal is waited for one second for each of its round.
    #[derive(Clone, Copy, Debug)]
    enum ProviderAnswer {
        Throttled { began_s: u64, now_s: u64 },
        Passed { began_s: u64 },
    }

    fn generations(answers: &[ProviderAnswer]) -> Vec<u32> {
        let mut refusals = ThrottleStreak::default();
        let mut rounds = Vec::new();
        for answer in answers {
            match *answer {
                ProviderAnswer::Throttled { began_s, now_s } => {
                    let round = refusals.generation(Duration::from_secs(began_s));
                    refusals.record_throttled(round, Duration::from_secs(now_s + u64::from(round)));
                    rounds.push(round);
                }
                ProviderAnswer::Passed { began_s } => refusals.record_passed(Duration::from_secs(began_s)),
            }
        }
        rounds
    }

    #[test]
    fn generations_are_counted_not_requests() {
        let refused = |began_s, now_s| ProviderAnswer::Throttled { began_s, now_s };
        let let_through = |began_s| ProviderAnswer::Passed { began_s };
        for (answers, expected, why) in [
            (&[refused(0, 1)][..], &[1][..], "the first"),
            (&[refused(0, 1), refused(0, 1), refused(1, 1)], &[1, 1, 1], "under way together"),
            (&[refused(0, 1), refused(2, 3), refused(5, 6)], &[1, 2, 3], "each after the wait for the one before"),
            (&[refused(0, 1), refused(2, 3), refused(2, 4), refused(5, 5)], &[1, 2, 2, 2], "the later wait holds"),
            (&[refused(0, 1), refused(2, 3), let_through(5), refused(5, 6)], &[1, 2, 1], "one was let through"),
            (&[refused(0, 1), let_through(0), refused(2, 3)], &[1, 1], "some of a round were let through"),
            (
                &[refused(0, 1), refused(2, 3), let_through(2), refused(5, 6)],
                &[1, 2, 1],
                "the answer came after the refusal",
            ),
            (&[refused(0, 1), refused(2, 3), let_through(0), refused(5, 6)], &[1, 2, 3], "of a round before"),
            (&[refused(0, 1), let_through(0), refused(0, 1), refused(2, 3)], &[1, 1, 2], "refused together"),
        ] {
            assert_eq!(generations(answers), expected, "{why}");
        }
    }
}
