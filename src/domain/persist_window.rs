//! Persist window: how many granted permits may be unpersisted, so that each is persisted in time to be used.
//!
//! A ledger that takes n requests a second cannot take a burst of a thousand permits within a budget of 50 ms. Permits
//! that miss it cost their slots. So the window follows the time that writes take. It grows while that is far below the
//! budget, stays in between, and is halved when a permit misses the budget (additive increase, multiplicative
//! decrease). A window that was not used does not grow.

use std::time::Duration;

/// Requests a second that any ledger is assumed to persist before it is measured.
const INITIAL_PER_SECOND: f64 = 500.0;
/// Share of the budget that the first window may take.
const INITIAL_BUDGET_SHARE: f64 = 0.5;
const WINDOW_MIN: f64 = 1.0;
const WINDOW_MAX: f64 = 10_000.0;
/// Lower bound of a cut: a late permit in a small window does not cut below it.
const DECREASE_MIN: f64 = 8.0;

/// Window of unpersisted permits, and the number of cuts.
#[derive(Clone, Debug, PartialEq)]
pub struct AimdWindow {
    window: f64,
    epoch: u64,
}

/// One permit that was persisted, or that missed its budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistSample {
    /// Time since the grant.
    pub took: Duration,
    /// Time that the permit had, from the grant.
    pub budget: Duration,
    /// Unpersisted permits when it was granted, including itself.
    pub unpersisted: u32,
    /// [`AimdWindow::epoch`] when it was granted.
    pub epoch: u64,
}

impl AimdWindow {
    /// First window for an unknown ledger: what it can persist within half of the budget.
    pub fn new(budget: Duration) -> Self {
        let first = INITIAL_PER_SECOND * budget.as_secs_f64() * INITIAL_BUDGET_SHARE;
        Self { window: first.clamp(WINDOW_MIN, WINDOW_MAX), epoch: 0 }
    }

    /// Permits that may be unpersisted at once, 1 to 10,000.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 1 to 10,000")]
    pub fn window(&self) -> u32 {
        self.window.clamp(WINDOW_MIN, WINDOW_MAX) as u32
    }

    /// Number of cuts so far: identifies the window that a permit was granted under.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records one permit. Permits granted before the last cut are ignored, because that cut counted them.
    pub fn record(&mut self, sample: PersistSample) {
        if sample.epoch != self.epoch {
            return;
        }
        let unpersisted = f64::from(sample.unpersisted);
        let used_share = sample.took.as_secs_f64() / sample.budget.as_secs_f64().max(f64::MIN_POSITIVE);
        let is_full = unpersisted * 2.0 >= self.window;
        self.window = match used_share {
            share if share > 1.0 => {
                self.epoch += 1;
                (self.window / 2.0).min(unpersisted.max(DECREASE_MIN))
            }
            // In time, but the next burst would not be.
            share if share > 0.6 => self.window - 0.5,
            share if share > 0.4 || !is_full => self.window,
            share if share > 0.25 => self.window + self.window.recip(),
            _ => self.window + 1.0,
        }
        .clamp(WINDOW_MIN, WINDOW_MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const BUDGET: Duration = Duration::from_millis(50);

    fn after(samples: &[(u64, u32)]) -> AimdWindow {
        let mut window = AimdWindow::new(BUDGET);
        for (took_ms, unpersisted) in samples {
            let (took, epoch) = (Duration::from_millis(*took_ms), window.epoch());
            window.record(PersistSample { took, budget: BUDGET, unpersisted: *unpersisted, epoch });
        }
        window
    }

    #[test]
    fn window_follows_persist_time() {
        for (samples, window, why) in [
            (&[][..], 12, "half of the budget at 500 a second"),
            (&[(5, 12), (5, 12), (5, 12)][..], 15, "far below the budget it doubles with each round"),
            (&[(5, 1), (5, 2), (5, 3)][..], 12, "a window that is not used does not grow"),
            (&[(18, 12); 26][..], 14, "nearer to it, by one with each round"),
            (&[(25, 12); 26][..], 12, "about half of it, not at all"),
            (&[(45, 12); 4][..], 10, "close to it it shrinks"),
            (&[(51, 12)][..], 6, "too late halves it"),
            (&[(5, 12); 52][..], 24, "and grows with the unpersisted permits"),
            (&[(900, 1); 9][..], 1, "never below one"),
        ] {
            assert_eq!(after(samples).window(), window, "{why}: {samples:?}");
        }
        assert_eq!(AimdWindow::new(Duration::ZERO).window(), 1);
        assert_eq!(AimdWindow::new(Duration::from_secs(3_600)).window(), 10_000);
    }

    #[test]
    fn window_is_halved_once_per_burst() {
        let mut window = AimdWindow::new(Duration::from_millis(400));
        assert_eq!(window.window(), 100);
        let late = PersistSample { took: 2 * BUDGET, budget: BUDGET, unpersisted: 100, epoch: window.epoch() };
        (0..100).for_each(|_| window.record(late));
        assert_eq!(window.window(), 50);
        window.record(PersistSample { epoch: window.epoch(), ..late });
        assert_eq!(window.window(), 25);
    }

    #[derive(Debug, Default)]
    struct SimulatedRun {
        persisted: u64,
        /// Instants at which late permits were persisted.
        late_at_us: Vec<u64>,
        idle_us: u64,
        window: u32,
    }

    /// Runs a gate that is granted what the window allows, and persists one permit after the other.
    fn run(write_us: u64, seconds: u64, stall: Option<(u64, u64)>) -> SimulatedRun {
        let (budget_us, end_us) = (BUDGET.as_micros() as u64, seconds * 1_000_000);
        let mut run = SimulatedRun::default();
        let mut window = AimdWindow::new(BUDGET);
        let mut queue: VecDeque<(u64, u32, u64)> = VecDeque::new();
        let mut now_us = 0;
        while now_us < end_us {
            // The gate asks when a quarter of the window is free, and has a reply a millisecond later.
            let free = window.window().saturating_sub(queue.len() as u32);
            if free * 4 >= window.window() {
                let unpersisted = queue.len() as u32;
                queue.extend((1..=free).map(|more| (now_us, unpersisted + more, window.epoch())));
            }
            let Some((granted_us, unpersisted, epoch)) = queue.pop_front() else {
                (now_us, run.idle_us) = (now_us + 1_000, run.idle_us + 1_000);
                continue;
            };
            now_us += write_us;
            if let Some((at_us, for_us)) = stall.filter(|(at_us, _)| (*at_us..at_us + write_us).contains(&now_us)) {
                now_us = at_us + for_us;
            }
            let took_us = now_us - granted_us;
            if took_us > budget_us {
                run.late_at_us.push(now_us);
            }
            run.persisted += 1;
            let took = Duration::from_micros(took_us);
            window.record(PersistSample { took, budget: BUDGET, unpersisted, epoch });
        }
        SimulatedRun { window: window.window(), ..run }
    }

    proptest! {
        /// Apart from the first window, which has no measurement yet.
        #[test]
        fn steady_ledger_stays_busy_without_deadline_misses(write_us in 50_u64..8_000) {
            let run = run(write_us, 10, None);
            let late = run.late_at_us.iter().filter(|at_us| **at_us > 1_000_000).count();
            prop_assert!(late == 0 && run.late_at_us.len() <= 12, "at {} us: {:?}", write_us, run);
            prop_assert!(run.idle_us <= 100_000, "at {} us: {:?}", write_us, run);
        }

        #[test]
        fn window_recovers_after_a_ledger_stall(write_us in 50_u64..4_000, for_ms in 60_u64..3_000) {
            let before = run(write_us, 20, None).window;
            let run = run(write_us, 20, Some((5_000_000, for_ms * 1_000)));
            prop_assert!(run.window * 4 >= before * 3, "{} before, at {} us: {:?}", before, write_us, run);
            prop_assert!(run.late_at_us.len() as u64 * 10 < run.persisted, "at {} us: {:?}", write_us, run);
        }

        #[test]
        fn persist_window_stays_within_bounds(samples in prop::collection::vec((0_u64..200, 0_u32..20_000), 0..2_000)) {
            let window = after(&samples).window();
            prop_assert!((1..=10_000).contains(&window), "{window}");
        }
    }
}
