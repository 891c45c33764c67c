//! The rate of a saturated lane, measured so that a perfect limiter reaches exactly its limit's rate.
//!
//! The L slots are used again in each turn. Dividing n − L calls by the whole span loses the part of the last turn that
//! the end cuts off. So a perfect limiter of 100/1s at 50 ± 30 ms shows 97.1 to 99.4 % in 30 s. Measuring between the
//! first calls of two turns counts the spread of a turn as rate (100.6 to 100.9 %). From the middle of one turn to the
//! middle of another, both errors cancel out (99.95 to 100.05 %).
//!
//! The result of n − L calls over the span depends on the first turn. A slot that begins at φ and is used again every P
//! makes ⌊(T − φ) / P⌋ + 1 calls until T. If all begin together and T is k turns, n − L = k·L over k·P: all of L / P.
//! If they begin evenly spread over a turn, n = L·T / P. Then (n − L) / T = L / P · (1 − P / T): 96.5 % for P = 1.05 s
//! in 30 s, and 99 % only from 105 s on. Holds that vary spread a turn more and more, so every run tends to that case.
//! So the figure is meaningful only beside that of a perfect limiter with the same first turn: [`perfect_over_span`].

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Simulated runs of a perfect limiter; their mean is within 0.1 %.
const RUNS: u32 = 16;

/// Calls per second over whole turns, from the middle of the first to the middle of the last whole one; `None` with
/// fewer than two turns.
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn rate(arrivals_us: &[u64], slots: usize) -> Option<f64> {
    let slots = slots.max(1);
    let from = slots / 2;
    let turns = arrivals_us.len().checked_sub(from + 1)? / slots;
    let (first_us, last_us) = (arrivals_us.get(from)?, arrivals_us.get(from + turns * slots)?);
    (last_us > first_us).then(|| (turns * slots) as f64 * 1e6 / (last_us - first_us) as f64)
}

/// The rate of n − L calls over the span from the first to the last.
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn rate_over_span(arrivals_us: &[u64], slots: usize) -> Option<f64> {
    let calls = arrivals_us.len().checked_sub(slots)?;
    let (first_us, last_us) = (arrivals_us.first()?, arrivals_us.last()?);
    (last_us > first_us).then(|| calls as f64 * 1e6 / (last_us - first_us) as f64)
}

/// One turn of the slots.
#[derive(Clone, Copy, Debug)]
pub struct LimitCycle {
    pub slots: usize,
    /// Window plus mean hold, or window plus allowance.
    pub seconds: f64,
    /// Difference between the longest and the shortest hold.
    pub spread_s: f64,
}

/// The [`rate_over_span`] of a perfect limiter with the same first turn and the same end: the mean of several runs with
/// holds drawn evenly from their spread.
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn perfect_over_span(arrivals_us: &[u64], turn: LimitCycle) -> Option<f64> {
    let (first, calls) = (arrivals_us.get(..turn.slots)?, arrivals_us.len().checked_sub(turn.slots)?);
    let (from_us, until_us) = (*first.first()? as f64, *arrivals_us.last()? as f64);
    if calls == 0 || turn.seconds <= 0.0 || until_us <= from_us {
        return None;
    }
    let mut rng = StdRng::seed_from_u64(calls as u64);
    let rates = (0..RUNS).map(|_| {
        let (mut more, mut last_us) = (0_u64, from_us);
        for begin_us in first {
            let mut at_us = *begin_us as f64;
            loop {
                at_us += (turn.seconds + turn.spread_s * (rng.random::<f64>() - 0.5)) * 1e6;
                if at_us > until_us {
                    break;
                }
                (more, last_us) = (more + 1, last_us.max(at_us));
            }
        }
        if last_us > from_us { more as f64 * 1e6 / (last_us - from_us) } else { 0.0 }
    });
    Some(rates.sum::<f64>() / f64::from(RUNS))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: usize = 100;
    const WINDOW_US: u64 = 1_000_000;

    /// Arrivals until `until_us`, if each slot is used again exactly a window after its response, and their mean hold.
    fn perfect(until_us: u64, seed: u64) -> (Vec<u64>, f64) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut arrivals_us, mut held_us) = (Vec::new(), 0);
        for _ in 0..SLOTS {
            let mut at_us = 0;
            while at_us < until_us {
                arrivals_us.push(at_us);
                let hold_us = rng.random_range(20_000..80_000);
                held_us += hold_us;
                at_us += WINDOW_US + hold_us;
            }
        }
        arrivals_us.sort_unstable();
        let hold_us = held_us as f64 / arrivals_us.len() as f64;
        (arrivals_us, hold_us)
    }

    #[test]
    fn perfect_limiter_reaches_its_limit() {
        for (seed, end_ms) in (0..).zip([10_000, 30_000, 30_300, 30_600, 30_900]) {
            let (arrivals_us, hold_us) = perfect(end_ms * 1_000, seed);
            let possible = SLOTS as f64 * 1e6 / (WINDOW_US as f64 + hold_us);
            let utilisation = rate(&arrivals_us, SLOTS).unwrap() / possible;
            assert!((utilisation - 1.0).abs() < 0.002, "{end_ms} ms: {utilisation}");
            let over_span = rate_over_span(&arrivals_us, SLOTS).unwrap() / possible;
            assert!((0.96..1.0).contains(&over_span), "{end_ms} ms: {over_span}");
            let turn = LimitCycle { slots: SLOTS, seconds: 1.0 + hold_us / 1e6, spread_s: 0.06 };
            let perfect = perfect_over_span(&arrivals_us, turn).unwrap() / possible;
            assert!((over_span / perfect - 1.0).abs() < 0.005, "{end_ms} ms: {over_span}, perfect {perfect}");
        }
    }

    #[test]
    fn two_percent_unused_calls_are_detected() {
        let (arrivals_us, hold_us) = perfect(30_000_000, 1);
        let slower: Vec<u64> = arrivals_us.iter().map(|at_us| at_us * 50 / 49).collect();
        let possible = SLOTS as f64 * 1e6 / (WINDOW_US as f64 + hold_us);
        let utilisation = rate(&slower, SLOTS).unwrap() / possible;
        assert!((utilisation - 0.98).abs() < 0.002, "{utilisation}");
    }

    /// The two extremes of the rate over the span: slots that begin together, and slots that begin evenly over a turn.
    #[test]
    fn rate_over_span_depends_on_first_cycle() {
        for (apart_us, end_us, expected) in [(0, 29 * 1_050_000, 1.0), (10_500, 30_000_000, 1.0 - 1.05 / 30.0)] {
            let mut arrivals_us: Vec<u64> = (0..SLOTS as u64)
                .flat_map(|slot| {
                    (0..).map(move |turn| slot * apart_us + turn * 1_050_000).take_while(|at| *at <= end_us)
                })
                .collect();
            arrivals_us.sort_unstable();
            let turn = LimitCycle { slots: SLOTS, seconds: 1.05, spread_s: 0.0 };
            let found = [rate_over_span(&arrivals_us, SLOTS), perfect_over_span(&arrivals_us, turn)];
            for rate in found {
                let share = rate.unwrap() / (SLOTS as f64 / 1.05);
                assert!((share - expected).abs() < 0.002, "{apart_us} us apart: {share}, not {expected}");
            }
        }
        assert!(perfect_over_span(&[1, 2], LimitCycle { slots: 3, seconds: 1.0, spread_s: 0.0 }).is_none());
    }

    #[test]
    fn too_few_calls_have_no_rate() {
        assert_eq!((rate(&[], 3), rate(&[1, 2, 3], 3), rate_over_span(&[1, 2], 3)), (None, None, None));
        assert_eq!(rate(&[0, 0, 0, 1_000_000, 1_000_000, 1_000_000], 3), Some(3.0));
    }
}
