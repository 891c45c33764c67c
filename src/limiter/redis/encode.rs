//! The encoder of a limiter call as the function's argument.
//!
//! The header of `lua/quota.lua` has the layout. It is one packed argument, because each further argument costs the
//! server more than its bytes. A value that does not fit its width becomes the greatest value that does, which is
//! always the safe side. See `docs/decisions/0009-redis-function-with-packed-state.md`.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::keys::call_subjects;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::permit_protocol::{
    BATCH_MAX, CallKind, CostByKind, CounterSeeds, LimiterCall, PastUse, PermitRelease, PermitRequest, RebuildData,
    ReleaseKind, Subject, UsageHistory,
};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::{CounterKind, CounterSpec, QuotaSpec};
use crate::domain::time::{micros_down, micros_up};

/// Number of the layout of the state's hash (`lua/tallies.lua`); one higher with each change.
const LAYOUT: u32 = 3;

/// Where each subject of a call stands, by its key, from 1.
type SubjectNumbers<'a> = HashMap<&'a str, u64>;

/// The function's argument.
pub fn encode_call(spec: &QuotaSpec, call: &LimiterCall) -> Vec<u8> {
    let subjects = call_subjects(call);
    let places: SubjectNumbers<'_> = subjects.iter().map(|subject| subject.key.as_str()).zip(1..).collect();
    let cells = spec.provider_counters();
    let names = joined_names(&cells);
    let records = encode_counters(&cells, &spec.provider_limits());
    let members: Vec<u8> = spec.members.iter().flat_map(|member| digest(member.as_str().as_bytes())).collect();
    let terms = [encode_settings(spec, cells.len(), names.len()), members, names, records].concat();
    let seeds = seeds_if_they_fit(call).map(|seeds| encode_seeds(seeds, &places)).unwrap_or_default();
    let more = encode_optional(call, seeds.len());
    let mut argument = encode_header(call, &terms, subjects.len(), !more.is_empty());
    argument.extend(terms);
    argument.extend(more);
    call.requests.iter().for_each(|want| encode_request(&mut argument, want, &places));
    call.releases.iter().for_each(|release| encode_release(&mut argument, release, &places, cells.len()));
    argument.extend(rebuild_if_it_fits(call).map(|rebuild| encode_past_uses(&rebuild.ended)).unwrap_or_default());
    argument.extend(seeds);
    argument.extend(subjects.into_iter().flat_map(|subject| encode_subject(spec, subject)));
    argument
}

fn encode_header(call: &LimiterCall, terms: &[u8], subjects: usize, more: bool) -> Vec<u8> {
    let returned =
        call.releases.iter().filter(|release| matches!(release.release_kind, ReleaseKind::Unused { .. })).count();
    let numbers = pack(&[
        (call.number, 6),
        (to_u64(terms.len()), 2),
        (to_u64(call.requests.len()), 2),
        (to_u64(call.releases.len()), 2),
        (to_u64(returned), 2),
        (to_u64(subjects), 2),
        (micros_down(call.look_ahead.min(BOOKING_HORIZON)), 4),
        (u64::from(more), 1),
    ]);
    [&store_digest(&call.run_id)[..], &digest(terms)[..], &call.incarnation.to_le_bytes()[..], &numbers].concat()
}

/// The part that is the same in every call under the same settings; the server reads it once.
fn encode_settings(spec: &QuotaSpec, cells: usize, names: usize) -> Vec<u8> {
    pack(&[
        (u64::try_from(spec.version).unwrap_or(0), 6),
        (spec.grant_jitter.map_or(0, micros_up), 6),
        (micros_up(spec.hold_max), 6),
        (micros_up(BOOKING_HORIZON), 6),
        (micros_up(spec.send_budget), 6),
        (spec.longest_window_us(), 6),
        (spec.cold_start_us(), 6),
        (micros_up(spec.handover), 6),
        (spec.resumed_at, 6),
        (spec.longest_window_of_us(Scope::Account), 6),
        (spec.longest_window_of_us(Scope::Reference), 6),
        (to_u64(spec.members.len()), 2),
        (to_u64(cells), 2),
        (to_u64(names), 2),
    ])
}

/// The part that only few calls have.
fn encode_optional(call: &LimiterCall, seeds_bytes: usize) -> Vec<u8> {
    let (rebuild, seeds) = (rebuild_if_it_fits(call), seeds_if_they_fit(call));
    if call.pause.is_none() && call.invalidate_epoch.is_none() && rebuild.is_none() && seeds.is_none() {
        return Vec::new();
    }
    pack(&[
        (call.pause.map_or(0, micros_up), 6),
        (call.invalidate_epoch.map_or(0, |born| born.0), 7),
        (rebuild.map_or(0, |rebuild| rebuild.state_epoch.0), 7),
        (rebuild.map_or(0, |rebuild| to_u64(rebuild.ended.len())), 2),
        (rebuild.map_or(0, |rebuild| u64::from(rebuild.in_flight.charges)), 4),
        (rebuild.map_or(0, |rebuild| u64::from(rebuild.in_flight.lookups)), 4),
        (seeds.map_or(0, |seeds| seeds.state_epoch.0), 7),
        (seeds.map_or(0, |seeds| to_u64(seeds.subjects.len() + usize::from(seeds.provider.is_some()))), 2),
        (to_u64(seeds_bytes), 4),
    ])
}

fn encode_subject(spec: &QuotaSpec, subject: &Subject) -> Vec<u8> {
    let cells = spec.subject_counters(subject);
    let indices: Vec<usize> = subject.limits.iter().map(|limit| limit.index).collect();
    let (names, records) = (joined_names(&cells), encode_counters(&cells, &indices));
    // With the times that decide how long uses count: the key lives that long, and longer once they grow.
    let lifetime = pack(&[(micros_up(spec.hold_max), 6), (spec.longest_window_of_us(spec.scope_of(subject)), 6)]);
    let limits = digest(&[names.as_slice(), &records, &lifetime].concat());
    let widths = [(scope_code(spec.scope_of(subject)), 1), (to_u64(names.len()), 2), (to_u64(cells.len()), 2)];
    [&limits[..], &pack(&widths), &names, &records].concat()
}

/// Digest of the store and of the layout of its state. A state of another layout counts as one of another store: it is
/// not read, and begins cold.
fn store_digest(run_id: &str) -> [u8; 8] {
    digest(format!("{run_id}/layout{LAYOUT}").as_bytes())
}

/// What stands for a text where only equality matters.
fn digest(text: &[u8]) -> [u8; 8] {
    let mut first = [0; 8];
    first.iter_mut().zip(Sha256::digest(text)).for_each(|(byte, digested)| *byte = digested);
    first
}

fn joined_names(cells: &[CounterSpec]) -> Vec<u8> {
    let names: Vec<&str> = cells.iter().map(|cell| cell.name.as_str()).collect();
    names.join("|").into_bytes()
}

fn encode_counters(cells: &[CounterSpec], indices: &[usize]) -> Vec<u8> {
    let record = |(cell, index): (&CounterSpec, &usize)| {
        let (kind, mode, parameter, granule_ms) = match cell.kind {
            CounterKind::Log { granule_ms, held } => (0, u64::from(held), 0, granule_ms),
            CounterKind::Window { offset_us } => (1, 0, offset_us, 0),
            CounterKind::Bucket { interval, debt } => (2, if debt { 3 } else { 0 }, interval, 0),
            CounterKind::InFlight => (3, 0, 0, 0),
        };
        let applies = match cell.applies_to {
            AppliesTo::All => 0,
            AppliesTo::Charge => 1,
            AppliesTo::Lookup => 2,
        };
        let mode = if cell.shadow { 2 } else { mode };
        let widths = [(kind, 1), (applies, 1), (mode, 1), (cell.window_us, 7), (parameter, 7), (granule_ms, 4)];
        let rest = [(u64::from(cell.max), 4), (to_u64(*index), 2)];
        [pack(&widths), pack(&rest)].concat()
    };
    cells.iter().zip(indices).flat_map(record).collect()
}

fn encode_request(out: &mut Vec<u8>, want: &PermitRequest, all: &SubjectNumbers<'_>) {
    let [owns, first, second] = subject_numbers(&want.subjects, all);
    let permits = u64::from(want.permits);
    let cost = u64::from(want.cost);
    put(out, &[(permits, 4), (cost, 2), (kind_code(want.kind), 1), (owns, 1), (first, 2), (second, 2)]);
}

fn encode_release(out: &mut Vec<u8>, release: &PermitRelease, all: &SubjectNumbers<'_>, cells: usize) {
    let [owns, first, second] = subject_numbers(&release.subjects, all);
    let (fate, age_us) = match &release.release_kind {
        ReleaseKind::Used { age } => (0, micros_down(*age)),
        ReleaseKind::Unused { .. } => (1, 0),
    };
    put(out, &[(release.call, 6), (u64::from(release.cost), 4), (kind_code(release.kind), 1), (fate, 1)]);
    put(out, &[(owns, 1), (first, 2), (second, 2), (age_us, 6)]);
    if let ReleaseKind::Unused { origins } = &release.release_kind {
        let origins = origins.iter().copied().chain(std::iter::repeat(0));
        origins.take(cells).for_each(|origin| put(out, &[(origin, 6)]));
    }
}

/// The rebuild data, if the list fits. A list that is too long must not be sent in part.
fn rebuild_if_it_fits(call: &LimiterCall) -> Option<&RebuildData> {
    call.rebuild.as_ref().filter(|rebuild| rebuild.ended.len() <= BATCH_MAX)
}

fn seeds_if_they_fit(call: &LimiterCall) -> Option<&CounterSeeds> {
    call.seeds.as_ref().filter(|seeds| seeds.past_use_count() <= BATCH_MAX)
}

/// Past uses, oldest first.
fn encode_past_uses(ended: &[PastUse]) -> Vec<u8> {
    let mut past: Vec<(u64, CostByKind)> = ended.iter().map(|past| (micros_down(past.age), past.cost)).collect();
    past.sort_unstable_by(|a, b| b.cmp(a));
    let packed_use = |(age_us, cost): (u64, CostByKind)| {
        pack(&[(age_us, 6), (u64::from(cost.charges), 4), (u64::from(cost.lookups), 4)])
    };
    past.into_iter().flat_map(packed_use).collect()
}

fn encode_seeds(seeds: &CounterSeeds, places: &SubjectNumbers<'_>) -> Vec<u8> {
    let of_provider = seeds.provider.iter().map(|history| (0, history));
    let of_subjects = seeds.subjects.iter().filter_map(|seed| {
        let place = places.get(seed.subject.key.as_str()).copied()?;
        Some((place, &seed.history))
    });
    let packed_seed = |(place, history): (u64, &UsageHistory)| {
        let head = pack(&[
            (place, 2),
            (history.as_of.0, 7),
            (micros_up(history.within), 7),
            (u64::from(history.in_flight.charges), 4),
            (u64::from(history.in_flight.lookups), 4),
            (to_u64(history.ended.len()), 2),
        ]);
        [head, encode_past_uses(&history.ended)].concat()
    };
    of_provider.chain(of_subjects).flat_map(packed_seed).collect()
}

/// The code of a scope in the layout.
pub(super) fn scope_code(scope: Scope) -> u64 {
    match scope {
        Scope::Provider => 0,
        Scope::Account => 1,
        Scope::Reference => 2,
    }
}

/// The number of subjects, and the positions of the first two in the call.
fn subject_numbers(own: &[Subject], all: &SubjectNumbers<'_>) -> [u64; 3] {
    let mut places = own.iter().filter_map(|subject| all.get(subject.key.as_str()).copied());
    let (first, second) = (places.next(), places.next());
    [u64::from(first.is_some()) + u64::from(second.is_some()), first.unwrap_or(0), second.unwrap_or(0)]
}

fn kind_code(kind: CallKind) -> u64 {
    match kind {
        CallKind::Charge => 1,
        CallKind::Lookup => 2,
    }
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Unsigned little-endian numbers, each with its width in bytes.
fn pack(fields: &[(u64, usize)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(fields.iter().map(|(_, width)| width).sum());
    put(&mut bytes, fields);
    bytes
}

/// Appends what [`pack`] makes of these fields.
fn put(out: &mut Vec<u8>, fields: &[(u64, usize)]) {
    for (value, width) in fields {
        let value = (*value).min((1 << (8 * width)) - 1);
        out.extend(value.to_le_bytes().iter().take(*width));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::redis::library::SOURCE;

    /// A change of one of these formats needs another number: a worker must not read what another version wrote.
    #[test]
    fn layout_number_changes_with_the_formats() {
        let names = ["HEAD, HEAD_BYTES", "TALLY, TALLY_BYTES", "CELL", "UNKNOWN", "SCOPE, ROWS"];
        let formats = names.map(|name| {
            let line = SOURCE.lines().find_map(|line| line.strip_prefix(&format!("local {name} = ")));
            line.unwrap_or_else(|| panic!("no format {name}"))
        });
        let expected = [
            "'<c8c8I7I7I7I6I7I6I6', 62",
            "'<I7I6I6I7', 26",
            "'<I7I7I7I7I6I6I4I4I7I4I4I4'",
            "'<I7I6I7'",
            "'<I7I7I7I7I7I7', '<I6I7I7I7'",
        ];
        assert_eq!((LAYOUT, formats), (3, expected));
    }
}
