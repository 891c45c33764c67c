//! Tests of the readout judge: it finds each kind of false readout, and none in a true history.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ask::{Explained, Limit, Overview, Provider, Shown};
use super::finish_times::finish_times;
use super::judge::{OF_FAULTS, RULES, judge, judged};
use super::{History, Published, Sample, Throttled, Truth, WorkerTruth};

pub(super) const SECONDS: u64 = 20;

pub(super) fn second(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// Fifty payments wait at a paused provider for twenty seconds, and two workers show it.
pub(super) fn true_history() -> History {
    let worker = |worker: usize, pid: u32| WorkerTruth { worker, pid, ops_port: 1, healthy: true };
    let truth = |number: u64| Truth {
        from: second(number),
        to: second(number) + Duration::from_millis(10),
        ledger: Some(BTreeMap::from([("acme".to_owned(), BTreeMap::from([("succeeded".to_owned(), 7)]))])),
        ready: Some(BTreeMap::from([("acme".to_owned(), 50)])),
        limiter_kept: Some(true),
        published: BTreeMap::from([("acme".to_owned(), Published { confirmed: 57, sent: 57, copies: 0 })]),
        throttled: BTreeMap::from([("acme".to_owned(), Throttled { ever: 9, lately: 3 })]),
        writes_are_refused: false,
        publishers_are_blocked: false,
        workers: vec![worker(0, 10), worker(1, 11)],
    };
    let sample = |number: u64| Sample {
        asked: second(number) + Duration::from_millis(20),
        answered: second(number) + Duration::from_millis(200),
        worker: 0,
        shown: shown(),
    };
    History { started: None, truths: (0..=SECONDS).map(truth).collect(), samples: (0..SECONDS).map(sample).collect() }
}

fn shown() -> Shown {
    let state = "paused".to_owned();
    let provider = Provider { state, waiting: 50, finished: 7, refused: Some(9), ..Provider::default() };
    let limit = Limit { name: "all".to_owned(), used: 5, capacity: 10, received: 5 };
    let waiting = Some("waiting".to_owned());
    Shown {
        overview: Some(Overview { providers: BTreeMap::from([("acme".to_owned(), provider)]), ..Overview::default() }),
        lost_pids: vec![9],
        live_pids: vec![10, 11],
        limits: BTreeMap::from([("acme".to_owned(), Ok(vec![limit]))]),
        explained: vec![Explained {
            job: "a".to_owned(),
            before: waiting.clone(),
            after: waiting.clone(),
            state: waiting,
        }],
        waiting_metric: Some(BTreeMap::from([("acme".to_owned(), 50.0)])),
        panels: BTreeMap::from([("Waiting".to_owned(), BTreeMap::from([("acme".to_owned(), 50.0)]))]),
        alerts: Some(vec!["SluicegateLimitNearlyUsed".to_owned()]),
        ..Shown::default()
    }
}

pub(super) fn acme(sample: &mut Sample) -> &mut Provider {
    sample.shown.overview.as_mut().unwrap().providers.get_mut("acme").unwrap()
}

#[test]
fn correct_history_has_no_violation() {
    let history = true_history();
    assert_eq!(judge(&history), Vec::new());
    for (rule, count) in judged(&history) {
        assert_eq!(count > 0, !OF_FAULTS.contains(&rule) || rule.contains("429s"), "{rule}: {count}");
    }
}

#[test]
fn each_rule_finds_its_violation() {
    type Change = fn(&mut Sample);
    let changes: [(&str, Change); 17] = [
        ("limits can be looked at", |sample| {
            sample.shown.limits.insert("acme".to_owned(), Err("not an integer".to_owned()));
        }),
        ("usage is what the provider received", |sample| {
            let limit = Limit { name: "all".to_owned(), used: 4, capacity: 10, received: 5 };
            sample.shown.limits.insert("acme".to_owned(), Ok(vec![limit]));
        }),
        ("usage is what the provider received", |sample| {
            let limit = Limit { name: "all".to_owned(), used: 11, capacity: 10, received: 5 };
            sample.shown.limits.insert("acme".to_owned(), Ok(vec![limit]));
        }),
        ("available backends are not called unavailable", |sample| {
            acme(sample).state = "backend_unavailable".to_owned();
        }),
        ("available backends are not called unavailable", |sample| {
            acme(sample).state = "backend_unavailable".to_owned();
            acme(sample).cause = "limiter: no answer in time".to_owned();
        }),
        ("available backends are not called unavailable", |sample| {
            sample.shown.overview.as_mut().unwrap().warnings.push("database: no answer in time".to_owned());
        }),
        ("running workers are not called lost", |sample| sample.shown.lost_pids.push(11)),
        ("running workers are not called lost", |sample| sample.shown.live_pids = vec![10]),
        ("waiting counts every payment once", |sample| acme(sample).waiting = 48),
        ("waiting counts every payment once", |sample| acme(sample).in_flight = 3),
        ("waiting counts every payment once", |sample| acme(sample).finished = 6),
        ("dashboard shows what waits", |sample| {
            sample.shown.panels.insert("Waiting".to_owned(), BTreeMap::from([("acme".to_owned(), 51.0)]));
        }),
        ("alerts are silent while nothing is wrong", |sample| {
            sample.shown.alerts = Some(vec!["SluicegateNoWorker".to_owned()]);
        }),
        ("explanations name the state", |sample| sample.shown.explained[0].state = Some("unrecorded".to_owned())),
        ("no finish time is promised while 429s come", |sample| acme(sample).clears_in_ms = Some(17_000)),
        ("429s are counted as by the provider", |sample| acme(sample).refused = Some(8)),
        ("429s are counted as by the provider", |sample| acme(sample).refused = None),
    ];
    for (rule, change) in changes {
        let mut history = true_history();
        change(history.samples.last_mut().unwrap());
        let found: Vec<&str> = judge(&history).iter().map(|untruth| untruth.rule).collect();
        assert_eq!(found, [rule], "{rule}");
    }
}

#[test]
fn provider_is_not_called_running_once_it_refuses_again() {
    let shown_as_running = |refused_again: bool| {
        let mut history = true_history();
        acme(history.samples.last_mut().unwrap()).state = "running".to_owned();
        let second_pause = history.truths.iter_mut().skip(5);
        second_pause.for_each(|truth| truth.throttled.get_mut("acme").unwrap().ever += u64::from(refused_again));
        let shown = history.samples.iter_mut().skip(5);
        shown.for_each(|sample| acme(sample).refused = Some(9 + u64::from(refused_again)));
        judge(&history)
    };
    assert_eq!(shown_as_running(false), Vec::new(), "one pause may be the only one");
    let untruths = shown_as_running(true);
    let rules: Vec<&str> = untruths.iter().map(|untruth| untruth.rule).collect();
    assert_eq!(rules, ["no finish time is promised while 429s come"]);
}

#[test]
fn figure_without_its_source_is_a_violation() {
    let broker_down = || {
        let mut history = true_history();
        history.truths.iter_mut().for_each(|truth| truth.ready = None);
        history
    };
    let untruths = judge(&broker_down());
    assert!(untruths.iter().all(|untruth| untruth.rule == "a missing source is not zero"), "{untruths:?}");
    assert!(untruths.iter().any(|untruth| untruth.what.contains("as if every source")), "{untruths:?}");
    assert!(untruths.iter().any(|untruth| untruth.what.contains("/metrics")), "{untruths:?}");
    let mut honest = broker_down();
    for sample in &mut honest.samples {
        acme(sample).at_least = true;
        sample.shown.waiting_metric = Some(BTreeMap::new());
    }
    assert_eq!(judge(&honest), Vec::new());
    acme(honest.samples.last_mut().unwrap()).clears_in_ms = Some(17_000);
    assert_eq!(judge(&honest).len(), 1);
}

#[test]
fn backend_that_answers_and_does_nothing_is_named() {
    type Fault = fn(&mut Truth);
    let faults: [(Fault, &str); 2] = [
        (|truth| truth.writes_are_refused = true, "the database cannot write: it is read-only"),
        (|truth| truth.publishers_are_blocked = true, "the broker blocks publishers: low on disk"),
    ];
    for (fault, words) in faults {
        let mut history = true_history();
        history.truths.iter_mut().for_each(fault);
        let rules: Vec<&str> = judge(&history).iter().map(|untruth| untruth.rule).collect();
        assert!(
            rules.len() > 5 && rules.iter().all(|rule| *rule == "a backend that does no work is named"),
            "{rules:?}"
        );
        for sample in &mut history.samples {
            sample.shown.overview.as_mut().unwrap().said.push(words.to_owned());
        }
        assert_eq!(judge(&history), Vec::new(), "{words}");
    }
}

#[test]
fn recent_change_may_be_shown_late() {
    let mut history = true_history();
    // Three more are published at second 17. From then on, readouts may show 50 to 53.
    for truth in &mut history.truths[17..] {
        truth.published.insert("acme".to_owned(), Published { confirmed: 60, sent: 60, copies: 0 });
    }
    assert_eq!(judge(&history), Vec::new());
    acme(history.samples.last_mut().unwrap()).waiting = 54;
    assert_eq!(judge(&history).len(), 1);
    // A frozen worker, or a backend that was just unavailable to all, excuses statements about backends.
    let mut history = true_history();
    history.truths[16].workers[1].healthy = false;
    acme(history.samples.last_mut().unwrap()).state = "backend_unavailable".to_owned();
    assert_eq!(judge(&history), Vec::new());
    assert_eq!(RULES.len(), judged(&history).len());
}

#[test]
fn payments_between_queue_and_ledger_may_be_missing() {
    // A worker drains the queue from second 15 on.
    let mut history = true_history();
    for (moved, truth) in (1..).zip(&mut history.truths[15..]) {
        truth.ledger.as_mut().unwrap().get_mut("acme").unwrap().insert("waiting".to_owned(), moved);
        truth.ready.as_mut().unwrap().insert("acme".to_owned(), 50 - 2 * moved);
    }
    acme(&mut history.samples[16]).waiting = 48;
    assert_eq!(judge(&history), Vec::new());
    acme(&mut history.samples[10]).waiting = 48;
    assert_eq!(judge(&history).len(), 1);
}

#[test]
fn finish_times_are_checked_against_actual_ones() {
    // Five payments of fifty finish each second, from second 8 to second 17.
    let mut history = true_history();
    for (number, truth) in history.truths.iter_mut().enumerate() {
        let ended = 7 + 5 * u64::try_from(number).unwrap().saturating_sub(7).min(10);
        truth.ledger.as_mut().unwrap().get_mut("acme").unwrap().insert("succeeded".to_owned(), ended);
    }
    for sample in &mut history.samples {
        let left_ms = second(17).saturating_sub(sample.asked).as_millis();
        acme(sample).clears_in_ms = Some(u64::try_from(left_ms).unwrap());
        acme(sample).waiting = 50;
    }
    let times = finish_times(&history);
    assert!(times.len() > 5 && times.iter().all(|time| time.is_right()), "{times:?}");
    acme(&mut history.samples[8]).clears_in_ms = Some(18 * 60_000);
    assert_eq!(finish_times(&history).iter().filter(|time| !time.is_right()).count(), 1);
}

#[test]
fn payments_that_arrive_and_finish_between_two_reads_may_be_shown() {
    // Five are published between seconds 15 and 16, and five finish: at both reads, fifty are open.
    let mut history = true_history();
    for truth in &mut history.truths[16..] {
        truth.published.insert("acme".to_owned(), Published { confirmed: 62, sent: 62, copies: 0 });
        truth.ledger.as_mut().unwrap().get_mut("acme").unwrap().insert("succeeded".to_owned(), 12);
    }
    for sample in &mut history.samples[16..] {
        acme(sample).finished = 12;
    }
    assert_eq!(judge(&history), Vec::new());
    for (waiting, untruths) in [(55, 0), (56, 1)] {
        acme(&mut history.samples[17]).waiting = waiting;
        assert_eq!(judge(&history).len(), untruths, "{waiting} shown");
    }
    // Before and long after that, it is fifty.
    acme(&mut history.samples[17]).waiting = 50;
    acme(&mut history.samples[14]).waiting = 51;
    assert_eq!(judge(&history).len(), 1);
}
