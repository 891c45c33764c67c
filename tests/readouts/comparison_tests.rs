//! Tests of the comparison: it finds each kind of deviation, and none in a true history.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ask::{Cutoff, Overview, Provider, Shown};
use super::comparison::{Day, Row, compare, table};
use super::judge_tests::{SECONDS, acme, second, true_history};
use super::{History, Published, Sample, Truth};

/// Five payments of fifty finish each second, from second 8 to second 17; the cut-off is at second 12.
fn draining() -> (History, Day) {
    let mut history = true_history();
    for (number, truth) in (0..).zip(&mut history.truths) {
        let ended = 7 + 5 * u64::saturating_sub(number, 7).min(10);
        truth.ledger.as_mut().unwrap().get_mut("acme").unwrap().insert("succeeded".to_owned(), ended);
        truth.ready.as_mut().unwrap().insert("acme".to_owned(), 57 - ended);
    }
    for (number, sample) in (0..).zip(&mut history.samples) {
        let left = second(17).saturating_sub(sample.asked);
        let waiting = 50 - 5 * u64::saturating_sub(number, 7).min(10);
        acme(sample).waiting = waiting;
        acme(sample).clears_in_ms = Some(u64::try_from(left.as_millis()).unwrap());
        acme(sample).cutoff = Some(Cutoff { in_ms: 0, missed: Some(25) });
        sample.shown.status = sample.shown.overview.clone();
        let all = |figure: f64| BTreeMap::from([("acme".to_owned(), figure)]);
        sample.shown.waiting_metric = Some(all(f64::from(u32::try_from(waiting).unwrap())));
        sample.shown.panels.insert("Waiting".to_owned(), all(f64::from(u32::try_from(waiting).unwrap())));
        sample.shown.clear_metric = all(left.as_secs_f64());
        sample.shown.panels.insert("Clears in".to_owned(), all(left.as_secs_f64()));
    }
    let day = Day {
        steady_from: BTreeMap::from([("acme".to_owned(), Duration::ZERO)]),
        cutoff: Some(("acme".to_owned(), second(12))),
        earned: Vec::new(),
    };
    (history, day)
}

fn violations(rows: &[Row]) -> Vec<(&str, usize)> {
    let found = rows.iter().filter(|row| !row.violations.is_empty());
    found.map(|row| (row.rule.as_str(), row.violations.len())).collect()
}

#[test]
fn true_readouts_deviate_from_nothing() {
    let (history, day) = draining();
    let rows = compare(&history, &day);
    assert_eq!(violations(&rows), [], "{}", table(&rows));
    let judged = rows.iter().filter(|row| row.judged > 0).count();
    assert!(judged >= rows.len() - 4, "only outages are missing:\n{}", table(&rows));
}

#[test]
fn each_deviation_is_found_once() {
    type Change = fn(&mut Sample);
    let changes: [(&str, Change); 5] = [
        ("waiting, page and API", |sample| acme(sample).waiting = 52),
        ("waiting, dashboard", |sample| {
            sample.shown.panels.insert("Waiting".to_owned(), BTreeMap::from([("acme".to_owned(), 60.0)]));
        }),
        ("finish time of acme, page and API", |sample| acme(sample).clears_in_ms = Some(60_000)),
        ("finish time of acme, /metrics", |sample| {
            sample.shown.clear_metric.insert("acme".to_owned(), 60.0);
        }),
        ("alerts have a cause", |sample| sample.shown.alerts.as_mut().unwrap().push("SluicegateWorkerGone".to_owned())),
    ];
    for (rule, change) in changes {
        let (mut history, day) = draining();
        change(&mut history.samples[8]);
        assert_eq!(violations(&compare(&history, &day)), [(rule, 1)]);
    }
}

#[test]
fn backend_that_is_called_unavailable_too_long_is_found() {
    for (late, expected) in [(2, 0), (5, 3)] {
        let (mut history, day) = draining();
        history.truths[9].ready = None;
        // Available from second 10 on.
        for sample in &mut history.samples[10..=10 + late] {
            sample.shown.overview.as_mut().unwrap().outages.push("queue".to_owned());
        }
        let rows = compare(&history, &day);
        let found = rows.iter().find(|row| row.rule == "unavailable no longer than 3 s after, page and API").unwrap();
        assert_eq!((found.violations.len(), found.judged), (expected, SECONDS as usize - 10), "{}", table(&rows));
    }
}

/// A lane that finishes so many payments a second for two minutes, and so many for two more. After the first two, a
/// readout shows this finish time.
fn paced(paces: [u64; 2], clears_in: Duration) -> History {
    let finished = |at: u64| paces[0] * at.min(120) + paces[1] * at.saturating_sub(120).min(120);
    let all = finished(240);
    let truth = |at: u64| {
        let states =
            BTreeMap::from([("succeeded".to_owned(), finished(at)), ("waiting".to_owned(), all - finished(at))]);
        let published = Published { confirmed: all, sent: all, copies: 0 };
        Truth {
            from: Duration::from_secs(at),
            to: Duration::from_secs(at),
            ledger: Some(BTreeMap::from([("acme".to_owned(), states)])),
            ready: Some(BTreeMap::new()),
            limiter_kept: Some(true),
            published: BTreeMap::from([("acme".to_owned(), published)]),
            ..Truth::default()
        }
    };
    let clears_in_ms = Some(u64::try_from(clears_in.as_millis()).unwrap());
    let provider = Provider { state: "running".to_owned(), clears_in_ms, ..Provider::default() };
    let overview = Overview { providers: BTreeMap::from([("acme".to_owned(), provider)]), ..Overview::default() };
    let asked = Duration::from_secs(120);
    let shown = Shown { overview: Some(overview), ..Shown::default() };
    let sample = Sample { asked, answered: asked, worker: 0, shown };
    History { started: None, truths: (0..=241).map(truth).collect(), samples: vec![sample] }
}

/// A forecast cannot know that a machine becomes slower; it must know how slow it was.
#[test]
fn change_of_pace_is_told_from_a_wrong_forecast() {
    let day = Day { steady_from: BTreeMap::from([("acme".to_owned(), Duration::ZERO)]), ..Day::default() };
    for (paces, clears_in_s, expected) in
        [([10, 10], 120, (0, 0)), ([10, 5], 60, (0, 1)), ([10, 10], 60, (1, 0)), ([5, 5], 80, (1, 0))]
    {
        let rows = compare(&paced(paces, Duration::from_secs(clears_in_s)), &day);
        let row = rows.iter().find(|row| row.rule == "finish time of acme, page and API").unwrap();
        assert_eq!((row.violations.len(), row.unforeseen.len()), expected, "{paces:?}, shown {clears_in_s} s: {row:?}");
        assert_eq!(row.is_broken(), expected != (0, 0), "{row:?}");
    }
}

#[test]
fn few_unforeseen_forecasts_are_excused() {
    let rows = compare(&paced([10, 10], Duration::from_secs(120)), &Day::default());
    for (violations, unforeseen, is_broken) in [(0, 0, false), (0, 1, false), (0, 2, true), (1, 0, true)] {
        let [violations, unforeseen] = [violations, unforeseen].map(|count| vec![String::new(); count]);
        let row = Row { judged: 10, violations, unforeseen, ..rows[0].clone() };
        assert_eq!(row.is_broken(), is_broken, "{row:?}");
    }
}
