use proptest::prelude::*;

use super::*;
use crate::domain::quota_spec::LimitSpec;

const MS: i128 = 1_000_000;
/// Reading of the store's clock when ours reads zero.
const EPOCH_NS: i128 = 1_800_000_000_000_000_000;

/// A store's clock as a function of ours: rates that change, and one step.
#[derive(Clone, Debug)]
struct StoreClock {
    /// Instant of our clock from which the rate holds, and the rate in parts per million.
    rates: Vec<(i128, i128)>,
    step_at: i128,
    step: i128,
}

impl StoreClock {
    fn at(&self, t: i128) -> i128 {
        let ends = self.rates.iter().skip(1).map(|(from, _)| *from).chain([i128::MAX]);
        let drift: i128 =
            self.rates.iter().zip(ends).map(|((from, ppm), end)| (t.min(end) - from).max(0) * ppm / 1_000_000).sum();
        EPOCH_NS + t + drift + if t >= self.step_at { self.step } else { 0 }
    }

    fn time_at(&self, t: i128) -> Micros {
        Micros(u64::try_from(self.at(t) / 1_000).unwrap())
    }
}

/// One exchange by our clock: departs, is read by the store, arrives.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    departed: i128,
    at_store: i128,
    arrived: i128,
}

fn observe(comparison: &mut ClockComparison, clock: &StoreClock, exchange: Exchange) -> Comparison {
    comparison.observe(duration(exchange.departed), duration(exchange.arrived), clock.time_at(exchange.at_store))
}

fn stepped(comparison: Comparison) -> bool {
    matches!(comparison, Comparison::SteppedForward { .. } | Comparison::SteppedBack { .. })
}

/// A slow reply shows an instant long ago: a clock that runs fast has gained since.
#[test]
fn gain_during_a_reply_stays_possible() {
    let clock = StoreClock { rates: vec![(0, 499)], step_at: i128::MAX, step: 0 };
    let slow = Exchange { departed: 0, at_store: 0, arrived: 2_000 * MS };
    let quick = Exchange { departed: 2_001 * MS, at_store: 2_001 * MS, arrived: 2_001 * MS };
    let mut comparison = ClockComparison::default();
    assert_eq!(observe(&mut comparison, &clock, slow), Comparison::First);
    let (least, most) = comparison.reading(duration(quick.arrived), Duration::ZERO).unwrap();
    let reads = clock.at(quick.arrived);
    assert!(least <= reads && reads <= most, "{least} {reads} {most}");
    assert!(matches!(observe(&mut comparison, &clock, quick), Comparison::Agrees { .. }));
}

/// A delay from zero up to a given order of magnitude, in nanoseconds.
fn delay() -> impl Strategy<Value = i128> {
    prop_oneof![4 => 0..300_000_i128, 2 => 0..30 * MS, 1 => 0..2_000 * MS]
}

fn exchanges() -> impl Strategy<Value = Vec<Exchange>> {
    let gap = prop_oneof![4 => 0..20 * MS, 2 => 0..1_000 * MS, 1 => 0..40_000 * MS];
    prop::collection::vec((gap, delay(), delay()), 2..60).prop_map(|steps| {
        let mut t = 0;
        let exchange = |(gap, out, back)| {
            let departed = t + gap;
            let (at_store, arrived) = (departed + out, departed + out + back);
            t = arrived;
            Exchange { departed, at_store, arrived }
        };
        steps.into_iter().map(exchange).collect()
    })
}

/// A clock whose rate changes three times and that steps once, at a fraction of the time that the exchanges take.
fn clock(exchanges: &[Exchange]) -> impl Strategy<Value = StoreClock> + use<> {
    let end = exchanges.last().unwrap().arrived;
    let size = prop_oneof![4 => -40 * MS..40 * MS, 2 => -2_500 * MS..2_500 * MS, 1 => -3_600_000 * MS..3_600_000 * MS];
    let rates = prop::collection::vec((0..=end, -499..=499_i128), 3);
    (-499..=499_i128, rates, 0..=end, size).prop_map(|(first, mut rates, step_at, step)| {
        rates.push((0, first));
        rates.sort_unstable();
        StoreClock { rates, step_at, step }
    })
}

fn scenario() -> impl Strategy<Value = (Vec<Exchange>, StoreClock)> {
    exchanges().prop_flat_map(|exchanges| (Just(exchanges.clone()), clock(&exchanges)))
}

/// A use of a slot: answered, then released by another process with its age. As fractions of the whole time, and a
/// window.
fn used() -> impl Strategy<Value = (f64, i128, u64)> {
    let window_ms = prop_oneof![1..50_u64, 50..2_000_u64, 2_000..90_000_u64];
    (0.0..1.0, delay(), window_ms)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn without_a_step_none_is_reported((exchanges, clock) in scenario()) {
        let clock = StoreClock { step: 0, ..clock };
        let mut comparison = ClockComparison::default();
        for (index, exchange) in exchanges.into_iter().enumerate() {
            let result = observe(&mut comparison, &clock, exchange);
            prop_assert_eq!(matches!(result, Comparison::First), index == 0);
            prop_assert!(!stepped(result), "{result:?}");
        }
    }

    /// No step stays hidden that is larger than the width before, the exchange's own time, and the tolerance together.
    #[test]
    fn next_exchange_reports_a_large_step((exchanges, clock) in scenario()) {
        let mut comparison = ClockComparison::default();
        let mut width = None;
        for exchange in exchanges {
            let known = comparison.known.map(|known| known.aged_to(duration(exchange.arrived)));
            let after = exchange.at_store >= clock.step_at;
            let result = observe(&mut comparison, &clock, exchange);
            if !after {
                width = known;
                continue;
            }
            if let (Some(_), Some(known)) = (width, known) {
                let took = exchange.arrived - exchange.departed;
                let hidden = known.most - known.least + took + ns(STEP_MIN) + TRUNCATION_NS;
                if clock.step.abs() > hidden {
                    prop_assert_eq!(matches!(result, Comparison::SteppedForward { .. }), clock.step > 0);
                    prop_assert_eq!(matches!(result, Comparison::SteppedBack { .. }), clock.step < 0);
                }
            }
            break;
        }
    }

    /// Central property: whatever was hidden, the next use of a slot starts a whole window after the answer to the
    /// last.
    #[test]
    fn slot_uses_keep_a_window_despite_hidden_steps(
        (exchanges, clock) in scenario(),
        (at, released_after, window_ms) in used(),
    ) {
        apart(&exchanges, &clock, at, released_after, window_ms)?;
    }
}

/// The start of a permit by its wait alone, as the gate computes it.
fn start_at(comparison: &ClockComparison, arrived: Duration, now: Micros, wait: Duration, over: Duration) -> Duration {
    (arrived + wait).max(comparison.not_before(arrived, now.plus(wait), over))
}

#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a fraction of the whole time")]
fn apart(
    exchanges: &[Exchange],
    clock: &StoreClock,
    at: f64,
    released_after: i128,
    window_ms: u64,
) -> Result<(), TestCaseError> {
    let window = Duration::from_millis(window_ms);
    let padded_us = LimitSpec::sliding_log("", 1, window).padded_window_us();
    let answered = (exchanges.last().unwrap().arrived as f64 * at) as i128;
    let released = answered + released_after;
    // No process here could see such a step; others report it.
    prop_assume!(clock.step_at < released || clock.step_at > exchanges[0].at_store);
    let used_at = Micros(clock.time_at(released).0 - u64::try_from(released_after / 1_000).unwrap());
    let due = Micros(used_at.0 + padded_us);
    let mut comparison = ClockComparison::default();
    for (index, exchange) in exchanges.iter().enumerate() {
        if stepped(observe(&mut comparison, clock, *exchange)) {
            break;
        }
        if index == 0 || exchange.at_store < released {
            continue;
        }
        let (arrived, now) = (duration(exchange.arrived), clock.time_at(exchange.at_store));
        let (wait, over) = (due.since(now), Duration::from_micros(padded_us));
        let start = start_at(&comparison, arrived, now, wait, over);
        prop_assert!(ns(start) >= answered + ns(window), "{start:?} by the wait, answered at {answered} ns");
        // The slot's own instant delays less and protects as well.
        let start = (arrived + wait).max(comparison.not_before(arrived, due, over));
        prop_assert!(ns(start) >= answered + ns(window), "{start:?} by the slot, answered at {answered} ns");
    }
    Ok(())
}

fn clock_stepping(step_at: i128, step: i128) -> StoreClock {
    StoreClock { rates: vec![(0, 0)], step_at, step }
}

/// Why the bound of the exchange before is not enough. The first exchange leaves 40 ms open, and the step of 30 ms
/// hides in them. Quick exchanges after it know the new offset well. The slot was released under the old one.
#[test]
fn hidden_step_outlives_quicker_exchanges() {
    let clock = clock_stepping(100 * MS, 30 * MS);
    let quick = |t: i128| Exchange { departed: t * MS, at_store: t * MS, arrived: t * MS };
    let mut comparison = ClockComparison::default();
    let slow = Exchange { departed: 0, at_store: 40 * MS, arrived: 40 * MS };
    assert_eq!(observe(&mut comparison, &clock, slow), Comparison::First);
    // Released at 50 ms of our clock by another process, window one second.
    let due = Micros(clock.time_at(50 * MS).0 + 1_002_500);
    for t in [200, 300, 400, 1_000] {
        assert!(!stepped(observe(&mut comparison, &clock, quick(t))), "at {t} ms");
    }
    let (arrived, now) = (Duration::from_secs(1), clock.time_at(1_000 * MS));
    let over = Duration::from_micros(1_002_500);
    assert!(arrived + due.since(now) < Duration::from_millis(1_050), "the wait alone would be a breach");
    let start = start_at(&comparison, arrived, now, due.since(now), over);
    assert!(start >= Duration::from_millis(1_050), "{start:?}");
    // A window later the old bound no longer matters, and nothing is delayed.
    for t in [1_500, 2_500, 3_500] {
        assert!(!stepped(observe(&mut comparison, &clock, quick(t))), "at {t} ms");
    }
    let (arrived, now) = (Duration::from_millis(3_500), clock.time_at(3_500 * MS));
    let start = start_at(&comparison, arrived, now, Duration::ZERO, over);
    assert!(start < arrived + Duration::from_millis(1), "{start:?}");
}

#[test]
fn step_is_reported_with_its_size_and_resets() {
    let clock = clock_stepping(500 * MS, 30_000 * MS);
    let round = |t: i128| Exchange { departed: t * MS, at_store: (t + 1) * MS, arrived: (t + 2) * MS };
    let mut comparison = ClockComparison::default();
    assert_eq!(observe(&mut comparison, &clock, round(0)), Comparison::First);
    assert!(
        matches!(observe(&mut comparison, &clock, round(10)), Comparison::Agrees { width } if width.as_millis() <= 2)
    );
    let Comparison::SteppedForward { by } = observe(&mut comparison, &clock, round(600)) else { panic!() };
    assert!(by > Duration::from_secs(29) && by < Duration::from_secs(31), "{by:?}");
    assert!(matches!(observe(&mut comparison, &clock, round(610)), Comparison::Agrees { .. }));
    let back = clock_stepping(620 * MS, -30_000 * MS);
    let mut comparison = ClockComparison::default();
    for t in [0, 600] {
        assert!(!stepped(observe(&mut comparison, &back, round(t))));
    }
    assert!(matches!(observe(&mut comparison, &back, round(630)), Comparison::SteppedBack { .. }));
}

/// On a quick link, a step above the padding of the shortest window is seen, and a smaller one is not called a step.
#[test]
fn fast_link_detects_a_small_step() {
    for (step_us, seen) in [(1_900, false), (-1_900, false), (2_200, true), (-2_200, true)] {
        let clock = clock_stepping(500 * MS, step_us * 1_000);
        let quick = |t: i128| Exchange { departed: t * MS, at_store: t * MS, arrived: t * MS + 50_000 };
        let mut comparison = ClockComparison::default();
        assert_eq!(observe(&mut comparison, &clock, quick(400)), Comparison::First);
        let result = observe(&mut comparison, &clock, quick(500));
        assert_eq!(stepped(result), seen, "{step_us} µs: {result:?}");
        assert_eq!(matches!(result, Comparison::SteppedForward { .. }), seen && step_us > 0);
    }
}

/// A clock that runs fast raises the bound with every exchange: memory stays bounded, and short windows stay exact.
#[test]
fn comparison_memory_is_bounded() {
    let clock = StoreClock { rates: vec![(0, 400)], step_at: i128::MAX, step: 0 };
    let mut comparison = ClockComparison::default();
    for t in 0..20_000 {
        let t = t * 10 * MS;
        let exchange = Exchange { departed: t, at_store: t + MS / 10, arrived: t + MS / 5 };
        assert!(!stepped(observe(&mut comparison, &clock, exchange)), "at {t} ns");
    }
    assert!(comparison.min_offsets.len() <= MIN_OFFSETS_MAX);
    let last = 19_999 * 10 * MS;
    let (arrived, now) = (duration(last + MS / 5), clock.time_at(last + MS / 10));
    // Over a second the clock gained 0.4 ms; over a minute 24 ms.
    for (over_s, least_us, most_us) in [(1, 350, 700), (60, 23_900, 26_000)] {
        let delay = start_at(&comparison, arrived, now, Duration::ZERO, Duration::from_secs(over_s)) - arrived;
        assert!((least_us..most_us).contains(&delay.as_micros()), "{over_s} s: {delay:?}");
    }
}

#[test]
fn attestation_delays_only_uses_before_first_exchange() {
    let ms = Duration::from_millis;
    let clock = StoreClock { rates: vec![(0, 0)], step_at: i128::MAX, step: 0 };
    let at = |millis: i128| Exchange { departed: millis * MS, at_store: millis * MS, arrived: millis * MS };
    let mut comparison = ClockComparison::default();
    assert_eq!(comparison.reading(ms(0), ms(1_000)), None);
    comparison.assume_undetected_step(ms(5));
    for millis in [100, 200, 300] {
        let _ = observe(&mut comparison, &clock, at(millis));
    }
    let due = |millis: i128| clock.time_at(millis * MS);
    let start = |comparison: &ClockComparison, over| comparison.not_before(ms(300), due(400), ms(over));
    let exact = start(&comparison, 1_000);
    assert!(exact >= ms(400) && exact < ms(401), "{exact:?}");
    comparison.assume_undetected_step(ms(20));
    let delayed = start(&comparison, 1_000);
    assert!(delayed >= ms(420) && delayed < ms(421), "{delayed:?}");
    // For a window that began after the first exchange, the whole past was compared.
    assert!(start(&comparison, 150) < ms(401));
    // Our own attestation includes what may be hidden from us, for as long as it matters.
    for (over, hidden) in [(1_000, 20 * MS), (150, 0)] {
        let (least, most) = comparison.reading(ms(300), ms(over)).unwrap();
        let now = clock.at(300 * MS);
        assert!(least <= now - hidden && now <= most && most - least < hidden + MS, "{over}: {least} {now} {most}");
    }
}

const MS_US: i64 = 1_000;
const SINCE: Micros = Micros(77);

fn offset(least_us: i64, most_us: i64) -> ClockOffset {
    ClockOffset { least_us, most_us }
}

#[test]
fn attestation_bounds_the_undetected_step() {
    let attestation = ClockAttestation { offset: offset(-3 * MS_US, -MS_US), since: SINCE };
    let fresh = |reading| check_attestation(reading, attestation, Duration::ZERO);
    let valid = |hidden_us| AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_micros(hidden_us) };
    assert_eq!(fresh(offset(-2 * MS_US, -2 * MS_US)), valid(1_000));
    assert_eq!(fresh(offset(-3 * MS_US, -MS_US)), valid(2_000));
    // A step back frees no slot too early.
    assert_eq!(fresh(offset(-40 * MS_US, -39 * MS_US)), valid(0));
    // A step of up to a tenth of a second is waited for; a longer one is a mismatch, in both directions.
    assert_eq!(fresh(offset(96 * MS_US, 97 * MS_US)), valid(100_000));
    assert_eq!(fresh(offset(97 * MS_US, 98 * MS_US)), AttestationCheck::Mismatch);
    assert_eq!(fresh(offset(-102 * MS_US, -100 * MS_US)), AttestationCheck::Mismatch);
    assert_eq!(fresh(offset(30_000 * MS_US, 30_000 * MS_US)), AttestationCheck::Mismatch);
}

#[test]
fn old_attestation_is_weaker() {
    let attestation = ClockAttestation { offset: offset(0, 0), since: SINCE };
    let at = |age| check_attestation(offset(0, 0), attestation, Duration::from_secs(age));
    // Two clocks, 500 parts per million each.
    assert_eq!(at(10), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(10) });
    assert_eq!(at(100), AttestationCheck::Valid { since: SINCE, undetected_step: Duration::from_millis(100) });
    assert_eq!(at(101), AttestationCheck::Mismatch);
    assert_eq!(check_attestation(offset(0, 0), attestation, Duration::MAX), AttestationCheck::Mismatch);
}

#[test]
fn truncation_widens_the_offset() {
    let bounds = |least_ns, most_ns| ClockBounds { least_ns, most_ns };
    assert_eq!(ClockOffset::between(bounds(10_500, 11_400), bounds(2_000, 3_900)), offset(6, 10));
    assert_eq!(ClockOffset::between(bounds(1_000, 1_000), bounds(5_001, 5_001)), offset(-5, -4));
}
