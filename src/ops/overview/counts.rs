//! One snapshot of what is where: the jobs of the ledger and the messages of the lanes' queues, read one after the other.
//!
//! Counting reads all jobs that are open, up to a second per million. So it happens only while someone asks, and for at most
//! a twentieth of the time: the last snapshot is shown meanwhile. Queues are cheap to ask: while one does not answer, all are
//! asked each second, and the ledger is counted again once they answer. After an outage of the database it is counted at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::cached::{Asked, Cost, FAILURE_KEPT};
use crate::fleet::Conserved;

/// A count is kept at least so long, and so many times as long as it took.
const KEPT_MIN: Duration = Duration::from_secs(2);
const COST_FACTOR: u32 = 20;
const KEPT_MAX: Duration = Duration::from_secs(4 * 60);
/// An older count says nothing of now.
const OLD: Duration = Duration::from_secs(5 * 60);
/// How long somebody who asks waits for a count that is due.
const PATIENCE: Duration = Duration::from_secs(2);

/// Messages ready in queues, by provider.
pub(super) type Depths = BTreeMap<String, u64>;

type Ask<'a, T> = &'a (dyn Fn() -> BoxFuture<'a, T> + Send + Sync);

/// What a snapshot asks.
#[derive(Clone, Copy)]
pub(super) struct Asks<'a> {
    pub jobs: Ask<'a, Result<Vec<Conserved>, String>>,
    pub depths: Ask<'a, Asked<Depths>>,
}

/// The last snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    pub accounts: Option<Arc<Vec<Conserved>>>,
    /// Queues that did not answer are left out.
    pub depths: Depths,
    /// Why the last count came to nothing.
    pub problem: Option<String>,
    /// Why a queue is left out.
    pub queue_problem: Option<String>,
    /// When the last snapshot was begun: it says nothing of what came after.
    pub had_at: Option<Instant>,
    pub due_at: Option<Instant>,
}

pub(super) struct Counts {
    latest: watch::Sender<Counted>,
    wanted: Notify,
    recovered: Notify,
}

/// What ends the wait between two snapshots.
enum Next {
    WhenWanted,
    AtOnce,
}

impl Counts {
    pub fn new() -> Self {
        Self { latest: watch::Sender::default(), wanted: Notify::new(), recovered: Notify::new() }
    }

    /// Counts until `stop` fires.
    pub async fn keep(&self, asks: Asks<'_>, stop: &CancellationToken) {
        stop.run_until_cancelled(async {
            let (mut next, mut cost) = (Next::WhenWanted, Cost::default());
            loop {
                if matches!(next, Next::WhenWanted) {
                    self.wanted.notified().await;
                }
                next = self.snapshot(asks, &mut cost).await;
            }
        })
        .await;
    }

    async fn snapshot(&self, Asks { jobs, depths }: Asks<'_>, cost: &mut Cost) -> Next {
        let began = Instant::now();
        let counting = async {
            let counted = jobs().await;
            (counted, began.elapsed())
        };
        // One that was begun during an outage may hang for long after it.
        let ((counted, took), asked) = tokio::select! {
            // The ledger first: a message that is taken meanwhile is in neither for a moment, and never in both.
            both = async { (counting.await, depths().await) } => both,
            () = self.recovered.notified() => return Next::AtOnce,
        };
        let kept = if counted.is_ok() { cost.after(took) * COST_FACTOR } else { took * COST_FACTOR };
        let kept = kept.clamp(KEPT_MIN, KEPT_MAX);
        let due_at = Instant::now() + kept;
        let queues_missing = asked.problem.is_some();
        self.latest.send_modify(|latest| {
            latest.due_at = Some(due_at);
            match counted {
                Ok(accounts) => {
                    latest.accounts = Some(Arc::new(accounts));
                    (latest.depths, latest.queue_problem) = (asked.value.unwrap_or_default(), asked.problem);
                    (latest.problem, latest.had_at) = (None, Some(began));
                }
                Err(error) => latest.problem = Some(error),
            }
        });
        tokio::select! {
            () = sleep(kept) => Next::WhenWanted,
            () = self.recovered.notified() => Next::AtOnce,
            () = answered_again(depths), if queues_missing => Next::AtOnce,
        }
    }

    /// The last snapshot, or the next one if that is due and comes soon.
    pub async fn wanted(&self) -> Counted {
        let mut latest = self.latest.subscribe();
        let due = latest.borrow_and_update().due_at.is_none_or(|at| at <= Instant::now());
        if due {
            self.wanted.notify_one();
            // What came too late is shown to whoever asks next.
            if timeout(PATIENCE, latest.changed()).await.is_err() {
                tracing::debug!("jobs are still being counted; the last count is shown");
            }
        }
        self.last()
    }

    /// The last snapshot; asks for the next one if it is older than this, and does not wait for it.
    pub fn wanted_within(&self, age: Duration) -> Counted {
        let latest = self.latest.borrow().clone();
        let due = latest.due_at.is_none_or(|at| at <= Instant::now());
        if due && latest.had_at.is_none_or(|at| at.elapsed() >= age) {
            self.wanted.notify_one();
        }
        self.last()
    }

    /// The database answers again: what it said before its outage is not shown any longer than needed.
    pub fn recovered(&self) {
        self.recovered.notify_one();
    }

    /// The last snapshot, if it is not too old to say anything.
    pub fn last(&self) -> Counted {
        let last = self.latest.borrow().clone();
        let old = last.had_at.is_none_or(|at| at.elapsed() > OLD);
        if old { Counted { accounts: None, depths: Depths::new(), ..last } } else { last }
    }
}

/// Asks the queues now and then until all of them answer.
async fn answered_again(depths: Ask<'_, Asked<Depths>>) {
    loop {
        sleep(FAILURE_KEPT).await;
        if depths().await.problem.is_none() {
            return;
        }
    }
}

#[cfg(test)]
#[path = "counts_tests.rs"]
mod tests;
