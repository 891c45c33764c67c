//! The billing day of an operator: eight providers of different troubles, each backend killed once, and every readout
//! compared with what came true.
//!
//! Payments arrive faster than the providers take them. Meanwhile backends and a worker are killed, a limit is changed,
//! and providers fail. After that, the backlogs drain undisturbed, so that the shown finish times can come true. The
//! oracles judge the providers' records, and the readout oracle every view of every figure.
//!
//! `BILLING_DAY_PAYMENTS=80000` is the whole day, 23 minutes in a release build. CONTRIBUTING.md says how to run it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use self::script::{PROVIDERS, Script, job, rows};
use crate::oracle::{ORACLES, judge};
use crate::readout_oracle::comparison::{self, Day, compare};
use crate::readout_oracle::judge::{RULES, judge_by, judged, table};
use crate::readout_oracle::prometheus::Prometheus;
use crate::readout_oracle::{self, History, watch};
use crate::readouts::Watched;
use crate::records::Records;
use crate::stand::{Stand, StandOptions};
use crate::watch::Watch;

mod happenings;
mod script;

/// Payments of the short day, a few minutes long.
const SHORT: u64 = 6_000;
/// The whole day.
const WHOLE: u64 = 80_000;
/// In a day of so many payments, the forecasts must come true. A short one is run beside other tests, which delay
/// payments more than the limits do: its forecasts are printed alone.
const FORECASTS_JUDGED_MIN: u64 = 20_000;
/// Payments that the providers together take in a second.
const PER_SECOND: f64 = 92.0;
/// Until this part of the day, payments arrive and things happen. Then the backlogs drain.
const ARRIVAL_PART: f64 = 0.55;
/// The cut-off is at the first full minute after this part of the day.
const CUTOFF_PART: f64 = 0.7;
/// After the last payment, readouts still have to show that none waits.
const AFTERWARDS: Duration = Duration::from_secs(8);
/// A 429 is confirmed and shown within this time.
const REFUSAL_SHOWN_WITHIN: Duration = Duration::from_secs(10);
/// Most 429s whose outcome a killed worker or database did not record.
const LOST_MAX: u64 = 32;
/// Alerts whose cause is part of the day.
const EARNED: [&str; 8] = [
    "SluicegateCutoffMissed",
    "SluicegateBreakerOpen",
    "SluicegateProviderErrorsJump",
    "SluicegateDeclinesJump",
    "SluicegateLaneStopped",
    "SluicegateSettingsDiffer",
    "SluicegateOutcomesNotPublished",
    "SluicegateWorkerGone",
];

/// What the threads of the day share.
pub struct Course {
    pub stand: Stand,
    pub prometheus: Prometheus,
    pub began: Instant,
    /// Its length, if nothing went wrong.
    pub length: Duration,
    payments: u64,
    /// Messages sent so far, by the index of the provider.
    sent: Mutex<Vec<readout_oracle::Published>>,
    /// When the last message of each provider was confirmed.
    published_at: Mutex<Vec<Option<Duration>>>,
    /// When the broker was killed; until a while later, messages may have a second copy.
    pub broker_killed_at: Mutex<Option<Instant>>,
    /// What happened, and when.
    pub log: Mutex<Vec<(Duration, String)>>,
}

impl Course {
    fn new(payments: u64) -> Self {
        let length = Duration::from_secs_f64(float(payments) / PER_SECOND);
        let mut options = StandOptions::default();
        options.environment.push(("SLUICEGATE_LOG__LEVEL".to_owned(), "info".to_owned()));
        let mut stand = Stand::start(options);
        for script in &PROVIDERS {
            stand.add_provider(script.name, script.options());
        }
        let prometheus = Prometheus::start();
        let course = Self {
            stand,
            prometheus,
            began: Instant::now(),
            length,
            payments,
            sent: Mutex::new(vec![readout_oracle::Published::default(); PROVIDERS.len()]),
            published_at: Mutex::new(vec![None; PROVIDERS.len()]),
            broker_killed_at: Mutex::default(),
            log: Mutex::default(),
        };
        course.start_workers()
    }

    fn start_workers(mut self) -> Self {
        let at = Timestamp::now().as_second() + whole_seconds(self.length.mul_f64(CUTOFF_PART));
        let cutoff = Timestamp::from_second((at / 60 + 1) * 60).unwrap();
        self.stand.apply(&rows(&cutoff.strftime("%H:%M UTC").to_string()));
        for _ in 0..2 {
            self.stand.add_worker();
        }
        self.scrape();
        let ahead = cutoff.duration_since(Timestamp::now()).unsigned_abs();
        self.began = Instant::now();
        self.note(&format!("cut-off in {} s", ahead.as_secs()));
        self
    }

    /// Has Prometheus scrape the workers that run.
    pub fn scrape(&self) {
        self.prometheus.scrape(&self.stand.worker_truths().iter().map(|worker| worker.ops_port).collect::<Vec<_>>());
    }

    pub fn note(&self, what: &str) {
        let at = self.began.elapsed();
        println!("{:>7.1} s  {what}", at.as_secs_f64());
        self.log.lock().unwrap().push((at, what.to_owned()));
    }

    /// Sleeps until this part of the day.
    pub fn sleep_until(&self, part: f64) {
        let at = self.began + self.length.mul_f64(part);
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
    }

    fn payments_of(&self, script: &Script) -> u64 {
        script.share * self.payments / WHOLE
    }

    fn jobs(&self) -> u64 {
        PROVIDERS.iter().map(|script| self.payments_of(script)).sum()
    }

    /// Publishes all payments over the first part of the day, at an even rate.
    fn publish(&self) {
        let lasts = self.length.as_secs_f64() * ARRIVAL_PART;
        let mut left = PROVIDERS.len();
        while left > 0 {
            for (number, script) in PROVIDERS.iter().enumerate() {
                let all = self.payments_of(script);
                let from = self.sent.lock().unwrap()[number].sent;
                let part = (self.began.elapsed().as_secs_f64() / lasts).min(1.0);
                let until = if part < 1.0 { rounded(float(all) * part) } else { all };
                if from == all || until <= from {
                    continue;
                }
                let bodies: Vec<String> = (from..until).map(|job_number| job(script, job_number).2).collect();
                self.sent.lock().unwrap()[number].sent = until;
                self.stand.runtime.block_on(self.stand.client.publish(script.name, &bodies));
                self.sent.lock().unwrap()[number].confirmed = until;
                if until == all {
                    self.published_at.lock().unwrap()[number] = Some(self.began.elapsed());
                    left -= 1;
                }
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        self.note("everything is published");
    }

    /// Messages sent so far, for the readout oracle.
    fn sent(&self) -> BTreeMap<String, readout_oracle::Published> {
        // An unconfirmed batch is published again, and the second copies are in the queue until they are consumed.
        let killed_at = *self.broker_killed_at.lock().unwrap();
        let copies = if killed_at.is_some_and(|at| at.elapsed() < Duration::from_secs(60)) { 64 } else { 0 };
        let sent = self.sent.lock().unwrap();
        let named = PROVIDERS.iter().zip(sent.iter());
        named.map(|(script, sent)| (script.name.to_owned(), readout_oracle::Published { copies, ..*sent })).collect()
    }

    /// What the comparison has to know: from when on a provider was undisturbed, and the cut-off.
    fn day(&self, cutoff_at: Duration) -> Day {
        let log = self.log.lock().unwrap();
        let published_at = self.published_at.lock().unwrap();
        let last = |name: &str| {
            let of = log.iter().filter(|(_, what)| happenings::disturbs(what, name));
            of.map(|(at, _)| *at).max().unwrap_or_default()
        };
        let steady = PROVIDERS.iter().zip(published_at.iter()).filter(|(script, _)| script.is_estimated);
        let steady = steady.filter_map(|(script, at)| Some((script.name.to_owned(), (*at)?.max(last(script.name)))));
        let margin = readout_oracle::judge::AGE_MAX;
        Day {
            steady_from: steady.map(|(name, from)| (name, from + margin)).collect(),
            cutoff: Some(("bolt".to_owned(), cutoff_at)),
            earned: EARNED.to_vec(),
        }
    }

    fn cutoff_at(&self) -> Duration {
        let log = self.log.lock().unwrap();
        let (at, seconds) = log.iter().find_map(|(at, what)| Some((*at, what.strip_prefix("cut-off in ")?))).unwrap();
        at + Duration::from_secs(seconds.trim_end_matches(" s").parse().unwrap())
    }

    /// Runs the day; returns all samples, or why the payments did not end.
    fn run(&self, watch_ledger: &Watch) -> (History, Result<(), String>) {
        let (sent, over, calm) = (|| self.sent(), AtomicBool::new(false), AtomicBool::new(false));
        let explained: Vec<String> = PROVIDERS.iter().map(|script| job(script, 40).0).collect();
        let watched = Watched::new(&self.stand, &sent);
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| watch(&watched, &explained, Some(&self.prometheus), &over));
            let troubles = scope.spawn(|| happenings::trouble_providers(self, &calm));
            let ended = catch_unwind(AssertUnwindSafe(|| {
                let publishing = scope.spawn(move || self.publish());
                happenings::happen(self);
                publishing.join().unwrap();
                let jobs = usize::try_from(self.jobs()).unwrap();
                watch_ledger.await_drained(&self.stand, jobs, self.length * 2 + Duration::from_secs(300))
            }));
            self.note("drained");
            std::thread::sleep(AFTERWARDS);
            calm.store(true, Ordering::Relaxed);
            over.store(true, Ordering::Relaxed);
            troubles.join().unwrap();
            let history = watching.join().unwrap();
            (history, ended.unwrap_or_else(|_| Err("the day was interrupted".to_owned())))
        })
    }
}

/// What the workers logged about counts that took long: a readout that is too old may be such a count.
fn slow_counts(course: &Course) -> String {
    let of = |log: &str| {
        log.lines()
            .filter(|line| line.contains("count of the backlog was slow"))
            .fold(String::new(), |text, line| text + line + "\n")
    };
    course.stand.logs().map(|(path, log)| format!("{}:\n{}", path.display(), of(&log))).collect()
}

/// The promises by the records, as lines of the table. Returns the number of violations.
fn promises(course: &Course, records: &Records) -> (String, usize) {
    let violations = judge(records);
    let mut text = String::new();
    let mut count = violations.len();
    for (oracle, _) in ORACLES {
        let found: Vec<_> = violations.iter().filter(|violation| violation.oracle == oracle).collect();
        let _ = writeln!(text, "{oracle:<52} {:>7} {:>10}", records.published.len(), found.len());
        for violation in found.iter().take(5) {
            let _ = writeln!(text, "  {}", violation.what);
        }
    }
    let began_us = course.stand.provider("acme").micros_at(course.began);
    for (rule, judged, found) in script::windows(records, &course.log.lock().unwrap(), began_us) {
        let _ = writeln!(text, "{rule:<52} {judged:>7} {found:>10}");
        count += found;
    }
    (text, count)
}

/// While `hotel` refuses requests, no view may show a finish time; at the end, its 429s must be those of its record. As
/// lines of the table, with the number of violations.
fn refusals(course: &Course, records: &Records, history: &History) -> (String, usize) {
    let began_us = course.stand.provider("hotel").micros_at(course.began);
    let refused = records.providers["hotel"].calls.iter().filter(|call| call.status == Some(429));
    let refused: Vec<Duration> =
        refused.filter_map(|call| Some(Duration::from_micros(call.answered_us?.saturating_sub(began_us)))).collect();
    let (first, last) = (refused.iter().min().copied(), refused.iter().max().copied().unwrap_or_default());
    let first = first.unwrap_or(Duration::MAX).saturating_add(REFUSAL_SHOWN_WITHIN);
    let (mut judged, mut found) = (0, 0);
    let mut shown = None;
    for sample in &history.samples {
        let views = [&sample.shown.overview, &sample.shown.status].into_iter().flatten();
        for hotel in views.filter_map(|view| view.providers.get("hotel")) {
            shown = hotel.refused.or(shown);
            if sample.asked > first && sample.answered < last && hotel.waiting > 0 {
                judged += 1;
                found += usize::from(hotel.clears_in_ms.is_some());
            }
        }
    }
    let lost = (refused.len() as u64).abs_diff(shown.unwrap_or_default());
    let is_lost = usize::from(lost > LOST_MAX);
    let text = format!(
        "{:<52} {judged:>7} {found:>10}\n{:<52} {:>7} {lost:>10}\n",
        "no finish time of hotel while it refuses",
        "429s of hotel by its record, and missing ones",
        refused.len()
    );
    (text, found + is_lost + usize::from(judged == 0))
}

/// The day, of as many payments as are asked for. The table of rules is printed, and kept in the target directory.
#[test]
fn every_readout_is_true_on_a_billing_day() {
    let payments = std::env::var("BILLING_DAY_PAYMENTS").ok();
    let payments = payments.map_or(SHORT, |text| text.parse().expect("BILLING_DAY_PAYMENTS is a number"));
    let course = Course::new(payments);
    let watch_ledger = Watch::new(&course.stand);
    let (history, drained) = course.run(&watch_ledger);
    let records = watch_ledger.records(&course.stand, script::published(|script| course.payments_of(script)));
    let (promised, broken) = promises(&course, &records);
    let by_judge = |rule: &str| rule != "alerts are silent while nothing is wrong";
    let (untruths, counts) = (judge_by(&history, by_judge), judged(&history));
    let mut text = format!("{payments} payments, {:.0} s\n", course.began.elapsed().as_secs_f64());
    text += &promised;
    let (refused, false_promises) = refusals(&course, &records, &history);
    text += &refused;
    for (rule, _) in RULES.into_iter().filter(|(rule, _)| by_judge(rule)) {
        let found = untruths.iter().filter(|untruth| untruth.rule == rule).count();
        let _ = writeln!(text, "{rule:<52} {:>7} {found:>10}", counts[rule]);
    }
    let compared = compare(&history, &course.day(course.cutoff_at()));
    text += &comparison::table(&compared);
    text += &table(&untruths);
    text += &happenings::pace_after_restarts(&course);
    text += &slow_counts(&course);
    println!("{text}");
    std::fs::write(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("billing-day.txt"), &text).unwrap();
    assert!(drained.is_ok(), "{drained:?}");
    assert_eq!(broken, 0, "the promises");
    assert_eq!(false_promises, 0, "{refused}");
    assert!(untruths.is_empty(), "{}", table(&untruths));
    let counts = |row: &&comparison::Row| !row.is_forecast || payments >= FORECASTS_JUDGED_MIN;
    let wrong = compared.iter().filter(counts).filter(|row| row.is_broken());
    let wrong: Vec<&comparison::Row> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.iter().map(|row| row.rule.as_str()).collect::<Vec<_>>().join(", "));
}

#[allow(clippy::cast_precision_loss, reason = "counts of payments")]
fn float(count: u64) -> f64 {
    count as f64
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of payments")]
fn rounded(count: f64) -> u64 {
    count as u64
}

fn whole_seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap()
}
