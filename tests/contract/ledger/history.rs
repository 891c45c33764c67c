//! The history of each provider: counts of the ledger by step, samples of one writer, their fold, and their end.

use std::collections::BTreeMap;

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::history::{
    COARSE_RETENTION, HistoryClock, HistoryMark, HistorySample, RecordedRun, RunUpdate, SampleStep,
};
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};
use sluicegate::ops::throttling::throttling_hint;

use super::*;

on_every_database!(
    counts_are_those_of_the_ledger,
    all_429s_count_once,
    samples_of_one_writer_are_stored,
    fold_keeps_the_sums_of_samples,
    old_history_is_deleted,
    marks_are_recorded_once,
);

const STEP_MS: i64 = 10_000;
const COARSE_MS: i64 = 300_000;

fn sample(provider: &str, at_ms: i64, started: u64) -> HistorySample {
    let provider = provider.to_owned();
    HistorySample { provider, at_ms, started, finished: started / 2, throttled: started / 3, ..Default::default() }
}

fn run(began_at_ms: i64, recorded_until_ms: i64) -> RecordedRun {
    RecordedRun { began_at_ms, recorded_until_ms }
}

impl Fixture {
    async fn request(&self, id: &str, outcome: Option<(&'static str, JobState)>) {
        let lease = self.take(&job(id)).await.lease;
        let began = self.database.begin_attempt(&lease, &request(id), AT_ONCE).await.unwrap();
        let BeginResult::Attempt(number) = began else { panic!("{id}") };
        let Some((outcome, next)) = outcome else { return };
        let end = AttemptEnd { number, outcome, status: Some(200), detail: String::new(), counts: true };
        assert_eq!(self.database.finish_attempt(&lease, &end, &next).await.unwrap(), FencedWrite::Applied);
    }

    async fn clock(&self) -> HistoryClock {
        self.database.history_clock().await.unwrap()
    }

    /// Adds samples by a run of their own.
    async fn add_samples(&self, samples: &[HistorySample]) {
        let latest = samples.iter().map(|sample| sample.at_ms).max().unwrap();
        let update = RunUpdate::Begin(run(latest - STEP_MS, latest));
        assert!(self.database.record_history(samples, update).await.unwrap());
    }

    async fn stored(&self, provider: &str, step: SampleStep) -> Vec<HistorySample> {
        self.database.history_samples(provider, step, 0, i64::MAX / 1_000_000).await.unwrap()
    }
}

async fn counts_are_those_of_the_ledger(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let from_ms = fixture.clock().await.now_ms / STEP_MS * STEP_MS;
    let accepted = || JobState::Final { state: FinalState::Succeeded, reason: "accepted".into(), reference: None };
    fixture.request("paid", Some(("accepted", accepted()))).await;
    let dead = JobState::Final { state: FinalState::Dead, reason: "rejected".into(), reference: None };
    fixture.request("dead", Some(("rejected", dead))).await;
    let waits = JobState::Waiting { wait: A_MINUTE, reason: WaitReason::Throttled.into() };
    fixture.request("throttled", Some(("throttled", waits.clone()))).await;
    fixture.request("late", Some(("not_sent", waits))).await;
    fixture.request("in-flight", None).await;
    fixture.take(&job("claimed")).await;
    let declined = JobState::Final { state: FinalState::Declined, reason: "refused".into(), reference: None };
    let lease = fixture.take(&job("declined")).await.lease;
    assert_eq!(fixture.database.transition(&lease, &declined).await.unwrap(), FencedWrite::Applied);
    // A request that began long before, and ends now.
    fixture.request("slow", Some(("accepted", accepted()))).await;
    let hour = if kind == Kind::Postgres { "interval '1 hour'" } else { "3600000" };
    let earlier = format!("UPDATE attempts SET began_at = began_at - {hour} WHERE job_id = 'slow'");
    fixture.without_constraints(&earlier).await.unwrap();
    let to_ms = fixture.clock().await.now_ms / STEP_MS * STEP_MS + STEP_MS;

    let counted = fixture.database.history_counts(&["other", "stripe"], from_ms, to_ms).await.unwrap();
    let sum = |count: fn(&HistorySample) -> u64| counted.iter().map(count).sum::<u64>();
    let sums = [sum(|part| part.started), sum(|part| part.finished), sum(|part| part.throttled)];
    assert_eq!(sums, [4, 3, 1], "{counted:?}");
    assert!(counted.iter().all(|part| part.provider == "stripe" && part.at_ms % STEP_MS == 0));
    assert!(counted.iter().all(|part| (from_ms..=to_ms).contains(&(part.at_ms - 1))), "{counted:?}");
    // Steps that touch share nothing.
    let steps = [from_ms - COARSE_MS, from_ms, to_ms, to_ms + COARSE_MS];
    let mut started = Vec::new();
    for step in steps.windows(2) {
        let counted = fixture.database.history_counts(&["stripe"], step[0], step[1]).await.unwrap();
        started.push(counted.iter().map(|part| part.started).sum::<u64>());
    }
    assert_eq!(started, [0, 4, 0]);
}

/// Two cycles a second for 70 s: five requests, of which the last two meet a 429. One of these came on a connection that
/// was used before, so its payment's outcome is unknown. A look-up passes as well, and finishes no payment.
async fn all_429s_count_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("a")).await;
    let now_ms = fixture.clock().await.now_ms;
    let at = |ms: i64| if kind == Kind::Postgres { format!("to_timestamp({ms} / 1000.0)") } else { ms.to_string() };
    let counted =
        |counts: bool| if kind == Kind::Postgres { counts.to_string() } else { i64::from(counts).to_string() };
    let attempt = |number: i64| {
        let (cycle, nth) = (number / 6, number % 6);
        let began_ms = now_ms - 75_000 + cycle * 500 + nth * 3;
        let (outcome, status, charge) = [
            ("'accepted'", 200, "charge"),
            ("'declined'", 402, "charge"),
            ("'unknown'", 500, "charge"),
            ("'throttled'", 429, "charge"),
            ("'unknown'", 429, "charge"),
            ("'accepted'", 200, "lookup"),
        ][usize::try_from(nth).unwrap()];
        let (began, ended) = (at(began_ms), at(began_ms + 5));
        let number = number + 1;
        format!("('a', {number}, 'stripe', '{charge}', {began}, {ended}, {outcome}, {status}, {})", counted(nth != 3))
    };
    let rows: Vec<String> = (0..140 * 6).map(attempt).collect();
    let columns = "job_id, number, provider, kind, began_at, ended_at, outcome, status, counted";
    fixture.sql(&format!("INSERT INTO attempts ({columns}) VALUES {}", rows.join(", "))).await.unwrap();
    let throttling = fixture.database.throttling(&["other", "stripe"]).await.unwrap();
    assert_eq!(throttling.keys().collect::<Vec<_>>(), ["stripe"]);
    let stripe = throttling["stripe"];
    assert_eq!((stripe.requests, stripe.keep_coming, stripe.is_repeated), (280, true, true));
    assert_eq!(stripe.passed_per_s, Some(4.0), "two payments a cycle");
    let history = fixture.database.history_counts(&["stripe"], now_ms - 80_000, now_ms).await.unwrap();
    assert_eq!(history.iter().map(|part| part.throttled).sum::<u64>(), 280);
    let answered = fixture.database.answered_requests(&ProviderName::new("stripe").unwrap()).await.unwrap();
    assert_eq!(answered.requests.iter().filter(|request| request.is_throttled).count(), 280);
    // The hint reads two hours, and counts those of one hour, as the overview does.
    let ninety_minutes = if kind == Kind::Postgres { "interval '90 minutes'" } else { "5400000" };
    fixture
        .without_constraints(&format!(
            "UPDATE attempts SET ended_at = ended_at - {ninety_minutes}, began_at = began_at - {ninety_minutes} \
             WHERE number <= 60"
        ))
        .await
        .unwrap();
    let limit = LimitRow { name: "second".to_owned(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    let row = ProviderRow {
        name: "stripe".to_owned(),
        url: "https://stripe.test/".to_owned(),
        limits: vec![limit],
        ..ProviderRow::default()
    };
    let hint = throttling_hint(&fixture.database, &row.validate(1).unwrap()).await.unwrap().unwrap();
    assert_eq!(
        (hint.throttled, fixture.database.throttling(&["stripe"]).await.unwrap()["stripe"].requests),
        (260, 260)
    );
    let (hours, day) =
        if kind == Kind::Postgres { ("interval '2 hours'", "interval '1 day'") } else { ("7200000", "86400000") };
    fixture
        .without_constraints(&format!("UPDATE attempts SET ended_at = ended_at - {hours}, began_at = began_at - {day}"))
        .await
        .unwrap();
    assert!(fixture.database.throttling(&["stripe"]).await.unwrap().is_empty());
}

async fn samples_of_one_writer_are_stored(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    assert_eq!(fixture.clock().await.last, None);
    let at_ms = fixture.clock().await.now_ms / STEP_MS * STEP_MS;
    let figures = HistorySample { waiting: Some(12), limit_per_s: Some(40.0), ..sample("acme", at_ms, 7) };
    let first = [figures.clone(), sample("bolt", at_ms, 0)];
    let began = run(at_ms - STEP_MS, at_ms);
    assert!(ledger.record_history(&first, RunUpdate::Begin(began)).await.unwrap());
    // The same steps again, and by a process that read the run before another one extended it.
    assert!(!ledger.record_history(&first, RunUpdate::Begin(began)).await.unwrap());
    let extend = RunUpdate::Extend { last: began, until_ms: at_ms + STEP_MS };
    assert!(ledger.record_history(&[sample("acme", at_ms + STEP_MS, 1)], extend).await.unwrap());
    assert!(!ledger.record_history(&[sample("acme", at_ms + STEP_MS, 9)], extend).await.unwrap());
    let last = run(at_ms - STEP_MS, at_ms + STEP_MS);
    assert_eq!(fixture.clock().await.last, Some(last));

    let second = sample("acme", at_ms + STEP_MS, 1);
    assert_eq!(fixture.stored("acme", SampleStep::Fine).await, [figures.clone(), second.clone()]);
    assert_eq!(ledger.last_samples(&["acme", "bolt", "none"]).await.unwrap(), [second, first[1].clone()]);
    let before = async |until_ms| ledger.history_before("acme", SampleStep::Fine, until_ms).await.unwrap();
    assert_eq!(before(at_ms + STEP_MS - 1).await, Some(figures));
    assert_eq!(before(at_ms - 1).await, None);
    assert_eq!(ledger.history_runs(at_ms, at_ms + 1).await.unwrap(), [last]);
    assert_eq!(ledger.history_runs(at_ms + STEP_MS, at_ms + COARSE_MS).await.unwrap(), []);
    let bad = "INSERT INTO history_samples (provider, step_s, at, started, finished, throttled) \
         SELECT provider, 60, at, 0, 0, 0 FROM history_samples WHERE provider = 'bolt'";
    assert!(fixture.sql(bad).await.unwrap_err().contains("step_is_10_or_300_seconds"));
}

/// Random samples of several providers, folded at random instants: each fine sample is in exactly one coarse one.
async fn fold_keeps_the_sums_of_samples(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let mut state = 11_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let begin_ms = (fixture.clock().await.now_ms - 6 * 3_600_000) / COARSE_MS * COARSE_MS;
    let providers = ["acme", "bolt", "idle"].map(str::to_owned);
    let (mut written, mut until_ms) = (Vec::new(), begin_ms);
    for _ in 0..12 {
        let mut batch = Vec::new();
        for step in 1..=60 {
            let at_ms = until_ms + step * STEP_MS;
            for provider in &providers[..2] {
                if random(4) > 0 {
                    let waiting = (random(5) > 0).then(|| random(1_000));
                    batch.push(HistorySample { waiting, ..sample(provider, at_ms, random(50)) });
                }
            }
        }
        until_ms += 60 * STEP_MS;
        batch.push(sample("idle", until_ms, 0));
        fixture.add_samples(&batch).await;
        written.extend(batch);
        if random(3) > 0 {
            ledger.fold_history(&providers, until_ms - i64::try_from(random(3)).unwrap() * COARSE_MS).await.unwrap();
        }
    }
    ledger.fold_history(&providers, until_ms).await.unwrap();
    assert_eq!(ledger.fold_history(&providers, until_ms).await.unwrap(), 0, "nothing is folded twice");
    for provider in &providers {
        let mut expected: BTreeMap<i64, HistorySample> = BTreeMap::new();
        for fine in written.iter().filter(|fine| fine.provider == *provider) {
            let end_ms = (fine.at_ms + COARSE_MS - 1) / COARSE_MS * COARSE_MS;
            let sum = expected.entry(end_ms).or_default();
            *sum = HistorySample {
                at_ms: end_ms,
                started: sum.started + fine.started,
                finished: sum.finished + fine.finished,
                throttled: sum.throttled + fine.throttled,
                ..fine.clone()
            };
        }
        let folded = fixture.stored(provider, SampleStep::Coarse).await;
        assert_eq!(folded, expected.into_values().collect::<Vec<_>>(), "{provider}");
    }
    assert_eq!(ledger.sampled_providers().await.unwrap(), providers);
    // The fine samples end, and the sums stay.
    let forgotten = ledger.forget_samples(&providers, SampleStep::Fine, Duration::ZERO).await.unwrap();
    assert_eq!(forgotten as usize, written.len());
    let total: u64 = written.iter().map(|fine| fine.started).sum();
    let mut kept = 0;
    for provider in &providers {
        assert_eq!(fixture.stored(provider, SampleStep::Fine).await, []);
        kept += fixture.stored(provider, SampleStep::Coarse).await.iter().map(|coarse| coarse.started).sum::<u64>();
    }
    assert_eq!(kept, total);
}

async fn old_history_is_deleted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let now_ms = fixture.clock().await.now_ms / COARSE_MS * COARSE_MS;
    let ages_h = [1, 24, 26, 30 * 24, 32 * 24];
    let ends: Vec<i64> = ages_h.iter().map(|hours| now_ms - hours * 3_600_000).collect();
    for end in &ends {
        fixture.add_samples(&[sample("acme", *end, 6)]).await;
    }
    let mark = |at_ms| HistoryMark {
        provider: "acme".to_owned(),
        at_ms,
        kind: "breaker_opened".to_owned(),
        worker: "w".to_owned(),
        detail: "no answer".to_owned(),
    };
    ledger.record_marks(&ends.iter().map(|at_ms| mark(*at_ms)).collect::<Vec<_>>()).await.unwrap();
    let providers = ["acme".to_owned()];
    assert_eq!(ledger.fold_history(&providers, now_ms).await.unwrap(), 5);
    for step in [SampleStep::Fine, SampleStep::Coarse] {
        ledger.forget_samples(&providers, step, step.retention()).await.unwrap();
    }
    ledger.forget_runs_and_marks(COARSE_RETENTION).await.unwrap();
    assert_eq!(fixture.stored("acme", SampleStep::Fine).await.len(), 2);
    assert_eq!(fixture.stored("acme", SampleStep::Coarse).await.len(), 4);
    assert_eq!(ledger.history_runs(0, now_ms).await.unwrap().len(), 4);
    assert_eq!(ledger.history_marks("acme", 0, now_ms).await.unwrap().len(), 4);
    // A run that was written before the clock was set back.
    let future = RunUpdate::Begin(run(now_ms + 7_200_000, now_ms + 7_210_000));
    assert!(ledger.record_history(&[], future).await.unwrap());
    ledger.forget_runs_and_marks(COARSE_RETENTION).await.unwrap();
    assert_eq!(ledger.history_runs(0, now_ms + 8_000_000).await.unwrap().len(), 4);
}

async fn marks_are_recorded_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = &fixture.database;
    let mark = |provider: &str, at_ms, kind: &str, worker: &str| HistoryMark {
        provider: provider.to_owned(),
        at_ms,
        kind: kind.to_owned(),
        worker: worker.to_owned(),
        detail: "\"quoted\" and – a dash".to_owned(),
    };
    let at_ms = 1_800_000_000_000;
    let marks = [
        mark("", at_ms, "worker_started", "w1"),
        mark("", at_ms, "worker_started", "w2"),
        mark("acme", at_ms + 1, "breaker_opened", "w1"),
        mark("bolt", at_ms + 1, "breaker_opened", "w1"),
    ];
    for _ in 0..2 {
        ledger.record_marks(&marks).await.unwrap();
    }
    ledger.record_marks(&[]).await.unwrap();
    let mut read = ledger.history_marks("acme", at_ms - 1, at_ms + 1).await.unwrap();
    read.sort_by(|a, b| (a.at_ms, &a.worker).cmp(&(b.at_ms, &b.worker)));
    assert_eq!(read, marks[..3]);
    assert_eq!(ledger.history_marks("acme", at_ms, at_ms + 9).await.unwrap().len(), 1);
}
