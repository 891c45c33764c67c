//! The rate of a saturated lane, measured so that a perfect limiter comes to exactly what its limit lets out.
//!
//! Refuses spans between the wrong calls. L slots go round: whoever divides n − L calls by the whole span loses the part
//! of the last turn that the end cuts off (a perfect limiter of 100/1s at 50 ± 30 ms comes to 97.1 to 99.4 % in 30 s),
//! and whoever measures between the first calls of two turns counts the spread of a turn as rate (100.6 to 100.9 %).
//! From the middle of one turn to the middle of another both cancel out (99.95 to 100.05 %).

/// Calls per second over whole turns, from the middle of the first to the middle of the last whole one; `None` when not
/// even two turns are there.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn rate(arrivals_us: &[u64], slots: usize) -> Option<f64> {
    let slots = slots.max(1);
    let from = slots / 2;
    let turns = arrivals_us.len().checked_sub(from + 1)? / slots;
    let (first_us, last_us) = (arrivals_us.get(from)?, arrivals_us.get(from + turns * slots)?);
    (last_us > first_us).then(|| (turns * slots) as f64 * 1e6 / (last_us - first_us) as f64)
}

/// n − L calls over the span from the first to the last.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "counts and microseconds stay far below 2^53")]
pub fn rate_over_span(arrivals_us: &[u64], slots: usize) -> Option<f64> {
    let calls = arrivals_us.len().checked_sub(slots)?;
    let (first_us, last_us) = (arrivals_us.first()?, arrivals_us.last()?);
    (last_us > first_us).then(|| calls as f64 * 1e6 / (last_us - first_us) as f64)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    const SLOTS: usize = 100;
    const WINDOW_US: u64 = 1_000_000;

    /// Arrivals until `until_us` of slots that each begin again exactly a window after their answer, and their mean hold.
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
    fn a_perfect_limiter_comes_to_all_of_its_limit_wherever_the_end_falls() {
        for (seed, end_ms) in (0..).zip([10_000, 30_000, 30_300, 30_600, 30_900]) {
            let (arrivals_us, hold_us) = perfect(end_ms * 1_000, seed);
            let possible = SLOTS as f64 * 1e6 / (WINDOW_US as f64 + hold_us);
            let utilisation = rate(&arrivals_us, SLOTS).unwrap() / possible;
            assert!((utilisation - 1.0).abs() < 0.002, "{end_ms} ms: {utilisation}");
            let over_span = rate_over_span(&arrivals_us, SLOTS).unwrap() / possible;
            assert!((0.96..1.0).contains(&over_span), "{end_ms} ms: {over_span}");
        }
    }

    #[test]
    fn one_call_in_fifty_that_is_left_unused_is_seen() {
        let (arrivals_us, hold_us) = perfect(30_000_000, 1);
        let slower: Vec<u64> = arrivals_us.iter().map(|at_us| at_us * 50 / 49).collect();
        let possible = SLOTS as f64 * 1e6 / (WINDOW_US as f64 + hold_us);
        let utilisation = rate(&slower, SLOTS).unwrap() / possible;
        assert!((utilisation - 0.98).abs() < 0.002, "{utilisation}");
    }

    #[test]
    fn too_few_calls_have_no_rate() {
        assert_eq!((rate(&[], 3), rate(&[1, 2, 3], 3), rate_over_span(&[1, 2], 3)), (None, None, None));
        assert_eq!(rate(&[0, 0, 0, 1_000_000, 1_000_000, 1_000_000], 3), Some(3.0));
    }
}
