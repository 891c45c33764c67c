//! The history of a provider as pure functions: which samples the recorder writes, and which points a chart has.
//!
//! The recorder writes what changed. So a point is made of the samples within its step, and of the last sample before
//! it: between two samples of a run nothing changed. Where no run is, a point is unknown, which is not zero. Counts are
//! kept whatever the step of the points: their sum over a range is that of the samples.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use super::workers::WorkerProcess;
use crate::ledger::history::{
    HistoryClock, HistoryMark, HistorySample, MARK_DETAIL_MAX, RecordedRun, RunUpdate, SAMPLE_AGAIN_AFTER, SampleStep,
};
use crate::ledger::operator::DatabaseTime;
use crate::ledger::settings::AuditedChange;

/// The recorder is this late. A statement ends after ten seconds, so later than that no request and no outcome appears
/// with an earlier instant.
pub const RECORD_LAG_MS: i64 = 10_000;
/// Samples that come later than this begin a new run.
const RUN_GAP_MAX_MS: i64 = 60_000;
/// Counts of a longer time without samples are not read: the oldest are missing.
const COUNTED_MAX_MS: i64 = 3_600_000;

const FINE_MS: i64 = SampleStep::Fine.millis();
#[allow(clippy::cast_possible_truncation, reason = "an hour")]
const AGAIN_MS: i64 = SAMPLE_AGAIN_AFTER.as_millis() as i64;
/// A sample says nothing about a time longer after it: a provider that still exists would have another.
const SAMPLE_VALID_MS: i64 = AGAIN_MS + 5 * 60_000;

/// The steps that the recorder writes now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueSteps {
    /// Counts are read from here.
    pub from_ms: i64,
    pub to_ms: i64,
    pub run: RunUpdate,
}

impl DueSteps {
    /// `None`: all complete steps are recorded.
    pub fn new(clock: &HistoryClock) -> Option<Self> {
        let to_ms = (clock.now_ms - RECORD_LAG_MS).div_euclid(FINE_MS) * FINE_MS;
        let begin = RunUpdate::Begin(RecordedRun { began_at_ms: to_ms - FINE_MS, recorded_until_ms: to_ms });
        let Some(last) = clock.last else { return Some(Self { from_ms: to_ms - FINE_MS, to_ms, run: begin }) };
        let missing_ms = to_ms - last.recorded_until_ms;
        let from_ms = last.recorded_until_ms.max(to_ms - COUNTED_MAX_MS);
        match missing_ms {
            ..=0 => None,
            1..=RUN_GAP_MAX_MS => Some(Self { from_ms, to_ms, run: RunUpdate::Extend { last, until_ms: to_ms } }),
            _ => Some(Self { from_ms, to_ms, run: begin }),
        }
    }

    /// The ends of all steps, oldest first.
    pub fn ends(&self) -> impl Iterator<Item = i64> + use<> {
        let (from_ms, steps) = (self.from_ms, (self.to_ms - self.from_ms) / FINE_MS);
        (1..=steps).map(move |step| from_ms + step * FINE_MS)
    }

    fn is_in_run(&self, at_ms: i64) -> bool {
        match self.run {
            RunUpdate::Extend { .. } => true,
            RunUpdate::Begin(run) => at_ms > run.began_at_ms,
        }
    }
}

/// The samples to write for one provider. `counts`: by the end of their step; `figures`: waiting, review and limit at an
/// instant; `last`: its last sample.
pub fn samples_to_write(
    provider: &str,
    due: &DueSteps,
    counts: &BTreeMap<i64, HistorySample>,
    figures: impl Fn(i64) -> HistorySample,
    last: Option<&HistorySample>,
) -> Vec<HistorySample> {
    let (mut written, mut last) = (Vec::new(), last.cloned());
    for at_ms in due.ends() {
        let counted = counts.get(&at_ms).cloned().unwrap_or_default();
        let HistorySample { started, finished, throttled, .. } = counted;
        let sample =
            HistorySample { provider: provider.to_owned(), at_ms, started, finished, throttled, ..figures(at_ms) };
        let is_changed = last.as_ref().is_none_or(|last| !sample.has_figures_of(last));
        let is_due_again =
            last.as_ref().is_some_and(|last| last.at_ms.div_euclid(AGAIN_MS) < at_ms.div_euclid(AGAIN_MS));
        if sample.has_counts() || (due.is_in_run(at_ms) && (is_changed || is_due_again)) {
            written.push(sample.clone());
            last = Some(sample);
        }
    }
    written
}

/// The instant until which fine samples can be folded: no further one comes before it.
pub fn fold_until(clock: &HistoryClock) -> i64 {
    let recorded_until_ms = clock.last.map_or(0, |run| run.recorded_until_ms);
    let final_ms = recorded_until_ms.max(clock.now_ms - RECORD_LAG_MS - COUNTED_MAX_MS - RUN_GAP_MAX_MS);
    final_ms.div_euclid(SampleStep::Coarse.millis()) * SampleStep::Coarse.millis()
}

/// The lengths of a point's step: the first that makes at most [`POINTS_MAX`] points is used.
const STEPS_MS: [i64; 9] = [FINE_MS, 30_000, 60_000, 120_000, 300_000, 900_000, 1_800_000, 3_600_000, 7_200_000];
pub const POINTS_MAX: i64 = 720;
/// Longest range of one response.
pub const RANGE_MAX_MS: i64 = 31 * 86_400_000;
const FINE_KEPT_MS: i64 = 25 * 3_600_000;

/// The range of a chart, and the step of its points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryRange {
    pub from_ms: i64,
    pub to_ms: i64,
    pub step_ms: i64,
    /// The samples of which the points are made.
    pub source: SampleStep,
}

impl HistoryRange {
    /// The resolution follows from the length of the range, and from how long fine samples are kept.
    pub fn new(from_ms: i64, to_ms: i64, now_ms: i64) -> Self {
        let source = if from_ms >= now_ms - FINE_KEPT_MS { SampleStep::Fine } else { SampleStep::Coarse };
        let fits = |step_ms: &&i64| **step_ms >= source.millis() && (to_ms - from_ms) <= **step_ms * POINTS_MAX;
        let step_ms = STEPS_MS.iter().find(fits).copied().unwrap_or(STEPS_MS[STEPS_MS.len() - 1]);
        Self { from_ms, to_ms, step_ms, source }
    }

    /// Start of the first point's step.
    pub fn start_ms(&self) -> i64 {
        self.from_ms.div_euclid(self.step_ms) * self.step_ms
    }

    /// End of the last point's step.
    pub fn end_ms(&self) -> i64 {
        (self.to_ms + self.step_ms - 1).div_euclid(self.step_ms) * self.step_ms
    }
}

/// One provider over one step of a chart. A figure that is not known is `null`, never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, utoipa::ToSchema)]
pub struct RecordedPoint {
    /// End of the step.
    pub at: String,
    /// Requests that started within the step.
    pub started: Option<u64>,
    pub started_per_s: Option<f64>,
    /// Payments that succeeded, were declined, expired or were cancelled within the step.
    pub finished: Option<u64>,
    pub finished_per_s: Option<f64>,
    /// Responses with status 429 within the step.
    pub throttled: Option<u64>,
    /// Payments without a request in flight, at the end of the step. `null`: a source did not answer.
    pub waiting: Option<u64>,
    /// Payments in review at the end of the step.
    pub review: Option<u64>,
    /// Mean rate of the slowest limit at the end of the step.
    pub limit_per_s: Option<f64>,
}

/// The points of a range. `samples`: those within it and, if there is one, the last one before; `runs`: those that touch
/// it. Both are sorted.
pub fn points(range: &HistoryRange, samples: &[HistorySample], runs: &[RecordedRun]) -> Vec<RecordedPoint> {
    let steps = (range.end_ms() - range.start_ms()) / range.step_ms;
    let mut next = samples.partition_point(|sample| sample.at_ms <= range.start_ms());
    let each = (0..steps).map(|step| {
        let start_ms = range.start_ms() + step * range.step_ms;
        let end_ms = start_ms + range.step_ms;
        let within = samples[next..].iter().take_while(|sample| sample.at_ms <= end_ms).count();
        let counted = &samples[next..next + within];
        next += within;
        let covered_ms: i64 = runs.iter().map(|run| overlap_ms(run, start_ms, end_ms)).sum();
        let last = samples[..next].last().filter(|last| end_ms - last.at_ms <= SAMPLE_VALID_MS + range.step_ms);
        point(end_ms, counted, if covered_ms > 0 { covered_ms } else { range.source.millis() }, last)
            .filter(|_| covered_ms > 0 || !counted.is_empty())
            .unwrap_or_else(|| RecordedPoint { at: DatabaseTime(end_ms).to_string(), ..RecordedPoint::default() })
    });
    each.collect()
}

fn overlap_ms(run: &RecordedRun, start_ms: i64, end_ms: i64) -> i64 {
    (run.recorded_until_ms.min(end_ms) - run.began_at_ms.max(start_ms)).max(0)
}

/// The point of these samples; `None` before the provider's first one.
fn point(end_ms: i64, counted: &[HistorySample], known_ms: i64, last: Option<&HistorySample>) -> Option<RecordedPoint> {
    let last = last?;
    let sum = |count: fn(&HistorySample) -> u64| counted.iter().map(count).sum::<u64>();
    let (started, finished) = (sum(|sample| sample.started), sum(|sample| sample.finished));
    #[allow(clippy::cast_precision_loss, reason = "counts and milliseconds are far below 2^53")]
    let per_s = |count: u64| (count as f64 * 1_000.0 / known_ms as f64 * 1_000.0).round() / 1_000.0;
    Some(RecordedPoint {
        at: DatabaseTime(end_ms).to_string(),
        started: Some(started),
        started_per_s: Some(per_s(started)),
        finished: Some(finished),
        finished_per_s: Some(per_s(finished)),
        throttled: Some(sum(|sample| sample.throttled)),
        waiting: last.waiting,
        review: last.review,
        limit_per_s: last.limit_per_s,
    })
}

/// An event of a chart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, utoipa::ToSchema)]
pub struct RecordedMark {
    pub at: String,
    /// `limit`, `paused`, `resumed`, `settings`, `worker_started`, `breaker_opened` or `breaker_closed`.
    pub kind: String,
    /// What happened, and by whom.
    pub text: String,
}

impl From<HistoryMark> for RecordedMark {
    fn from(HistoryMark { at_ms, kind, detail: text, .. }: HistoryMark) -> Self {
        Self { at: DatabaseTime(at_ms).to_string(), kind, text }
    }
}

impl From<AuditedChange> for RecordedMark {
    fn from(change: AuditedChange) -> Self {
        let paused = change.new.as_ref().and_then(|new| new.get("paused")).and_then(serde_json::Value::as_bool);
        let kind = match paused {
            Some(true) => "paused",
            Some(false) if change.old.is_some() => "resumed",
            _ if change.what.starts_with("limit ") => "limit",
            _ => "settings",
        };
        let because = change.because.map(|because| format!(": {because}")).unwrap_or_default();
        let text = format!("{} (by {}){because}", change.what, change.who);
        Self { at: change.at.to_string(), kind: kind.to_owned(), text }
    }
}

/// The marks that reports show, since this instant: starts of workers, and changes of their lanes' circuit breakers.
pub fn marks_of_workers(workers: &[WorkerProcess], since_ms: i64) -> HashSet<HistoryMark> {
    let mark = |worker: &WorkerProcess, provider: &str, at_ms: i64, kind: &str, detail: &str| HistoryMark {
        provider: provider.to_owned(),
        at_ms,
        kind: kind.to_owned(),
        worker: worker.id.clone(),
        detail: detail.chars().filter(|c| *c != '\0').take(MARK_DETAIL_MAX).collect(),
    };
    let mut marks = HashSet::new();
    for worker in workers {
        let detail = format!("worker {} started, version {}", worker.address(), worker.version);
        marks.insert(mark(worker, "", worker.started_at_ms, "worker_started", &detail));
        for (provider, lane) in worker.report.iter().flat_map(|report| &report.lanes) {
            let of_breaker = lane.decisions.iter().filter(|decision| decision.kind.starts_with("breaker_"));
            marks.extend(of_breaker.map(|made| mark(worker, provider, made.at_ms, &made.kind, &made.reason)));
        }
    }
    marks.retain(|mark| mark.at_ms > since_ms);
    marks
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
