//! Tests of forecasts: against hand calculation, and far behind against the rate of the tightest limit. Every instant
//! is an argument.

use super::*;
use crate::domain::explain::forecast::{ForecastInput, current_usage, forecast_start};
use crate::domain::permit_protocol::CallKind;
use crate::domain::time::Micros;

/// Start of a job with this cost ahead, in milliseconds rounded up, and the limit that decides.
fn forecast_of(
    spec: &QuotaSpec,
    past: &RecentUsage,
    before: u64,
    jobs_per_second: Option<f64>,
) -> Option<(u64, String)> {
    let ahead = ForecastInput { cost_before: before, cost: 1, kind: CallKind::Charge, jobs_per_second };
    let now = Micros(u64::try_from(NOW.0).unwrap() * 1_000);
    let start = forecast_start(spec, now, past, &ahead)?;
    let name = start.limited_by.map_or("none", |index| spec.limit_name(index)).to_owned();
    Some((u64::try_from(start.wait.as_micros().div_ceil(1_000)).unwrap(), name))
}

/// A window of a log is padded by 2 ms and 0.05 %: 60.032 s for a minute, 10.007 s for ten seconds.
#[test]
fn forecasts_match_hand_calculation() {
    use Algorithm::{FixedWindow, Gcra, SlidingLog, TokenBucket};
    let minute = spec(&[("per-minute", SlidingLog, 600, 60_000, None)]);
    let burst = past(&[(47_600, 600)], 0);
    let spread: Vec<(u64, u32)> = (0..10).map(|s| (s * 1_000, 1)).collect();
    let ten = spec(&[("ten", SlidingLog, 10, 10_000, None)]);
    let fixed = spec(&[("fixed", FixedWindow, 100, 60_000, None)]);
    let bucket = spec(&[("bucket", TokenBucket, 10, 1_000, Some(10))]);
    let gcra = spec(&[("gcra", Gcra, 10, 1_000, None)]);
    let both = spec(&[("a", SlidingLog, 100, 1_000, None), ("per-minute", SlidingLog, 600, 60_000, None)]);
    let nothing = past(&[], 0);
    let fifty = past(&[(1_000, 50)], 0);
    for (case, spec, past, before, egress, wanted) in [
        ("all of them are free at once", &minute, &burst, 37, None, (12_432, "per-minute")),
        ("the 601st waits for another window", &minute, &burst, 600, None, (72_464, "per-minute")),
        (
            "and for an answer",
            &minute,
            &RecentUsage { hold: ms(1_000), ..burst.clone() },
            600,
            None,
            (73_464, "per-minute"),
        ),
        ("a hundred windows behind", &minute, &burst, 60_000, None, (12_432 + 100 * 60_032, "per-minute")),
        ("the fourth oldest is free 10.007 - 6 s from now", &ten, &past(&spread, 0), 3, None, (4_007, "ten")),
        ("there is capacity for the jobs ahead, too", &minute, &fifty, 549, None, (0, "none")),
        ("the next minute of the calendar", &fixed, &past(&[(5_000, 100)], 0), 99, None, (40_000, "fixed")),
        ("the one after it", &fixed, &past(&[(5_000, 100)], 0), 100, None, (100_000, "fixed")),
        ("last minute's uses are over", &fixed, &past(&[(25_000, 100)], 0), 99, None, (0, "none")),
        ("a tenth of a second each", &bucket, &past(&[(0, 10)], 0), 4, None, (500, "bucket")),
        ("the same without a burst", &gcra, &past(&[(0, 1)], 0), 4, None, (500, "gcra")),
        ("the one that refuses last is named", &both, &burst, 37, None, (12_432, "per-minute")),
        ("the bucket of one worker lets out ten a second", &minute, &nothing, 37, Some(10.0), (3_700, "none")),
    ] {
        let (wait_ms, by) = forecast_of(spec, past, before, egress).unwrap();
        // The first call is a microsecond's rounding away.
        assert!(wait_ms.abs_diff(wanted.0) <= 1 && by == wanted.1, "{case}: {wait_ms} ms by {by}, not {wanted:?}");
    }
    let open = RecentUsage { in_flight: CostByKind::charges(600), ..nothing };
    assert_eq!(forecast_of(&minute, &open, 0, None).unwrap().0, 60_032, "requests in flight count as answered now");
    assert_eq!(forecast_of(&spec(&[("shut", SlidingLog, 0, 1_000, None)]), &burst, 0, None), None);
    assert_eq!(current_usage(&minute, Micros(0), &RecentUsage::default()), [(0, 0)]);
}

#[test]
fn long_queue_forecast_is_within_one_window() {
    let hundred = spec(&[("all", Algorithm::SlidingLog, 100, 1_000, None)]);
    let spread: Vec<(u64, u32)> = (0..100).map(|nth| (nth * 10, 1)).collect();
    let wanted = 10_000.0 * 1_002.5;
    let (wait_ms, _) = forecast_of(&hundred, &past(&spread, 0), 1_000_000, None).unwrap();
    assert!((wait_ms as f64 - wanted).abs() / wanted < 0.01, "{wait_ms} ms, not {wanted}");
    let (near_ms, _) = forecast_of(&hundred, &past(&spread, 0), 10_000, None).unwrap();
    assert!((near_ms as f64 - 100_250.0).abs() < 1_003.0, "{near_ms} ms");
}
