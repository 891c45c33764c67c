//! The accounts and references of one call: their tallies, found by key.
//!
//! Refuses to search: a call may name thousands, each for a want or a settlement of its own.

use std::collections::HashMap;

use super::counters::{Counters, InFlightCost};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::Subject;

/// A subject's tally, with what this call takes of it.
pub(super) struct SubjectCounters {
    pub key: String,
    pub scope: Scope,
    pub counters: Counters,
    /// The spec indices of its cells.
    pub indices: Vec<usize>,
    /// Whether it was there before this call.
    pub existed: bool,
    pub granted: InFlightCost,
    pub latest_us: u64,
}

/// Those of one call, each once.
#[derive(Default)]
pub(super) struct CallSubjects<'a> {
    pub list: Vec<SubjectCounters>,
    positions: HashMap<&'a str, usize>,
}

impl<'a> CallSubjects<'a> {
    pub fn contains(&self, subject: &Subject) -> bool {
        self.positions.contains_key(subject.key.as_str())
    }

    /// Adds one that is not there yet.
    pub fn push(&mut self, subject: &'a Subject, own: SubjectCounters) {
        self.positions.insert(&subject.key, self.list.len());
        self.list.push(own);
    }

    /// Where in the list these are that are in it, in their order.
    pub fn positions(&self, subjects: &[Subject]) -> Vec<usize> {
        subjects.iter().filter_map(|subject| self.positions.get(subject.key.as_str()).copied()).collect()
    }
}

/// Those at these positions, each once, in the order of the list.
pub(super) fn select_mut<'a>(
    list: &'a mut [SubjectCounters],
    positions: &[usize],
) -> impl Iterator<Item = &'a mut SubjectCounters> + use<'a> {
    let mut positions = positions.to_vec();
    positions.sort_unstable();
    positions.dedup();
    let (mut rest, mut passed) = (list.iter_mut(), 0);
    positions.into_iter().filter_map(move |position| {
        let own = rest.nth(position - passed);
        passed = position + 1;
        own
    })
}
