//! The accounts and references of one call: their tallies, found by key.
//!
//! Refuses to search: a call may name thousands, each for a want or a settlement of its own.

use std::collections::HashMap;

use super::tally::{InFlight, Tally};
use crate::domain::decision::Subject;
use crate::domain::limit::Scope;

/// A subject's tally, with what this call takes of it.
pub(super) struct Own {
    pub key: String,
    pub scope: Scope,
    pub tally: Tally,
    /// The spec indices of its cells.
    pub indices: Vec<usize>,
    /// Whether it was there before this call.
    pub known: bool,
    pub granted: InFlight,
    pub latest_us: u64,
}

/// Those of one call, each once.
#[derive(Default)]
pub(super) struct Owns<'a> {
    pub list: Vec<Own>,
    positions: HashMap<&'a str, usize>,
}

impl<'a> Owns<'a> {
    pub fn has(&self, subject: &Subject) -> bool {
        self.positions.contains_key(subject.key.as_str())
    }

    /// Adds one that is not there yet.
    pub fn push(&mut self, subject: &'a Subject, own: Own) {
        self.positions.insert(&subject.key, self.list.len());
        self.list.push(own);
    }

    /// Where in the list these are that are in it, in their order.
    pub fn positions(&self, subjects: &[Subject]) -> Vec<usize> {
        subjects.iter().filter_map(|subject| self.positions.get(subject.key.as_str()).copied()).collect()
    }
}

/// Those at these positions, each once, in the order of the list.
pub(super) fn at<'a>(list: &'a mut [Own], positions: &[usize]) -> impl Iterator<Item = &'a mut Own> + use<'a> {
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
