//! The counts of the backlog: the jobs of the ledger, and the messages in the lanes' queues, in one snapshot.
//!
//! A count reads all open jobs, up to a second per million. So it runs only on request, and at most a twentieth of the
//! time; readers get the last snapshot meanwhile. Queue depths are cheap: while a snapshot is kept, they are queried
//! every two seconds, and a queue that does not respond is missing from then on. While one is missing, all queues are
//! queried twice a second, and the ledger is counted again once all respond. After an outage of the database it is
//! counted immediately.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::cache::{FAILURE_TTL, QueryCost, QueryResult};
use crate::fleet::ProviderReconciliation;

/// A count is kept for at least this time, and for [`COST_FACTOR`] times its duration.
const TTL_MIN: Duration = Duration::from_secs(1);
const COST_FACTOR: u32 = 20;
const TTL_MAX: Duration = Duration::from_secs(4 * 60);
/// How often the queues are queried while all of them respond and a count is kept.
const QUEUE_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// An older count is not shown.
const STALE_AFTER: Duration = Duration::from_secs(5 * 60);
/// How long a reader waits for a count that is due.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// Messages ready in queues, by provider.
pub(super) type QueueDepths = BTreeMap<String, u64>;

type CountQuery<'a, T> = &'a (dyn Fn() -> BoxFuture<'a, T> + Send + Sync);

/// The queries of a snapshot.
#[derive(Clone, Copy)]
pub(super) struct CountQueries<'a> {
    pub jobs: CountQuery<'a, Result<Vec<ProviderReconciliation>, String>>,
    pub depths: CountQuery<'a, QueryResult<QueueDepths>>,
}

/// The last snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct BacklogCounts {
    pub reconciliations: Option<Arc<Vec<ProviderReconciliation>>>,
    /// Without queues that did not respond.
    pub depths: QueueDepths,
    /// Why the last count failed.
    pub problem: Option<String>,
    /// Why a queue is missing.
    pub queue_problem: Option<String>,
    /// Start of the last snapshot; later changes are not in it.
    pub started_at: Option<Instant>,
    pub due_at: Option<Instant>,
}

pub(super) struct BacklogCounter {
    latest: watch::Sender<BacklogCounts>,
    requested: Notify,
    database_recovered: Notify,
}

/// When the next count starts.
enum NextCount {
    OnRequest,
    Immediately,
}

impl BacklogCounter {
    pub fn new() -> Self {
        Self { latest: watch::Sender::default(), requested: Notify::new(), database_recovered: Notify::new() }
    }

    /// Counts until `stop` fires.
    pub async fn run(&self, asks: CountQueries<'_>, stop: &CancellationToken) {
        stop.run_until_cancelled(async {
            let (mut next, mut cost) = (NextCount::OnRequest, QueryCost::default());
            loop {
                if matches!(next, NextCount::OnRequest) {
                    self.requested.notified().await;
                }
                next = self.count_once(asks, &mut cost).await;
            }
        })
        .await;
    }

    async fn count_once(&self, CountQueries { jobs, depths }: CountQueries<'_>, cost: &mut QueryCost) -> NextCount {
        let began = Instant::now();
        let counting = async {
            let counted = jobs().await;
            (counted, began.elapsed())
        };
        // A count that started during an outage may hang long after its end.
        let ((counted, took), asked) = tokio::select! {
            // The ledger first: a message that is taken meanwhile is then in neither count, and never in both.
            both = async { (counting.await, depths().await) } => both,
            () = self.database_recovered.notified() => return NextCount::Immediately,
        };
        let kept = if counted.is_ok() { cost.record(took) * COST_FACTOR } else { took * COST_FACTOR };
        let kept = kept.clamp(TTL_MIN, TTL_MAX);
        let due_at = Instant::now() + kept;
        let queues_missing = asked.problem.is_some();
        self.latest.send_modify(|latest| {
            latest.due_at = Some(due_at);
            match counted {
                Ok(accounts) => {
                    latest.reconciliations = Some(Arc::new(accounts));
                    (latest.depths, latest.queue_problem) = (asked.value.unwrap_or_default(), asked.problem);
                    (latest.problem, latest.started_at) = (None, Some(began));
                }
                Err(error) => latest.problem = Some(error),
            }
        });
        tokio::select! {
            () = sleep(kept) => NextCount::OnRequest,
            () = self.database_recovered.notified() => NextCount::Immediately,
            () = self.watch_queues(depths, queues_missing) => NextCount::Immediately,
        }
    }

    /// Ends when a queue was missing and all queues respond. One that stops responding is missing in the snapshot.
    async fn watch_queues(&self, depths: CountQuery<'_, QueryResult<QueueDepths>>, mut missing: bool) {
        loop {
            sleep(if missing { FAILURE_TTL } else { QUEUE_CHECK_INTERVAL }).await;
            let asked = depths().await;
            match asked.problem {
                None if missing => return,
                None => {}
                Some(problem) => {
                    missing = true;
                    let responding = asked.value.unwrap_or_default();
                    self.latest.send_modify(|latest| {
                        // A newer depth next to an older count of the ledger could count a job twice.
                        latest.depths.retain(|provider, _| responding.contains_key(provider));
                        latest.queue_problem = Some(problem);
                    });
                }
            }
        }
    }

    /// The last snapshot, or the next one if it is due and ready within [`COUNT_TIMEOUT`].
    pub async fn current(&self) -> BacklogCounts {
        let mut latest = self.latest.subscribe();
        let due = latest.borrow_and_update().due_at.is_none_or(|at| at <= Instant::now());
        if due {
            self.requested.notify_one();
            // A later result is shown to the next reader.
            if timeout(COUNT_TIMEOUT, latest.changed()).await.is_err() {
                tracing::debug!("the count of jobs takes longer; the last count is shown");
            }
        }
        self.last()
    }

    /// The last snapshot. If it is older than `age`, requests the next one without waiting for it.
    pub fn last_and_request(&self, age: Duration) -> BacklogCounts {
        let latest = self.latest.borrow().clone();
        let due = latest.due_at.is_none_or(|at| at <= Instant::now());
        if due && latest.started_at.is_none_or(|at| at.elapsed() >= age) {
            self.requested.notify_one();
        }
        self.last()
    }

    /// The database is available again: starts a new count, so that no older one is shown.
    pub fn notify_database_recovered(&self) {
        self.database_recovered.notify_one();
    }

    /// The last snapshot, without counts that are too old.
    pub fn last(&self) -> BacklogCounts {
        let last = self.latest.borrow().clone();
        let old = last.started_at.is_none_or(|at| at.elapsed() > STALE_AFTER);
        if old { BacklogCounts { reconciliations: None, depths: QueueDepths::new(), ..last } } else { last }
    }
}

#[cfg(test)]
#[path = "backlog_counts_tests.rs"]
mod tests;
