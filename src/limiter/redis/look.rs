//! A look at what the limiter counts, that takes nothing.
//!
//! A limit that the store does not know yet is unused, and waits as long as a limit that is new.

use super::keys::{provider_keys, state_key, subject_key};
use crate::domain::decision::{Standing, Subject};
use crate::domain::limit::Scope;
use crate::domain::quota_spec::{CellSpec, QuotaSpec};

/// One line of the store's answer: name, uses, permits that a shadow limit would have refused and delayed, microseconds until
/// the next permit may start and until all is free.
pub type Line = (String, u64, u64, u64, u64, u64);

/// The keys and the argument of a look at the limits on everything, or at those of one subject.
#[must_use]
pub fn look(prefix: &str, spec: &QuotaSpec, subject: Option<&Subject>) -> (Vec<String>, Vec<u8>) {
    let (scope, keys, cells) = match subject {
        None => (Scope::Provider, provider_keys(prefix, spec), spec.provider_cells()),
        Some(subject) => {
            let keys = vec![state_key(prefix, spec), subject_key(prefix, spec, subject)];
            (spec.scope_of(subject), keys, spec.subject_cells(subject))
        }
    };
    let scope = match scope {
        Scope::Provider => 0,
        Scope::Account => 1,
        Scope::Reference => 2,
    };
    let mut argument = format!("{scope}|{}", spec.resumed_at);
    for CellSpec { name, window_us, shadow, .. } in cells {
        let window_us = if shadow { 0 } else { window_us };
        argument.push_str(&format!("|{name}|{window_us}"));
    }
    (keys, argument.into_bytes())
}

/// What was found, for each limit of the spec that counts it; what was not found is unused.
#[must_use]
pub fn looked_at(spec: &QuotaSpec, subject: Option<&Subject>, found: &[Line]) -> Vec<Standing> {
    let (indices, cells): (Vec<usize>, Vec<CellSpec>) = match subject {
        None => (spec.provider_limits(), spec.provider_cells()),
        Some(subject) => (subject.limits.iter().map(|limit| limit.index).collect(), spec.subject_cells(subject)),
    };
    let of = |name: &str| found.iter().find(|(found, ..)| found == name);
    // The state has no name. Without one the next call begins it, cold.
    let state = of("").map(|(.., opens_in_us, _)| *opens_in_us);
    let standing = |(index, cell): (usize, CellSpec)| match (of(&cell.name), state) {
        (Some((_, used, would_have_refused, would_have_waited, retry_us, reset_us)), _) => Standing {
            index,
            used: *used,
            would_have_refused: *would_have_refused,
            would_have_waited: *would_have_waited,
            retry_us: *retry_us,
            reset_us: *reset_us,
        },
        (None, Some(opens_in_us)) => {
            let held_us = if cell.shadow { 0 } else { spec.before_us() + cell.window_us };
            Standing::unused(index, opens_in_us.max(held_us))
        }
        (None, None) => Standing::unused(index, spec.cold_us()),
    };
    let counted = indices.into_iter().zip(cells).filter(|(index, _)| *index < spec.limits.len());
    counted.map(standing).collect()
}
