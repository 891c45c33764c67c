//! Subjects of one call: its accounts and references with their counters.
//!
//! They are found by key, without a search: a call may name thousands, each for one request or release.

use std::collections::HashMap;

use super::counters::{Counters, InFlightCost};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::Subject;

/// Counters of a subject, with what this call acquires.
pub(super) struct SubjectCounters {
    pub key: String,
    pub scope: Scope,
    pub counters: Counters,
    /// Spec indices of its counters.
    pub indices: Vec<usize>,
    /// Whether it existed before this call.
    pub existed: bool,
    pub granted: InFlightCost,
    pub latest_us: u64,
}

/// The subjects of one call, each once.
#[derive(Default)]
pub(super) struct CallSubjects<'a> {
    pub list: Vec<SubjectCounters>,
    positions: HashMap<&'a str, usize>,
}

impl<'a> CallSubjects<'a> {
    pub fn contains(&self, subject: &Subject) -> bool {
        self.positions.contains_key(subject.key.as_str())
    }

    /// Adds a subject that is not in the list.
    pub fn push(&mut self, subject: &'a Subject, counters: SubjectCounters) {
        self.positions.insert(&subject.key, self.list.len());
        self.list.push(counters);
    }

    /// Positions in the list of those subjects that are in it, in their order.
    pub fn positions(&self, subjects: &[Subject]) -> Vec<usize> {
        subjects.iter().filter_map(|subject| self.positions.get(subject.key.as_str()).copied()).collect()
    }
}

/// The subjects at these positions, each once, in the order of the list.
pub(super) fn select_mut<'a>(
    list: &'a mut [SubjectCounters],
    positions: &[usize],
) -> impl Iterator<Item = &'a mut SubjectCounters> + use<'a> {
    let mut positions = positions.to_vec();
    positions.sort_unstable();
    positions.dedup();
    let (mut rest, mut passed) = (list.iter_mut(), 0);
    positions.into_iter().filter_map(move |position| {
        let subject = rest.nth(position - passed);
        passed = position + 1;
        subject
    })
}
