//! What the recorder, the sweeper and a chart make of a history.

use sluicegate::ledger::history::{HistorySample, RecordedRun, RunUpdate, SampleStep};

use super::super::*;
use super::Explained;
use super::work::Working;

/// The duties that must reach a large table by an index.
pub const ON_THE_WAY: [&str; 5] = [
    "the history is recorded",
    "the history is folded",
    "the history is read",
    "a provider's limit is judged",
    "429s are counted",
];

impl<E: Explained> Working<'_, E> {
    pub(super) async fn history(&mut self) {
        let ledger = self.fixture.database.clone();
        let clock = ledger.history_clock().await.unwrap();
        let to_ms = clock.now_ms / 10_000 * 10_000;
        let names = ["lane-0", "lane-1"];
        let counts = ledger.history_counts(&names, to_ms - 10_000, to_ms).await.unwrap();
        let samples: Vec<HistorySample> = ledger.last_samples(&names).await.unwrap();
        let first = HistorySample { provider: "lane-0".to_owned(), at_ms: to_ms, ..HistorySample::default() };
        let run = RecordedRun { began_at_ms: to_ms - 10_000, recorded_until_ms: to_ms };
        let update = match clock.last {
            Some(last) => RunUpdate::Extend { last, until_ms: last.recorded_until_ms + 10_000 },
            None => RunUpdate::Begin(run),
        };
        assert!(ledger.record_history(&[first], update).await.unwrap(), "{counts:?} {samples:?}");
        self.did("the history is recorded").await;
        for step in [SampleStep::Fine, SampleStep::Coarse] {
            ledger.history_samples("lane-0", step, to_ms - 3_600_000, to_ms).await.unwrap();
            ledger.history_before("lane-0", step, to_ms).await.unwrap();
        }
        ledger.history_runs(to_ms - 3_600_000, to_ms).await.unwrap();
        ledger.history_marks("lane-0", to_ms - 3_600_000, to_ms).await.unwrap();
        self.did("the history is read").await;
        assert!(ledger.sampled_providers().await.unwrap().len() >= 6);
        self.did("providers with a history are listed").await;
        ledger.answered_requests(&name("lane-1")).await.unwrap();
        self.did("a provider's limit is judged").await;
        ledger.throttling(&names).await.unwrap();
        self.did("429s are counted").await;
        ledger.planned_returns().await.unwrap();
        self.did("limits that go back are listed").await;
        let providers = names.map(str::to_owned);
        ledger.fold_history(&providers, to_ms / 300_000 * 300_000).await.unwrap();
        ledger.forget_samples(&providers, SampleStep::Fine, 3_600 * SECOND).await.unwrap();
        ledger.forget_runs_and_marks(3_600 * SECOND).await.unwrap();
        self.did("the history is folded").await;
    }
}
