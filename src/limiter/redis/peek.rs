//! The encoder and decoder of a peek, which reads a quota's usage and acquires nothing.
//!
//! A limit that the store does not know yet is unused, and waits as long as a new limit.

use super::keys::{provider_keys, state_key, subject_key};
use crate::domain::limit::Scope;
use crate::domain::permit_protocol::{LimitUsage, Subject};
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};

/// One row of the store's reply: name, uses, permits that a shadow limit would have refused, permits that it would have
/// delayed, microseconds until the next permit may start, microseconds until all is free.
pub type PeekRow = (String, u64, u64, u64, u64, u64);

/// The keys and the argument of a peek at the provider's limits, or at those of one subject.
pub fn encode_peek(prefix: &str, spec: &QuotaSpec, subject: Option<&Subject>) -> (Vec<String>, Vec<u8>) {
    let (scope, keys, cells) = match subject {
        None => (Scope::Provider, provider_keys(prefix, spec), spec.provider_counters()),
        Some(subject) => {
            let keys = vec![state_key(prefix, spec), subject_key(prefix, spec, subject)];
            (spec.scope_of(subject), keys, spec.subject_counters(subject))
        }
    };
    let scope = match scope {
        Scope::Provider => 0,
        Scope::Account => 1,
        Scope::Reference => 2,
    };
    let mut argument = format!("{scope}|{}", spec.resumed_at);
    for CounterSpec { name, window_us, shadow, .. } in cells {
        let window_us = if shadow { 0 } else { window_us };
        argument.push_str(&format!("|{name}|{window_us}"));
    }
    (keys, argument.into_bytes())
}

/// The usage of each limit of the spec. A limit without a row is unused.
pub fn decode_peek(spec: &QuotaSpec, subject: Option<&Subject>, found: &[PeekRow]) -> Vec<LimitUsage> {
    let (indices, cells): (Vec<usize>, Vec<CounterSpec>) = match subject {
        None => (spec.provider_limits(), spec.provider_counters()),
        Some(subject) => (subject.limits.iter().map(|limit| limit.index).collect(), spec.subject_counters(subject)),
    };
    let row = |name: &str| found.iter().find(|(found, ..)| found == name);
    // The state's row has an empty name. Without it, the next call begins a cold state.
    let state = row("").map(|(.., opens_in_us, _)| *opens_in_us);
    let usage = |(index, cell): (usize, CounterSpec)| match (row(&cell.name), state) {
        (Some((_, used, would_have_refused, would_have_waited, retry_us, reset_us)), _) => LimitUsage {
            index,
            used: *used,
            would_have_refused: *would_have_refused,
            would_have_waited: *would_have_waited,
            retry_us: *retry_us,
            reset_us: *reset_us,
        },
        (None, Some(opens_in_us)) => {
            let held_us = if cell.shadow { 0 } else { spec.count_delay_max_us() + cell.window_us };
            LimitUsage::unused(index, opens_in_us.max(held_us))
        }
        (None, None) => LimitUsage::unused(index, spec.cold_start_us()),
    };
    let counted = indices.into_iter().zip(cells).filter(|(index, _)| *index < spec.limits.len());
    counted.map(usage).collect()
}
