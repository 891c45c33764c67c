//! A look at what the limiter counts, that takes nothing.
//!
//! Refuses to write: a limit that the store does not know yet counts as unused.

use redis::{Script, ScriptInvocation};

use super::keys::{provider_keys, subject_key};
use crate::domain::decision::{Standing, Subject};
use crate::domain::quota_spec::{CellSpec, QuotaSpec};

/// The look as Redis runs it.
pub const PEEK: &str = concat!(
    include_str!("../../../lua/log.lua"),
    include_str!("../../../lua/cells.lua"),
    include_str!("../../../lua/peek.lua"),
);

/// Looks at the limits on everything, or at those of one subject.
pub(super) fn look<'a>(
    script: &'a Script,
    prefix: &str,
    spec: &QuotaSpec,
    subject: Option<&Subject>,
) -> ScriptInvocation<'a> {
    let mut invocation = script.prepare_invoke();
    let keys = subject.map_or_else(|| provider_keys(prefix, spec), |own| vec![subject_key(prefix, spec, own)]);
    keys.into_iter().for_each(|key| {
        invocation.key(key);
    });
    let logs = if subject.is_some() { Vec::new() } else { spec.provider_cells() };
    let names: Vec<&str> = logs.iter().map(|cell| cell.name.as_str()).collect();
    invocation.arg(names.join("|"));
    invocation
}

/// What was found, for each limit of the spec that counts it; what was not found is unused.
pub(super) fn looked_at(
    spec: &QuotaSpec,
    subject: Option<&Subject>,
    found: &[(String, u64, u64, u64)],
) -> Vec<Standing> {
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
