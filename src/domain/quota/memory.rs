//! How far back the subjects' tallies reach: each is dropped when none of its uses can count any more, by the longest window
//! there is then.
//!
//! Refuses to take who was dropped for unused once a window is longer than that: such a limit waits as a new one does.

use super::tally::Tally;

#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// The longest window of all limits.
    longest_us: u64,
    /// Of every subject the uses of windows up to so long are known.
    known_within_us: u64,
    /// When the last use that longer ones do not know of may have begun to count.
    unknown_until_us: u64,
}

impl Memory {
    pub fn of(longest_us: u64) -> Self {
        Self { longest_us, known_within_us: longest_us, unknown_until_us: 0 }
    }

    /// Under limits of which the longest window is this; `before_us`: how long after it was granted a use may begin to count.
    pub fn adopt(&mut self, longest_us: u64, now_us: u64, before_us: u64) {
        if longest_us > self.longest_us {
            let waited_for = self.unknown_until_us + self.longest_us > now_us;
            self.known_within_us = if waited_for { self.known_within_us.min(self.longest_us) } else { self.longest_us };
            self.unknown_until_us = now_us + before_us;
        }
        self.longest_us = longest_us;
    }

    /// Holds what counts longer than a subject without a tally is known.
    pub fn hold(&self, tally: &mut Tally) {
        let longer = tally.cells.iter_mut().filter(|cell| cell.spec.window_us > self.known_within_us);
        longer.for_each(|cell| cell.hold(self.unknown_until_us));
    }
}
