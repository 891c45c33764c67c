//! A look at what the limiter counts, that takes nothing.
//!
//! Refuses to write: a limit that the store does not know yet counts as unused.

use super::keys::{provider_keys, state_key, subject_key};
use crate::domain::decision::{Standing, Subject};
use crate::domain::quota_spec::{CellSpec, QuotaSpec};

/// The keys and the argument of a look at the limits on everything, or at those of one subject.
#[must_use]
pub fn look(prefix: &str, spec: &QuotaSpec, subject: Option<&Subject>) -> (Vec<String>, Vec<u8>) {
    if let Some(subject) = subject {
        return (vec![state_key(prefix, spec), subject_key(prefix, spec, subject)], Vec::new());
    }
    let names: Vec<String> = spec.provider_cells().into_iter().map(|cell| cell.name).collect();
    (provider_keys(prefix, spec), names.join("|").into_bytes())
}

/// What was found, for each limit of the spec that counts it; what was not found is unused.
#[must_use]
pub fn looked_at(spec: &QuotaSpec, subject: Option<&Subject>, found: &[(String, u64, u64, u64)]) -> Vec<Standing> {
    let (indices, cells): (Vec<usize>, Vec<CellSpec>) = match subject {
        None => (spec.provider_limits(), spec.provider_cells()),
        Some(subject) => (subject.limits.iter().map(|limit| limit.index).collect(), spec.subject_cells(subject)),
    };
    let standing = |(index, cell): (usize, CellSpec)| {
        let known = found.iter().find(|(name, ..)| *name == cell.name);
        let (used, refused, waited) = known.map_or((0, 0, 0), |(_, used, refused, waited)| (*used, *refused, *waited));
        Standing { index, used, would_have_refused: refused, would_have_waited: waited }
    };
    let counted = indices.into_iter().zip(cells).filter(|(index, _)| *index < spec.limits.len());
    counted.map(standing).collect()
}
