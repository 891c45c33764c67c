//! What becomes of a backlog at its provider's cut-off: cleared before it, or some payments miss it.
//!
//! It is the clear time's estimate, asked the other way: how many jobs are cleared in the time that is left. While
//! nothing is sent, all of them miss it, as things are. Jobs that become due after the cut-off are not late for it.
//! Invariants: jobs miss the cut-off if and only if the clear time is later. The others are as many as the time allows
//! (both held by `missed_jobs_are_those_that_clear_later`).

use std::time::Duration;

use super::{ClearTime, ClearTimeInput, SendPace, SendingState, WaitingJobs, float};
use crate::domain::time::EpochMs;

/// State of a backlog at the next cut-off, if everything stays as it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CutoffForecast {
    /// The backlog is cleared before the cut-off.
    OnTime {
        spare: Duration,
    },
    Missed(MissedCutoff),
    /// There is no estimate.
    Unknown,
}

/// Jobs that are not cleared at the cut-off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MissedCutoff {
    /// Of all jobs that were considered.
    pub jobs: u64,
    pub of: u64,
    /// More may miss it: limits count accounts separately, or delayed jobs may be due in time.
    pub is_at_least: bool,
    /// Jobs per second from now on that would clear the backlog in time. `None`: no rate would.
    pub rate_needed: Option<f64>,
}

impl ClearTimeInput<'_> {
    /// Forecasts the backlog at a cut-off after now.
    pub fn at_cutoff(&self, cutoff: EpochMs) -> CutoffForecast {
        let left = Duration::from_millis(u64::try_from(cutoff.0.saturating_sub(self.now.0)).unwrap_or(0));
        let due_later = self.waiting.last_due_in > left;
        let due = if due_later { self.without_delayed() } else { *self };
        let missed = |jobs: u64, is_at_least: bool| {
            CutoffForecast::Missed(MissedCutoff {
                jobs,
                of: due.waiting.jobs,
                is_at_least: is_at_least || due_later,
                rate_needed: due.rate_needed(left),
            })
        };
        match due.clear_time() {
            ClearTime::Unknown(_) | ClearTime::NotWhileThrottled { .. } => CutoffForecast::Unknown,
            ClearTime::In(clears_in) if clears_in <= left => CutoffForecast::OnTime { spare: left - clears_in },
            ClearTime::In(_) => missed(due.late_jobs(left), false),
            ClearTime::DependsOnAccounts { at_least, about, .. } => match about {
                Some(about) if about <= left => CutoffForecast::OnTime { spare: left - about },
                Some(_) => missed(due.late_jobs(left).max(due.late_jobs_at_recent_rate(left)), false),
                None if at_least > left => missed(due.late_jobs(left), true),
                None => CutoffForecast::Unknown,
            },
            ClearTime::Never { .. }
            | ClearTime::NotWhileBlocked
            | ClearTime::NotWhilePaused
            | ClearTime::NotWhileDisabled
            | ClearTime::NotWhileBreakerOpen => match due.waiting.missing {
                Some(_) if due.waiting.jobs == 0 => CutoffForecast::Unknown,
                missing => missed(due.waiting.jobs, missing.is_some()),
            },
        }
    }

    /// Without the delayed jobs: some of them are due after the cut-off, and how many is not known.
    fn without_delayed(&self) -> Self {
        let jobs = self.waiting.jobs.saturating_sub(self.waiting.delayed);
        Self { waiting: WaitingJobs { jobs, delayed: 0, last_due_in: Duration::ZERO, ..self.waiting }, ..*self }
    }

    /// Jobs of the backlog that are not cleared within this time, by the limits.
    fn late_jobs(&self, left: Duration) -> u64 {
        // Read once: only the number of jobs differs from step to step of the search.
        let (SendingState::StartsIn(starts_in), Some(pace)) = (self.sending, SendPace::new(self)) else {
            return self.waiting.jobs;
        };
        let is_in_time =
            |jobs: u64| self.waiting.last_due_in <= left && starts_in.saturating_add(pace.sent_in(jobs)) <= left;
        let (mut in_time, mut late) = (0, self.waiting.jobs);
        // `in_time` jobs are cleared within the time, and `late` jobs are not.
        while late - in_time > 1 {
            let middle = in_time + (late - in_time) / 2;
            if is_in_time(middle) {
                in_time = middle;
            } else {
                late = middle;
            }
        }
        self.waiting.jobs - in_time
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "neither negative nor above the count")]
    fn late_jobs_at_recent_rate(&self, left: Duration) -> u64 {
        let sent = self.recent_rate.unwrap_or(0.0) * left.as_secs_f64();
        self.waiting.jobs.saturating_sub(sent as u64)
    }

    /// Jobs per second that clear the backlog in the time that is left for starts.
    fn rate_needed(&self, left: Duration) -> Option<f64> {
        let starts_in = match self.sending {
            SendingState::StartsIn(starts_in) => starts_in,
            _ => Duration::ZERO,
        };
        let for_starts = left.checked_sub(starts_in)?.checked_sub(self.hold)?.as_secs_f64();
        (for_starts > 0.0).then(|| float(self.waiting.jobs) / for_starts)
    }
}

#[cfg(test)]
#[path = "missed_tests.rs"]
mod tests;
