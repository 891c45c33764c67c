//! The signal by which a receipt that could not finish its message ends its lane.
//!
//! A place in the prefetch that never comes free would in time stop the lane without a sign. A lane that ends is opened
//! again, and the broker delivers again what it held.

use tokio::sync::watch;

/// The first reason counts.
#[derive(Default)]
pub(super) struct LaneFault(watch::Sender<Option<String>>);

impl LaneFault {
    pub fn record(&self, why: String) {
        self.0.send_if_modified(|reason| {
            let first = reason.is_none();
            reason.get_or_insert(why);
            first
        });
    }

    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Waits for a reason. Cancel-safe: the reason stays.
    pub async fn wait(&self) -> String {
        // The sender lives in `self`, so there is no end without a reason.
        let reason = self.0.subscribe().wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_default()
    }
}
