//! How many jobs are where, counted beside those who ask.
//!
//! Counting reads all jobs that are open, up to a second per million. So refuses to count while nobody asks, and
//! ever for more than a twentieth of the time: whoever asks is shown the last count, and waits for a new one only if it
//! comes soon.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::fleet::Conserved;
use crate::ledger::upkeep::Upkeep;
use crate::worker::sweeper::{ASTRAY_AFTER, CHECKED};

/// A count is kept at least so long, and so many times as long as it took.
const KEPT_MIN: Duration = Duration::from_secs(2);
const COST_FACTOR: u32 = 20;
const KEPT_MAX: Duration = Duration::from_secs(4 * 60);
/// An older count says nothing of now.
const OLD: Duration = Duration::from_secs(5 * 60);
/// How long somebody who asks waits for a count that is due.
const PATIENCE: Duration = Duration::from_secs(2);

/// The last count.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    pub accounts: Option<Arc<Vec<Conserved>>>,
    /// Why the last try came to nothing.
    pub problem: Option<String>,
    pub had_at: Option<Instant>,
    due_at: Option<Instant>,
}

pub(super) struct Counts {
    latest: watch::Sender<Counted>,
    wanted: Notify,
}

impl Counts {
    pub fn new() -> Self {
        Self { latest: watch::Sender::default(), wanted: Notify::new() }
    }

    /// Counts until it is stopped.
    pub async fn keep(&self, upkeep: &dyn Upkeep, stop: &CancellationToken) {
        loop {
            tokio::select! {
                () = self.wanted.notified() => {}
                () = stop.cancelled() => return,
            }
            let began = Instant::now();
            let counted = tokio::select! {
                counted = upkeep.conservation(ASTRAY_AFTER, CHECKED) => counted,
                () = stop.cancelled() => return,
            };
            let kept = (began.elapsed() * COST_FACTOR).clamp(KEPT_MIN, KEPT_MAX);
            let due_at = Some(Instant::now() + kept);
            self.latest.send_modify(|latest| {
                latest.due_at = due_at;
                match counted {
                    Ok(accounts) => {
                        latest.accounts = Some(Arc::new(accounts.into_iter().map(Conserved::from).collect()));
                        (latest.problem, latest.had_at) = (None, Some(Instant::now()));
                    }
                    Err(error) => latest.problem = Some(error.to_string()),
                }
            });
            tokio::select! {
                () = sleep(kept) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// The last count, or the next one if that is due and comes soon.
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

    /// The last count, if it is not too old to say anything.
    pub fn last(&self) -> Counted {
        let last = self.latest.borrow().clone();
        let old = last.had_at.is_none_or(|at| at.elapsed() > OLD);
        Counted { accounts: last.accounts.filter(|_| !old), ..last }
    }
}
