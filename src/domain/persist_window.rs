//! Writes that a start waits for: how many granted permits may be unpersisted, when a streak of misses says that the
//! ledger has stalled, and how long a write may wait for others. And how far ahead starts are booked.
//!
//! A ledger that takes n requests a second cannot take a burst of a thousand permits within a budget of 50 ms. Permits
//! that miss it cost their slots. So the window follows the time that writes take. It grows while that is far below the
//! budget, stays in between, and is halved when a permit misses the budget (additive increase, multiplicative
//! decrease). A window that was not used does not grow.
//!
//! One commit serves many writes: a statement costs as much as ten of its rows. Writes of a request that may be sent
//! now, or of a payment that was active only briefly, are not delayed. See `docs/decisions/0026-group-commit.md`.
//!
//! A permit must have arrived, and its request must be committed, before its start; otherwise its slot is idle
//! meanwhile. But a start that is booked is taken from a more urgent job that comes later. So the time follows what
//! calls to the limiter and writes of the ledger take. See `docs/decisions/0046-starts-are-spaced-and-booked-late.md`.

use std::time::Duration;

use super::provider::BOOKING_HORIZON;

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

/// Time for which the lane takes no jobs after a streak: the database must catch up first.
pub const DEADLINE_MISS_PAUSE: Duration = Duration::from_secs(1);
/// Misses in a row that make a streak, …
const MISSES_MIN: u32 = 3;
/// … if they span at least this time.
const MISSES_SPAN: Duration = Duration::from_millis(500);

/// Permits that missed their deadline since the last that met it.
///
/// A single miss means that a burst was too large, which the window corrects. A pause for each miss would leave the
/// limit unused. So neither one miss nor many that come together cause a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissStreak {
    since: Option<Duration>,
    misses: u32,
}

impl MissStreak {
    /// Records a permit that was persisted in time, which ends the streak.
    pub fn record_on_time(&mut self) {
        *self = Self::default();
    }

    /// Records a miss at `now` (any monotonic clock). True: the lane should pause, and a new streak begins.
    pub fn record_miss(&mut self, now: Duration) -> bool {
        let since = *self.since.get_or_insert(now);
        self.misses += 1;
        let stalled = self.misses >= MISSES_MIN && now.saturating_sub(since) >= MISSES_SPAN;
        if stalled {
            self.record_on_time();
        }
        stalled
    }
}

/// Longest batch delay of a write.
pub const BATCH_DELAY_MAX: Duration = Duration::from_millis(10);
/// Shorter delays become zero, because timers count whole milliseconds.
const BATCH_DELAY_MIN: Duration = Duration::from_millis(2);
/// A write whose request is sent later may wait for this part of the time that is left.
const LEAD_DIVISOR: u32 = 10;
/// An outcome, and its worker slot, may wait for this part of the time that the payment was active.
const ACTIVE_DIVISOR: u32 = 20;

/// Batch delay of a request that is recorded `lead` before its start.
pub fn delay_before_send(lead: Duration) -> Duration {
    bounded_delay(lead / LEAD_DIVISOR)
}

/// Batch delay of the outcome of a payment that was active for this long.
pub fn delay_after_response(active_for: Duration) -> Duration {
    bounded_delay(active_for / ACTIVE_DIVISOR)
}

/// Records that are committed right after a start do not delay the next one, if it is at least as far away.
const GAP_MIN: Duration = Duration::from_millis(5);
/// By then, the request has left.
const AFTER_START: Duration = Duration::from_micros(500);
/// Longest batch delay of a record.
const RECORD_DELAY_MAX: Duration = Duration::from_millis(15);
/// The starts of this time ahead decide it.
pub const STARTS_LOOKED_AT: Duration = RECORD_DELAY_MAX.saturating_add(GAP_MIN);

/// Batch delay of a record in the backlog. No step waits for it, but its commit takes processor and database from the
/// requests that start meanwhile. So it comes after the last start in reach that no other one follows soon.
/// `starts_in`: times until the starts within [`STARTS_LOOKED_AT`], in their order.
pub fn delay_of_record(starts_in: &[Duration]) -> Duration {
    let next_of = |number: usize| starts_in.get(number + 1).copied().unwrap_or(Duration::MAX);
    let gaps = starts_in.iter().enumerate().filter(|(number, at)| next_of(*number).saturating_sub(**at) >= GAP_MIN);
    let delays = gaps.map(|(_, at)| *at + AFTER_START);
    delays.take_while(|delay| *delay <= RECORD_DELAY_MAX).last().unwrap_or(BATCH_DELAY_MAX)
}

fn bounded_delay(wait: Duration) -> Duration {
    if wait < BATCH_DELAY_MIN { Duration::ZERO } else { wait.min(BATCH_DELAY_MAX) }
}

/// Least time before a start at which the limiter is asked for it: a busy process wakes up late.
const RETRY_MIN: Duration = Duration::from_millis(20);
/// Most of it, so that a call books something whatever was measured.
const RETRY_MAX: Duration = Duration::from_millis(100);
/// What is measured first: a slow call and a slow write.
const FIRST: Duration = Duration::from_millis(40);
/// Starts that one call books beyond those: fewer calls, for as much more time that a later job may wait.
const STARTS_PER_CALL: Duration = Duration::from_millis(30);
/// Share of the longest time that is left after a shorter one: the next ones are most often no longer.
const DECAY: f64 = 0.95;

/// The longest times lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BookingAhead {
    call: Duration,
    write: Duration,
}

impl Default for BookingAhead {
    fn default() -> Self {
        Self { call: FIRST, write: FIRST }
    }
}

impl BookingAhead {
    /// Records the time from a call to its reply.
    pub fn record_call(&mut self, took: Duration) {
        self.call = took.max(self.call.mul_f64(DECAY));
    }

    /// Records the time from a permit's grant until its request was committed.
    pub fn record_write(&mut self, took: Duration) {
        self.write = took.max(self.write.mul_f64(DECAY));
    }

    /// How long before a start the limiter is asked for it, 20 to 100 ms.
    pub fn retry(&self) -> Duration {
        (self.call + self.write).clamp(RETRY_MIN, RETRY_MAX)
    }

    /// How far ahead of a call starts are booked; less than [`BOOKING_HORIZON`].
    pub fn booking(&self) -> Duration {
        (self.retry() + STARTS_PER_CALL).min(BOOKING_HORIZON)
    }

    /// The same for an urgent job: as far as any process books, or one with slower writes would have each start first.
    pub fn urgent_booking() -> Duration {
        (RETRY_MAX + STARTS_PER_CALL).min(BOOKING_HORIZON)
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
    fn records_are_committed_after_a_start() {
        let us = Duration::from_micros;
        for (starts_ms, delay_us, why) in [
            (&[][..], 10_000, "nothing starts"),
            (&[17][..], 10_000, "it ends well before the start"),
            (&[3][..], 3_500, "nothing follows"),
            (&[3, 13][..], 13_500, "the later it is, the more come together"),
            (&[3, 16][..], 3_500, "the last is too far away"),
            (&[3, 6, 18][..], 6_500, "it falls into the gap"),
            (&[3, 6, 9][..], 9_500, "behind all of them"),
            (&[0, 4, 8, 12, 16][..], 10_000, "there is no gap"),
        ] {
            let starts: Vec<Duration> = starts_ms.iter().map(|at| us(at * 1_000)).collect();
            assert_eq!(delay_of_record(&starts), us(delay_us), "{why}: {starts_ms:?}");
        }
    }

    proptest! {
        /// Records never wait longer than they may, and where nothing is in reach, as other writes.
        #[test]
        fn record_delay_is_bounded(mut starts_us in prop::collection::vec(0..20_000_u64, 0..30)) {
            starts_us.sort_unstable();
            let starts: Vec<Duration> = starts_us.iter().copied().map(Duration::from_micros).collect();
            let delay = delay_of_record(&starts);
            prop_assert!(delay <= RECORD_DELAY_MAX);
            let next = starts.iter().find(|at| **at >= delay);
            let has_gap = next.is_none_or(|next| *next - delay >= GAP_MIN - AFTER_START);
            prop_assert!(has_gap || delay == BATCH_DELAY_MAX, "{delay:?}: {starts:?}");
        }
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

    fn pauses(events: &[(u64, bool)]) -> Vec<u64> {
        let mut streak = MissStreak::default();
        let mut pauses = Vec::new();
        for (at_ms, in_time) in events {
            if *in_time {
                streak.record_on_time();
            } else if streak.record_miss(Duration::from_millis(*at_ms)) {
                pauses.push(*at_ms);
            }
        }
        pauses
    }

    #[test]
    fn lane_pauses_after_a_streak_of_misses() {
        let burst: Vec<(u64, bool)> = (0..1_000).map(|number| (60 + number / 10, false)).collect();
        for (events, expected, why) in [
            (&[(60, false)][..], &[][..], "one"),
            (&burst[..], &[], "a thousand that were granted together"),
            (&[(0, false), (400, true), (600, false), (900, false), (1_000, false)], &[], "one in time between them"),
            (&[(0, false), (600, false)], &[], "two"),
            (&[(0, false), (300, false), (499, false), (500, false)], &[500], "a streak of half a second"),
            (
                &[(0, false), (300, false), (600, false), (900, false), (1_200, false)],
                &[600],
                "a new streak after a pause",
            ),
            (
                &[(0, false), (1, false), (600, false), (601, false), (602, false), (1_102, false)],
                &[600, 1_102],
                "and again",
            ),
        ] {
            assert_eq!(pauses(events), expected, "{why}");
        }
    }

    #[test]
    fn only_latency_tolerant_writes_are_delayed() {
        let ms = Duration::from_millis;
        for (lead_ms, waits_ms) in [(0, 0), (19, 0), (20, 2), (80, 8), (100, 10), (250, 10)] {
            assert_eq!(delay_before_send(ms(lead_ms)), ms(waits_ms), "{lead_ms} ms before its start");
        }
        for (active_ms, waits_ms) in [(0, 0), (5, 0), (39, 0), (40, 2), (200, 10), (60_000, 10)] {
            assert_eq!(delay_after_response(ms(active_ms)), ms(waits_ms), "{active_ms} ms active");
        }
    }

    #[test]
    fn booking_follows_the_longest_times() {
        let ms = Duration::from_millis;
        let mut ahead = BookingAhead::default();
        assert_eq!((ahead.retry(), ahead.booking()), (ms(80), ms(110)));
        for _ in 0..60 {
            ahead.record_call(ms(1));
            ahead.record_write(ms(4));
        }
        assert_eq!((ahead.retry(), ahead.booking()), (ms(20), ms(50)), "a quick store and a quick ledger");
        ahead.record_write(ms(50));
        ahead.record_write(ms(4));
        assert!(ahead.retry() > ms(45), "one slow write is not the last: {ahead:?}");
        ahead.record_call(Duration::from_secs(2));
        assert_eq!((ahead.retry(), ahead.booking()), (ms(100), ms(130)), "never more than a call can book");
    }
}
