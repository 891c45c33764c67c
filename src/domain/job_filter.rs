//! The filter of a list of jobs: conditions that must all hold. Lists, sums, exports and selections for a decision use
//! this one value.
//!
//! It knows no database. `ledger::job_filter_input` parses it from the words of an operator.

use super::job::{Identifier, JobId};
use super::provider::ProviderName;
use super::time::EpochMs;
use super::wait_reason::WaitReason;

/// All states, in the order in which a job passes them.
pub const STATES: [&str; 9] =
    ["waiting", "sending", "unknown", "review", "dead", "succeeded", "declined", "expired", "cancelled"];

/// The states of a job that has not finished.
pub const OPEN_STATES: [&str; 3] = ["waiting", "sending", "unknown"];

/// Whether this is the state of a finished job.
pub fn is_finished(state: &str) -> bool {
    !OPEN_STATES.contains(&state)
}

/// A filter; the default one holds for every job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFilter {
    /// Any of these; empty: any state. Each is one of [`STATES`].
    pub states: Vec<&'static str>,
    pub provider: Option<ProviderName>,
    pub account: Option<Identifier>,
    /// The whole id.
    pub id: Option<JobId>,
    /// The beginning of an id or of a reference, or a provider's whole reference of a charge.
    pub search: Option<String>,
    pub reason: Option<ReasonFilter>,
    /// Three capital letters.
    pub currency: Option<String>,
    /// In minor units of `currency`.
    pub amounts: Range,
    /// Milliseconds since the Unix epoch, by the ledger's clock. The end does not belong to the range.
    pub created: Range,
    /// Like `created`. A job that has not finished is outside of every range.
    pub finished: Range,
}

/// A range of numbers; an end that is absent is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    pub from: Option<i64>,
    pub to: Option<i64>,
}

impl Range {
    pub fn is_unbounded(self) -> bool {
        self == Self::default()
    }

    /// The part of both ranges that is before this instant.
    pub fn until(self, end: Option<i64>) -> Self {
        Self { from: self.from, to: [self.to, end].into_iter().flatten().min() }
    }
}

/// Why a job waits or has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReasonFilter {
    /// It waits for the reason of this code.
    Waits(&'static str),
    /// It has finished, and its reason begins with this text.
    Ended(String),
}

impl ReasonFilter {
    /// A code of a wait is one; any other text is the beginning of a reason.
    pub fn new(text: &str) -> Self {
        let code = WaitReason::ALL.iter().map(WaitReason::code).find(|code| *code == text);
        code.map_or_else(|| Self::Ended(text.to_owned()), Self::Waits)
    }
}

impl JobFilter {
    /// The filter for one state.
    pub fn of_state(state: &'static str) -> Self {
        Self { states: vec![state], ..Self::default() }
    }

    /// The states that a matching job may have, in the order of [`STATES`]; empty: no job can match.
    pub fn possible_states(&self) -> Vec<&'static str> {
        let only_open = matches!(self.reason, Some(ReasonFilter::Waits(_)));
        let only_finished = !self.finished.is_unbounded() || matches!(self.reason, Some(ReasonFilter::Ended(_)));
        let fits = |state: &&'static str| {
            let is_wanted = self.states.is_empty() || self.states.contains(state);
            is_wanted && if is_finished(state) { !only_open } else { !only_finished }
        };
        STATES.into_iter().filter(fits).collect()
    }

    /// When a matching job may have been created: a job is created before it finishes.
    pub fn possible_creation(&self) -> Range {
        self.created.until(self.finished.to)
    }
}

/// Whether an instant can be an end of a range.
pub fn is_instant(ms: i64) -> bool {
    EpochMs(ms).is_writable()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_can_exclude_states() {
        let filter = JobFilter::default();
        assert_eq!(filter.possible_states(), STATES);
        let waits = JobFilter { reason: Some(ReasonFilter::new("limit")), ..JobFilter::default() };
        assert_eq!(waits.possible_states(), OPEN_STATES);
        let ended = JobFilter { reason: Some(ReasonFilter::new("card declined")), ..JobFilter::default() };
        assert_eq!(ended.possible_states(), STATES[3..]);
        let none = JobFilter { states: vec!["dead"], ..waits };
        assert_eq!(none.possible_states(), [""; 0]);
        let lately = Range { from: Some(1), to: None };
        let finished = JobFilter { states: vec!["review", "waiting"], finished: lately, ..JobFilter::default() };
        assert_eq!(finished.possible_states(), ["review"]);
    }

    #[test]
    fn a_job_is_created_before_it_finishes() {
        let range = |from, to| Range { from, to };
        for (created, finished_to, possible) in [
            (range(None, None), None, range(None, None)),
            (range(Some(5), None), Some(9), range(Some(5), Some(9))),
            (range(Some(5), Some(7)), Some(9), range(Some(5), Some(7))),
            (range(None, Some(11)), Some(9), range(None, Some(9))),
        ] {
            let filter = JobFilter { created, finished: range(Some(1), finished_to), ..JobFilter::default() };
            assert_eq!(filter.possible_creation(), possible);
        }
    }
}
