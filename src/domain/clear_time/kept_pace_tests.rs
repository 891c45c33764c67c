//! Tests of the pace that was kept: which steps count, and what the estimate makes of it.

use std::time::Duration;

use proptest::prelude::*;

use crate::domain::clear_time::tests::{conditions, limit, provider};
use crate::domain::clear_time::{ClearTime, ClearTimeInput, SENT_STEP};
use crate::domain::provider::Provider;
use crate::ledger::provider_row::LimitRow;

const JUDGED: [f64; 12] = [1.0; 12];

/// The clear time by the pace that these steps show.
fn measured(input: &ClearTimeInput<'_>, judged_before: &[f64]) -> Duration {
    clears_in(&ClearTimeInput { kept_part: input.measured_part(judged_before), ..*input })
}

fn clears_in(input: &ClearTimeInput<'_>) -> Duration {
    match input.clear_time() {
        ClearTime::In(clears_in) => clears_in,
        other => panic!("{other:?}"),
    }
}

/// Twenty a second.
fn plain() -> Provider {
    provider(vec![limit("second", 20, 1_000)], |_| ())
}

fn clears_in_s(provider: &Provider, jobs: u64, sent_before: &[f64], judged_before: &[f64]) -> u64 {
    measured(&ClearTimeInput { sent_before, ..conditions(provider, jobs) }, judged_before).as_secs()
}

#[test]
fn slow_lane_is_expected_to_stay_slow() {
    let plain = plain();
    let by_limits = clears_in_s(&plain, 12_000, &[], &[]);
    assert_eq!(by_limits, 599);
    for (sent, judged, wanted, why) in [
        (&[200.0; 12][..], &JUDGED[..], 599, "it keeps the pace"),
        (&[260.0; 12][..], &JUDGED[..], 599, "more than the limits allow does not count"),
        (&[100.0; 12][..], &JUDGED[..], 1_199, "half of the pace for the whole time"),
        (&[100.0; 12][..], &JUDGED[..6], 799, "half of the pace for a minute"),
        (&[100.0; 12][..], &[][..], 599, "it has just started"),
        (&[100.0; 12][..], &[0.1][..], 602, "its first second was slow"),
        (&[0.0, 0.0, 200.0, 200.0][..], &JUDGED[..], 719, "it stood for twenty seconds"),
        (&[0.0; 12][..], &JUDGED[..], 3_529, "it sends nothing: no time is certain"),
        (&[200.0, 200.0][..], &JUDGED[..], 599, "what is not known was kept"),
    ] {
        let clears = clears_in_s(&plain, 12_000, sent, judged);
        assert!(clears.abs_diff(wanted) <= 1, "{why}: {clears}, not {wanted}");
    }
}

/// Six hundred a minute, sent within half of it: a lane that waits for the minute's limit is not slow.
#[test]
fn lane_at_a_longer_limit_keeps_its_pace() {
    let both = provider(vec![limit("second", 20, 1_000), limit("minute", 600, 60_000)], |_| ());
    let bursts = [0.0, 0.0, 0.0, 200.0, 200.0, 200.0, 0.0, 0.0, 0.0, 200.0, 200.0, 200.0];
    for begin in 0..6 {
        let sent: Vec<f64> = bursts.iter().cycle().skip(begin).take(24).copied().collect();
        assert_eq!(clears_in_s(&both, 6_000, &sent, &JUDGED), clears_in_s(&both, 6_000, &sent, &[]), "from {begin}");
    }
    // Fifteen a second in forty seconds of each minute: ten a second over the minute, as the limit says.
    let slower = [
        150.0, 150.0, 150.0, 150.0, 0.0, 0.0, 150.0, 150.0, 150.0, 150.0, 0.0, 0.0, 150.0, 150.0, 150.0, 150.0, 0.0,
        0.0,
    ];
    let (slow, full) = (clears_in_s(&both, 6_000, &slower, &JUDGED), clears_in_s(&both, 6_000, &slower, &[]));
    assert!((full..full + 20).contains(&slow), "the minute's limit decides: {slow}, {full}");
}

/// Two in flight, answered after 150 ms, and 13.3 a second; they make eleven.
#[test]
fn time_between_two_requests_in_flight_counts() {
    let slots = LimitRow { algorithm: "concurrency".to_owned(), ..limit("slots", 2, LimitRow::default().window_ms) };
    let slots = provider(vec![slots], |_| ());
    let hold = Duration::from_millis(150);
    let input = ClearTimeInput { hold, sent_before: &[110.0; 12], ..conditions(&slots, 1_100) };
    assert_eq!(clears_in(&input).as_secs(), 82);
    assert_eq!(measured(&input, &JUDGED).as_secs(), 100);
}

/// Requests of each of the last seconds as sums of steps, from so many seconds ago.
fn steps(seconds: &[f64], from: usize) -> Vec<f64> {
    let step = usize::try_from(SENT_STEP.as_secs()).unwrap();
    seconds[from..].chunks(step).map(|step| step.iter().sum()).collect()
}

proptest! {
    #[test]
    fn measured_pace_never_beats_the_limits(
        sent in prop::collection::vec(0.0_f64..400.0, 0..14),
        judged in prop::collection::vec(0.0_f64..1.0, 0..14),
        jobs in 0_u64..50_000,
        more in 0_u64..50_000,
        long in 0_i64..3,
    ) {
        let limits = [limit("second", 20, 1_000), limit("minute", 600, 60_000), limit("hour", 9_000, 3_600_000)];
        let provider = provider(limits.into_iter().take(usize::try_from(long).unwrap() + 1).collect(), |_| ());
        let input = ClearTimeInput { sent_before: &sent, ..conditions(&provider, jobs) };
        let (by_limits, by_pace) = (clears_in(&input), measured(&input, &judged));
        prop_assert!(by_pace >= by_limits, "{by_pace:?}, and the limits allow {by_limits:?}");
        let larger = ClearTimeInput { sent_before: &sent, ..conditions(&provider, jobs + more) };
        prop_assert!(measured(&larger, &judged) >= by_pace);
    }

    /// The next readout comes two seconds later.
    #[test]
    fn part_moves_by_at_most_a_tenth_in_two_seconds(seconds in prop::collection::vec(0.0_f64..20.0, 150)) {
        let plain = plain();
        let [now, before] = [0, 2].map(|from| {
            let sent = steps(&seconds, from);
            measured(&ClearTimeInput { sent_before: &sent, ..conditions(&plain, 100_000) }, &JUDGED)
        });
        let ratio = now.as_secs_f64() / before.as_secs_f64();
        prop_assert!((1.0 / 1.1..=1.1).contains(&ratio), "{before:?}, then {now:?}");
    }

    /// Whatever pace a lane had before, and has since.
    #[test]
    fn part_moves_slowly_at_any_turn(before in 0.0_f64..20.0, after in 0.0_f64..20.0, since in 0_usize..150) {
        let (now, earlier) = turned(before, after, since);
        let ratio = now.as_secs_f64() / earlier.as_secs_f64();
        prop_assert!((1.0 / 1.1..=1.1).contains(&ratio), "{earlier:?}, then {now:?}");
    }
}

/// The clear times of a lane that changed its pace so many seconds ago: now, and two seconds earlier.
fn turned(before: f64, after: f64, since: usize) -> (Duration, Duration) {
    let plain = plain();
    let seconds: Vec<f64> = (0..150).map(|age| if age < since { after } else { before }).collect();
    let [now, earlier] = [0, 2].map(|from| {
        let sent = steps(&seconds, from);
        measured(&ClearTimeInput { sent_before: &sent, ..conditions(&plain, 100_000) }, &JUDGED)
    });
    (now, earlier)
}

/// The steepest turns: the whole pace to nothing and back. The part is least where it leaves its bound.
#[test]
fn part_moves_slowly_at_the_steepest_turns() {
    for since in 0..150 {
        for (before, after) in [(0.0, 20.0), (20.0, 0.0)] {
            let (now, earlier) = turned(before, after, since);
            let ratio = now.as_secs_f64() / earlier.as_secs_f64();
            assert!((1.0 / 1.1..=1.1).contains(&ratio), "{before} to {after}, {since} s: {earlier:?}, then {now:?}");
        }
    }
}
