//! Tests of the combined pace: it is what its definition says, also with many limits.

use proptest::prelude::*;

use super::super::{PaceKind, ReturnCurve};
use super::*;

/// The definition, without anything that is computed ahead: up to three times as many steps per limit.
fn by_definition(paces: &[LimitPace], per_second: f64, n: u64) -> f64 {
    let Some((pace, shorter)) = paces.split_last() else { return float(n.saturating_sub(1)) / per_second };
    let alone = pace.permit_time(n).max(by_definition(shorter, per_second, n));
    let decides = by_definition(shorter, per_second, pace.per_cycle.saturating_add(1)) < pace.cycle;
    let free_sent_in = by_definition(shorter, per_second, pace.free().saturating_add(1));
    let waits = if decides {
        pace.cycle_of(n)
    } else {
        pace.behind_first_window(n).filter(|(begins_in, _)| free_sent_in < *begins_in)
    };
    match waits {
        Some((cycles, place)) => alone.max(cycles + by_definition(shorter, per_second, place)),
        None => alone,
    }
}

fn sliding(per_cycle: u64, cycle: f64) -> LimitPace {
    LimitPace { per_cycle, cycle, kind: PaceKind::Sliding { free: per_cycle, returns: ReturnCurve::even(0.0, cycle) } }
}

/// Limits of any kind, with any of their slots in use.
fn any_pace() -> impl Strategy<Value = LimitPace> {
    (1..200_u64, 1..100_000_u32, 0..3_u8, 0.0..1.0_f64, 0.0..1.0_f64, 0..250_u64).prop_map(
        |(per_cycle, cycle_ms, kind, first, last, free)| {
            let cycle = f64::from(cycle_ms) / 1_000.0;
            let last_in = last * cycle;
            let kind = match kind {
                0 => PaceKind::Spaced { at_once: free, cost: 1.0 },
                1 => PaceKind::Sliding {
                    free: free.min(per_cycle),
                    returns: ReturnCurve::even(first * last_in, last_in),
                },
                _ => PaceKind::Aligned { free: free.min(per_cycle), ends_in: last_in },
            };
            LimitPace { per_cycle, cycle, kind }
        },
    )
}

proptest! {
    #[test]
    fn pace_is_that_of_the_definition(
        paces in prop::collection::vec(any_pace(), 0..6), per_second in 0.1..1_000.0_f64, n in 1..5_000_u64,
    ) {
        let mut sorted = paces.clone();
        sorted.sort_by(|a, b| a.cycle.total_cmp(&b.cycle));
        let combined = CombinedPace::new(paces, per_second);
        prop_assert_eq!(combined.seconds(n), by_definition(&sorted, per_second, n));
    }
}

/// A hundred per hundred seconds, one in two seconds: the window never fills, but it was used up when we began.
#[test]
fn used_window_delays_a_slower_pace() {
    let seconds = |free, n| {
        let window = LimitPace { per_cycle: 100, cycle: 100.0, kind: PaceKind::Aligned { free, ends_in: 50.0 } };
        CombinedPace::new(vec![window], 0.5).seconds(n)
    };
    for (free, n, wanted, why) in [
        (0, 1, 50.0, "the first waits for the window"),
        (0, 11, 70.0, "ten more follow in twenty seconds"),
        (5, 5, 8.0, "what is left goes at once"),
        (5, 15, 68.0, "ten wait for the window"),
        (30, 40, 78.0, "thirty are not sent before the window ends"),
    ] {
        assert!((seconds(free, n) - wanted).abs() < 1e-9, "{why}: {}", seconds(free, n));
    }
}

/// By the definition, each of these limits would multiply the time of an estimate.
#[test]
fn many_limits_cost_no_more_than_a_few() {
    // Fifty that never decide, and thirty of which each halves the rate of the one before.
    let mut paces: Vec<LimitPace> = (1..=50).map(|windows| sliding(100 * windows, float(windows))).collect();
    paces.extend(
        (1..=30_i32).map(|power| sliding(100 + float_to_count(1.5_f64.powi(power)), 100.0 * 3.0_f64.powi(power))),
    );
    let combined = CombinedPace::new(paces, 1_000.0);
    let mut before = 0.0;
    for n in [1, 100, 101, 10_000, 1_000_000, 100_000_000] {
        let seconds = combined.seconds(n);
        assert!(seconds >= before, "{n}: {seconds} < {before}");
        before = seconds;
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive and small")]
fn float_to_count(count: f64) -> u64 {
    count as u64
}
