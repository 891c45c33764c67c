//! The payments of this process whose answers the ledger has not accepted, over all lanes.
//!
//! Such a payment is not claimed again here, even if another worker has taken it away meanwhile. A drain waits until the
//! last of them is logged.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::domain::job::JobId;

/// Payments with an unwritten answer, each with the number of them.
#[derive(Debug, Default)]
pub struct UnwrittenAnswers {
    jobs: Mutex<HashMap<JobId, u32>>,
    count: watch::Sender<usize>,
}

/// Keeps one payment among them until it is dropped.
#[derive(Debug)]
pub struct UnwrittenAnswer {
    job: JobId,
    all: Arc<UnwrittenAnswers>,
}

impl UnwrittenAnswers {
    pub fn insert(self: &Arc<Self>, job: &JobId) -> UnwrittenAnswer {
        *self.jobs.lock().entry(job.clone()).or_default() += 1;
        self.count.send_modify(|count| *count += 1);
        UnwrittenAnswer { job: job.clone(), all: Arc::clone(self) }
    }

    pub fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until there is none.
    pub async fn none_left(&self) {
        // The sender lives as long as this.
        self.count.subscribe().wait_for(|count| *count == 0).await.ok();
    }
}

impl Drop for UnwrittenAnswer {
    fn drop(&mut self) {
        let mut jobs = self.all.jobs.lock();
        if let Some(answers) = jobs.get_mut(&self.job) {
            *answers -= 1;
            if *answers == 0 {
                jobs.remove(&self.job);
            }
        }
        drop(jobs);
        self.all.count.send_modify(|count| *count = count.saturating_sub(1));
    }
}
