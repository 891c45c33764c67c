//! The hold of a lane: it records payments and sends look-ups, and starts no charge until an operator releases it.

use super::LaneControl;
use crate::domain::wait_reason::Wait;
use crate::fleet::report::{PauseCause, ReportedPause};

impl LaneControl {
    /// Holds the lane, or releases it.
    pub fn set_hold(&self, hold: Option<Wait>) {
        *self.hold.lock() = hold;
    }

    /// Why the lane starts no charge until an operator releases it.
    pub fn hold(&self) -> Option<Wait> {
        self.hold.lock().clone()
    }

    pub(super) fn reported_hold(&self) -> Option<ReportedPause> {
        let wait = self.hold()?;
        Some(ReportedPause {
            by: PauseCause::Held,
            words: wait.to_string(),
            wait: Some(wait),
            ..ReportedPause::default()
        })
    }
}
