//! The recorder of the history: writes the overview's figures and the ledger's counts of each step to the database.
//!
//! Every process with an ops server runs it, and a duty chooses one of them for each step. So the history is the same
//! from each worker and outlasts all of them. A step that could not be written is written later: the counts come from the
//! ledger, and the other figures from the last minutes in memory. What is in neither stays unknown.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{OverviewCollector, unix_ms};
use crate::fleet::history::{DueSteps, marks_of_workers, samples_to_write};
use crate::fleet::workers::visible_workers;
use crate::ledger::LedgerError;
use crate::ledger::history::{HistoryMark, HistorySample, SampleStep};

/// Time between two steps.
const EVERY: Duration = Duration::from_millis(SampleStep::Fine.millis().unsigned_abs());
/// A report may show an event so much later. Earlier events are recorded already.
const MARKS_LATE_MAX_MS: i64 = 5 * 60_000;
/// Time after the end of a step, so that the clocks of database and machine may differ a little.
const MARGIN_MS: i64 = 500;

impl OverviewCollector {
    /// Records each step until `stop` fires.
    pub(super) async fn record_to_ledger(&self, stop: &CancellationToken) {
        let mut failing = false;
        loop {
            let step_ms = SampleStep::Fine.millis();
            let wait_ms = step_ms - (unix_ms() - MARGIN_MS).rem_euclid(step_ms);
            let step = async {
                sleep(Duration::from_millis(wait_ms.unsigned_abs())).await;
                self.record_due_steps().await
            };
            let recorded = tokio::select! {
                recorded = step => recorded,
                () = stop.cancelled() => return,
            };
            match &recorded {
                Ok(()) if failing => tracing::info!("the history is written again"),
                Err(error) if !failing => {
                    tracing::warn!(%error, "failed to write the history; charts will have a gap. Retrying every 10 s");
                }
                _ => {}
            }
            failing = recorded.is_err();
        }
    }

    /// Records the steps that are complete and not written yet, if this process gets the duty.
    pub async fn record_due_steps(&self) -> Result<(), LedgerError> {
        let ledger = &self.sources.ledger;
        // A little shorter than a step, so that a single process gets every step.
        if !ledger.lease_duty("samples", EVERY * 3 / 4).await? {
            return Ok(());
        }
        let Some(due) = DueSteps::new(&ledger.history_clock().await?) else { return Ok(()) };
        let names = self.history.lock().providers();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        // A process that has just started knows no provider yet: without samples, the steps would count as idle.
        if names.is_empty() {
            return Ok(());
        }
        let mut counts: HashMap<String, BTreeMap<i64, HistorySample>> = HashMap::new();
        for part in ledger.history_counts(&names, due.from_ms, due.to_ms).await? {
            let steps = counts.entry(part.provider.clone()).or_default();
            let sum = steps.entry(part.at_ms).or_default();
            sum.started += part.started;
            sum.finished += part.finished;
            sum.throttled += part.throttled;
        }
        let last = ledger.last_samples(&names).await?;
        let last: HashMap<&str, &HistorySample> = last.iter().map(|last| (last.provider.as_str(), last)).collect();
        let (none, mut samples) = (BTreeMap::new(), Vec::new());
        for name in names {
            let figures = |at_ms| self.history.lock().figures_at(name, at_ms);
            let counts = counts.get(name).unwrap_or(&none);
            samples.extend(samples_to_write(name, &due, counts, figures, last.get(name).copied()));
        }
        if !ledger.record_history(&samples, due.run).await? {
            tracing::debug!("another process has recorded these steps of the history");
        }
        self.record_new_marks(due.from_ms).await
    }

    /// Records the marks that the workers' reports show and that this process has not recorded.
    async fn record_new_marks(&self, from_ms: i64) -> Result<(), LedgerError> {
        let ledger = &self.sources.ledger;
        let workers = visible_workers(ledger.worker_reports().await?, Duration::ZERO, None);
        let marks = marks_of_workers(&workers, from_ms - MARKS_LATE_MAX_MS);
        let new: Vec<HistoryMark> = marks.difference(&self.recorded_marks.lock()).cloned().collect();
        ledger.record_marks(&new).await?;
        *self.recorded_marks.lock() = marks;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::watch;

    use crate::fleet::{OverviewInput, overview};
    use crate::ledger::database::Database;
    use crate::ledger::fleet::WorkerReport;
    use crate::ledger::history::{RecordedRun, RunUpdate};
    use crate::ledger::provider_row::ProviderRow;
    use crate::limiter::embedded::EmbeddedLimiter;
    use crate::ops::overview::tests::test_collector;
    use crate::worker::supervisor::WorkerStatus;

    use super::*;

    /// The broker did not answer at the end of the second step, so `waiting` was a lower bound.
    #[tokio::test]
    async fn missing_source_is_recorded_as_unknown() {
        let database = Database::open("sqlite::memory:", 1).unwrap();
        database.migrate().await.unwrap();
        let report = WorkerReport {
            id: "w-1".to_owned(),
            host: "pay-1".to_owned(),
            pid: 7,
            version: "0.1.0".to_owned(),
            uptime: Duration::from_secs(1),
            format: 1,
            body: "{}".to_owned(),
        };
        database.write_report(&report).await.unwrap();
        let (_progress, progress) = watch::channel(WorkerStatus::default());
        let collector = test_collector(&database, progress, Arc::new(EmbeddedLimiter::new()));
        let step_ms = SampleStep::Fine.millis();
        let to_ms = (database.history_clock().await.unwrap().now_ms - 10_000) / step_ms * step_ms;
        let recorded = RecordedRun { began_at_ms: to_ms - 3 * step_ms, recorded_until_ms: to_ms - 2 * step_ms };
        assert!(database.record_history(&[], RunUpdate::Begin(recorded)).await.unwrap());
        for (at_ms, waiting_is_at_least) in [(to_ms - step_ms, false), (to_ms, true)] {
            let row = ProviderRow { name: "acme".to_owned(), ..ProviderRow::default() };
            let mut seen = overview(&OverviewInput { at_ms, rows: vec![row], ..OverviewInput::default() });
            let acme = &mut seen.providers[0];
            (acme.waiting, acme.waiting_is_at_least, acme.review) = (5, waiting_is_at_least, Some(2));
            collector.history.lock().record(&seen);
        }
        collector.record_due_steps().await.unwrap();
        let read = async || {
            let samples = database.history_samples("acme", SampleStep::Fine, 0, to_ms + 3_600_000).await.unwrap();
            samples.into_iter().map(|sample| (sample.at_ms, sample.waiting, sample.review)).collect::<Vec<_>>()
        };
        assert_eq!(read().await, [(to_ms - step_ms, Some(5), Some(2)), (to_ms, None, Some(2))]);
        let marks = database.history_marks("acme", 0, to_ms + 3_600_000).await.unwrap();
        assert_eq!(marks.iter().map(|mark| mark.kind.as_str()).collect::<Vec<_>>(), ["worker_started"]);
        // Another process has the duty, and nothing is written twice.
        collector.record_due_steps().await.unwrap();
        assert_eq!(read().await.len(), 2);
    }
}
