//! Tests of the history's pure functions: the recorder's samples, and the points that are read back.

use super::*;

const HOUR_MS: i64 = 3_600_000;
/// A multiple of an hour.
const T0: i64 = 1_800_000_000_000;

fn clock(now_ms: i64, last: Option<[i64; 2]>) -> HistoryClock {
    let last = last.map(|[began_at_ms, recorded_until_ms]| RecordedRun { began_at_ms, recorded_until_ms });
    HistoryClock { now_ms, last }
}

fn run(began_s: i64, until_s: i64) -> RecordedRun {
    RecordedRun { began_at_ms: T0 + began_s * 1_000, recorded_until_ms: T0 + until_s * 1_000 }
}

fn sample(at_s: i64, started: u64, waiting: Option<u64>) -> HistorySample {
    let at_ms = T0 + at_s * 1_000;
    HistorySample { provider: "acme".to_owned(), at_ms, started, finished: started / 2, waiting, ..Default::default() }
}

#[test]
fn recorder_is_one_lag_late_and_leaves_no_step_out() {
    let due = |now_s: i64, last: Option<[i64; 2]>| {
        DueSteps::new(&clock(T0 + now_s * 1_000, last.map(|run| run.map(|at_s| T0 + at_s * 1_000))))
    };
    let first = due(27, None).unwrap();
    assert_eq!((first.from_ms - T0, first.to_ms - T0, first.run), (0, 10_000, RunUpdate::Begin(run(0, 10))));
    assert_eq!(due(29, Some([0, 10])), None);
    assert_eq!(due(5, Some([0, 90])), None, "the clock was set back");
    let next = due(52, Some([0, 10])).unwrap();
    assert_eq!(next.run, RunUpdate::Extend { last: run(0, 10), until_ms: T0 + 40_000 });
    assert_eq!(next.ends().map(|at| (at - T0) / 1_000).collect::<Vec<_>>(), [20, 30, 40]);
    // After a gap a new run begins, and the requests of the time before it are still counted.
    let later = due(200, Some([0, 10])).unwrap();
    assert_eq!((later.from_ms - T0, later.run), (10_000, RunUpdate::Begin(run(180, 190))));
    assert_eq!(due(100_000, Some([0, 10])).unwrap().from_ms - T0, 99_990_000 - HOUR_MS);
}

#[test]
fn only_changes_and_counts_are_written() {
    let last = sample(0, 0, Some(7));
    let due = DueSteps {
        from_ms: T0,
        to_ms: T0 + 60_000,
        run: RunUpdate::Extend { last: run(-10, 0), until_ms: T0 + 60_000 },
    };
    let counts = BTreeMap::from([(T0 + 30_000, sample(30, 5, None))]);
    let waiting = |at_ms: i64| if at_ms >= T0 + 50_000 { None } else { Some(7) };
    let figures = |at_ms: i64| HistorySample { waiting: waiting(at_ms), ..HistorySample::default() };
    let written = samples_to_write("acme", &due, &counts, figures, Some(&last));
    assert_eq!(written, [sample(30, 5, Some(7)), sample(50, 0, None)]);
    // The first sample of a provider, and one each hour.
    assert_eq!(samples_to_write("acme", &due, &BTreeMap::new(), |_| sample(0, 0, Some(7)), None).len(), 1);
    let hours = DueSteps { to_ms: T0 + 3 * HOUR_MS, ..due };
    let idle = samples_to_write("acme", &hours, &BTreeMap::new(), |_| sample(0, 0, Some(7)), Some(&last));
    assert_eq!(idle.iter().map(|sample| (sample.at_ms - T0) / 60_000).collect::<Vec<_>>(), [60, 120, 180]);
    // Before a run only counts are known.
    let resumed = DueSteps { run: RunUpdate::Begin(run(50, 60)), ..due };
    let written = samples_to_write("acme", &resumed, &counts, |_| sample(0, 0, Some(9)), Some(&last));
    assert_eq!(written.iter().map(|sample| (sample.at_ms - T0) / 1_000).collect::<Vec<_>>(), [30]);
}

#[test]
fn resolution_follows_the_range() {
    let now_ms = T0 + 100 * 24 * HOUR_MS;
    for (hours, ago_hours, step_s, source) in [
        (1, 1, 10, SampleStep::Fine),
        (6, 6, 30, SampleStep::Fine),
        (24, 24, 120, SampleStep::Fine),
        (1, 48, 300, SampleStep::Coarse),
        (24 * 7, 24 * 7, 900, SampleStep::Coarse),
        (24 * 30, 24 * 30, 3_600, SampleStep::Coarse),
        (24 * 31, 24 * 31, 7_200, SampleStep::Coarse),
    ] {
        let from_ms = now_ms - ago_hours * HOUR_MS;
        let range = HistoryRange::new(from_ms, from_ms + hours * HOUR_MS, now_ms);
        assert_eq!((range.step_ms / 1_000, range.source), (step_s, source), "{hours} h");
        let count = points(&range, &[], &[]).len();
        assert!(count <= 721, "{hours} h: {count} points");
    }
}

#[test]
fn gap_in_a_run_says_that_nothing_changed() {
    let range = HistoryRange::new(T0, T0 + 60_000, T0 + HOUR_MS);
    let samples = [sample(-20, 0, Some(4)), sample(20, 6, Some(3)), sample(50, 0, None)];
    let shown = points(&range, &samples, &[run(-100, 45), run(45, 60)]);
    let seen: Vec<_> = shown.iter().map(|point| (point.started, point.waiting)).collect();
    let expected =
        [(0, Some(4)), (6, Some(3)), (0, Some(3)), (0, Some(3)), (0, None), (0, None)].map(|(n, w)| (Some(n), w));
    assert_eq!(seen, expected);
    assert_eq!((shown[1].at.as_str(), shown[1].started_per_s), ("2027-01-15T08:00:20.000Z", Some(0.6)));
}

#[test]
fn unknown_time_is_null_and_never_zero() {
    let range = HistoryRange::new(T0, T0 + 60_000, T0 + HOUR_MS);
    let samples = [sample(10, 5, Some(4)), sample(30, 3, Some(2)), sample(60, 0, Some(1))];
    let shown = points(&range, &samples, &[run(0, 15), run(50, 60)]);
    let seen: Vec<_> = shown.iter().map(|point| (point.started, point.waiting)).collect();
    let expected = [
        (Some(5), Some(4)),
        // Half of it is known.
        (Some(0), Some(4)),
        // Requests that began while nothing was recorded.
        (Some(3), Some(2)),
        (None, None),
        (None, None),
        (Some(0), Some(1)),
    ];
    assert_eq!(seen, expected);
    // Before the first sample of a provider, and long after its last one.
    assert_eq!(points(&range, &[], &[run(0, 60)])[0].started, None);
    let old = [sample(-2 * 3_600, 0, Some(4))];
    assert_eq!(points(&range, &old, &[run(-9_000, 60)])[0].waiting, None);
}

/// Random samples: whatever the step, the sums over a range are those of its samples.
#[test]
fn sums_do_not_depend_on_the_step() {
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..50 {
        let counts: Vec<u64> = (0..2_160).map(|_| random(150)).collect();
        let busy = (1..).zip(&counts).filter(|(_, count)| **count < 50);
        let samples: Vec<HistorySample> = busy.map(|(step, count)| sample(step * 10, *count, Some(1))).collect();
        let runs = [run(0, i64::try_from(random(20_000)).unwrap() + 1), run(20_100, 21_600)];
        let total: u64 = samples.iter().map(|sample| sample.started).sum();
        for step_ms in STEPS_MS.into_iter().filter(|step_ms| 21_600_000 % step_ms == 0) {
            let range = HistoryRange { from_ms: T0, to_ms: T0 + 21_600_000, step_ms, source: SampleStep::Fine };
            let shown: u64 = points(&range, &samples, &runs).iter().filter_map(|point| point.started).sum();
            assert_eq!(shown, total, "step {step_ms} ms");
        }
    }
}

#[test]
fn reports_show_starts_and_breaker_changes() {
    use crate::fleet::report::{LaneReport, ProcessReport, ReportedDecision};
    let decision = |at_ms, kind: &str| ReportedDecision {
        at_ms,
        kind: kind.to_owned(),
        reason: "no answer in time".to_owned(),
        permits: 0,
    };
    let decisions =
        [(T0 + 3, "breaker_closed"), (T0 + 2, "breaker_opened"), (T0 + 1, "granted"), (T0, "breaker_opened")];
    let lane = LaneReport { decisions: decisions.map(|(at, kind)| decision(at, kind)).into(), ..LaneReport::default() };
    let report = ProcessReport { lanes: [("acme".to_owned(), lane)].into(), ..ProcessReport::default() };
    let worker = |id: &str, started_at_ms, report| WorkerProcess {
        id: id.to_owned(),
        host: "pay-1".to_owned(),
        pid: 7,
        version: "0.2.0".to_owned(),
        started_at_ms,
        report,
        ..WorkerProcess::default()
    };
    let workers = [worker("new", T0 + 1, Some(report)), worker("old", T0 - 1, None)];
    let mut marks: Vec<RecordedMark> = marks_of_workers(&workers, T0).into_iter().map(RecordedMark::from).collect();
    marks.sort();
    let seen: Vec<_> = marks.iter().map(|mark| (mark.kind.as_str(), mark.text.as_str())).collect();
    let expected = [
        ("worker_started", "worker pay-1:7 started, version 0.2.0"),
        ("breaker_opened", "no answer in time"),
        ("breaker_closed", "no answer in time"),
    ];
    assert_eq!(seen, expected);
}
