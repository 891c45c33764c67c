//! Tests of the judged times: what is a cause, which part of a step counts, and when a lane has no work.

use super::*;

const NOW_MS: i64 = 1_800_000_000_000;

/// Points each two seconds over the last minute, each changed by its age in seconds.
fn minute(change: impl Fn(i64, &mut PacePoint)) -> VecDeque<PacePoint> {
    let point = |age_s: i64| {
        let mut point = PacePoint {
            at_ms: NOW_MS - age_s * 1_000,
            version: 7,
            is_disturbed: false,
            has_work: true,
            cost_per_job: 2.0,
        };
        change(age_s, &mut point);
        point
    };
    (0..=30).rev().map(|number| point(number * 2)).collect()
}

fn judged(points: &VecDeque<PacePoint>, cause_ms: i64) -> Vec<f64> {
    judged_before(points, cause_ms, NOW_MS).into_iter().map(|part| (part * 100.0).round() / 100.0).collect()
}

#[test]
fn time_before_a_cause_is_not_judged() {
    let calm = minute(|_, _| ());
    // The first points are those of a process that has started: its first fourteen seconds are not judged.
    assert_eq!(judged(&calm, 0), [1.0, 1.0, 1.0, 1.0, 0.6]);
    let paused = minute(|age_s, point| point.is_disturbed = (30..=34).contains(&age_s));
    assert_eq!(judged(&paused, 0), [1.0, 0.4], "nothing disturbs it for 28 s");
    let changed = minute(|age_s, point| point.version -= i64::from(age_s > 30));
    assert_eq!(judged(&changed, 0), [1.0, 0.6]);
    for (cost, wanted) in [(20.0, &[1.0, 0.6][..]), (1.0, &[1.0, 0.6]), (2.2, &[1.0, 1.0, 1.0, 1.0, 0.6])] {
        let costs = minute(|age_s, point| point.cost_per_job = if age_s > 30 { cost } else { 2.0 });
        assert_eq!(judged(&costs, 0), wanted, "the payments cost {cost} before");
    }
    assert_eq!(judged(&calm, NOW_MS - 20_000), [0.6], "another worker has started");
    assert!(judged(&calm, NOW_MS - 10_000).is_empty());
    assert!(judged(&minute(|age_s, point| point.is_disturbed = age_s == 0), 0).is_empty());
    let with_gap: VecDeque<PacePoint> =
        calm.into_iter().filter(|point| !(20_000..=26_000).contains(&(NOW_MS - point.at_ms))).collect();
    assert_eq!(judged(&with_gap, 0), [0.4]);
    assert!(judged(&VecDeque::new(), 0).is_empty());
}

#[test]
fn lane_without_work_is_not_judged() {
    let idle = minute(|_, point| point.has_work = false);
    assert_eq!(judged(&idle, 0), [0.0; 5]);
    let drained = minute(|age_s, point| point.has_work = age_s >= 4);
    assert_eq!(judged(&drained, 0), [0.36, 1.0, 1.0, 1.0, 0.6]);
}
