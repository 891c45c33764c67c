//! One pause of a lane: until when, by which cause, and how a later pause extends an earlier one.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::domain::time::millis_down;
use crate::domain::wait_reason::Wait;
use crate::fleet::report::{PauseCause, ReportedPause};

/// A pause of a lane: its end and its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanePause {
    pub until: Instant,
    pub cause: PauseCause,
    pub reason: Wait,
}

impl From<LanePause> for ReportedPause {
    fn from(LanePause { until, cause: by, reason }: LanePause) -> Self {
        let left = until.saturating_duration_since(Instant::now());
        Self {
            by,
            limit: reason.reason.limit().filter(|_| by == PauseCause::Limit).map(str::to_owned),
            words: reason.to_string(),
            ends_in_ms: Some(millis_down(left)),
            wait: Some(reason),
        }
    }
}

pub(super) fn active_pause(pause: &watch::Sender<Option<LanePause>>) -> Option<LanePause> {
    pause.borrow().clone().filter(|pause| pause.until > Instant::now())
}

pub(super) fn end_pause_by(pause: &watch::Sender<Option<LanePause>>, cause: PauseCause) {
    pause.send_if_modified(|pause| pause.take_if(|pause| pause.cause == cause).is_some());
}

/// The later end counts.
pub(super) fn extend(pause: &watch::Sender<Option<LanePause>>, wait: Duration, by: PauseCause, reason: Wait) {
    let until = Instant::now() + wait;
    pause.send_if_modified(|current| {
        let is_new = current.as_ref().is_none_or(|current| current.until < until);
        if is_new {
            *current = Some(LanePause { until, cause: by, reason });
        }
        is_new
    });
}
