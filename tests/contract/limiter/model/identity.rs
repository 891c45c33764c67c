//! Identities of worlds: worlds that differ in nothing on which the future depends have the same one.
//!
//! [`plain`] merges only worlds that differ by a shift in time. [`reduced`] merges far more, and
//! `worlds_taken_for_the_same_do_the_same` checks each of its reductions on all steps of the small worlds. Fields that
//! are not known by name are compared unchanged.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::steps::Laws;
use super::store::{Lease, Store};
use super::world::{Fate, Worker, World};
use super::{Rules, SEND_BUDGET_US, TIMEOUT_US};

/// The identity from all fields of a world, with every instant as its distance from now.
pub fn plain(laws: &Laws, world: &World) -> u128 {
    let World { store, now_us, workers, wire, ended_us, incarnations, crashes_left, returns_left, .. } = world;
    let Store { leases, entries, tail_ms, beyond, rest, rest_us, .. } = &**store;
    let text = format!(
        "{leases:?}{entries:?}{tail_ms}{beyond:?}{rest}{rest_us:?}{workers:?}{wire:?}{ended_us:?}{incarnations} \
         {crashes_left} {returns_left}"
    );
    let (far_us, mut seen) = (2_000_000, (now_us % laws.tick_us).to_le_bytes().to_vec());
    let (mut number, mut digits) = (0_u64, 0);
    // The text ends with a number; the space terminates it.
    for byte in format!("{text} ").bytes() {
        if byte.is_ascii_digit() {
            (number, digits) = (number * 10 + u64::from(byte - b'0'), digits + 1);
            continue;
        }
        if digits > 0 {
            let instant_us = if digits == 13 { number * 1_000 } else { number };
            let shown = if digits < 13 { number } else { (instant_us + far_us).saturating_sub(*now_us) };
            seen.push(u8::from(digits < 13));
            seen.extend_from_slice(&shown.to_le_bytes());
            (number, digits) = (0, 0);
        }
        seen.push(byte);
    }
    hash(&seen)
}

/// The identity from all that the future depends on. The two workers are alike, so their order does not matter. A lease
/// counts by its remaining times and by the worker that may release it, because names of processes and calls are only
/// compared. A past instant counts only while a later step depends on its age.
pub fn reduced(laws: &Laws, world: &World) -> u128 {
    let view = View { laws, world };
    let tail_ms = view.tail_ms();
    let (mut workers, mut named) = (Vec::new(), BTreeSet::new());
    for number in 0..2 {
        workers.push(view.worker(number, tail_ms, &mut named));
    }
    workers.sort_unstable();
    let store = &*world.store;
    let mut seen = vec![world.now_us % laws.tick_us, u64::from(world.crashes_left), u64::from(world.returns_left)];
    let mut orphans: Vec<[u64; 3]> = Vec::new();
    for lease in &store.leases {
        let [left_us, counts_us] = view.lease_us(lease);
        // A lease whose uses no longer count is removed before the next grant.
        if !named.contains(&(lease.incarnation, lease.call)) && counts_us > 0 {
            orphans.push([left_us, counts_us, lease.permits]);
        }
    }
    orphans.sort_unstable();
    // A use that no longer counts is a free slot, like one that was never used.
    let entries = store.entries.iter().map(|(ms, uses)| [view.counts_for_us(*ms), *uses]);
    let entries: Vec<[u64; 2]> = entries.filter(|[for_us, _]| *for_us > 0).collect();
    let ended: Vec<u64> = world.ended_us.iter().map(|until_us| view.left_us(until_us + laws.window_us)).collect();
    let ended: Vec<u64> = ended.into_iter().filter(|for_us| *for_us > 0).collect();
    workers.extend([orphans.concat(), entries.concat(), ended]);
    for part in workers {
        seen.push(part.len() as u64);
        seen.extend(part);
    }
    seen.extend(store.beyond);
    seen.push(view.counts_for_us(tail_ms));
    // No step depends on the age of these instants.
    seen.extend(store.rest_us.iter().map(|instant_us| view.left_us(*instant_us)));
    let mut bytes: Vec<u8> = seen.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.extend_from_slice(store.rest.as_bytes());
    hash(&bytes)
}

struct View<'a> {
    laws: &'a Laws,
    world: &'a World,
}

impl View<'_> {
    fn left_us(&self, instant_us: u64) -> u64 {
        instant_us.saturating_sub(self.world.now_us)
    }

    /// Time for which a use of this instant still counts.
    fn counts_for_us(&self, ms: u64) -> u64 {
        self.left_us(ms * 1_000 + self.laws.window_us)
    }

    /// Time until the lease's deadline, and time for which its unanswered uses still count.
    fn lease_us(&self, lease: &Lease) -> [u64; 2] {
        [self.left_us(lease.deadline_us), self.left_us(lease.deadline_us + self.laws.window_us)]
    }

    /// The log is ordered: an answer or a deadline older than its tail is logged at the tail. Otherwise the tail does
    /// not matter.
    fn tail_ms(&self) -> u64 {
        let tail_ms = self.world.store.tail_ms;
        let older = |worker: &Worker| {
            worker.releases.iter().any(|(call, fate)| {
                let counts = self.world.store.lease(worker.incarnation, *call).is_some();
                counts && matches!(fate, Fate::Answered(at_us) if at_us.div_ceil(1_000) < tail_ms)
            })
        };
        let leases = &self.world.store.leases;
        let counts = |lease: &&Lease| self.lease_us(lease)[1] > 0;
        let late = leases.iter().filter(counts).any(|lease| lease.deadline_us.div_ceil(1_000) < tail_ms);
        if late || self.world.workers.iter().any(older) { tail_ms } else { 0 }
    }

    /// Origins of slots: zero if no permit can be released unused any more, or if they no longer count.
    fn origins(&self, origins: &[u64]) -> u64 {
        let may_return = self.world.returns_left > 0 || self.laws.rules == Rules::TimeoutIsNotSent;
        if may_return { self.counts_for_us(origins[0]) } else { 0 }
    }

    /// Time until an awaited instant, including that instant.
    fn until_us(&self, instant_us: u64) -> u64 {
        self.left_us(instant_us + 1)
    }

    /// Time until a permit is late, and is released. With the rule `StartedLate` it is late when its answer would be.
    fn use_before_us(&self, instant_us: u64) -> u64 {
        let answer_us = if self.laws.rules == Rules::StartedLate { TIMEOUT_US } else { 0 };
        self.until_us(instant_us + answer_us)
    }

    /// One worker, with the remaining times of the leases that it may release, which are numbered by position.
    fn worker(&self, number: usize, tail_ms: u64, named: &mut BTreeSet<(u64, u64)>) -> Vec<u64> {
        let worker = &self.world.workers[number];
        let lease = |call: u64| self.world.store.lease(worker.incarnation, call);
        // The release of a removed lease has no effect.
        let releases: Vec<&(u64, Fate)> = worker.releases.iter().filter(|(call, _)| lease(*call).is_some()).collect();
        let wire = self.world.wire.iter().filter(|request| request.worker == number);
        let mut calls: Vec<u64> = releases.iter().map(|(call, _)| *call).collect();
        calls.extend(worker.unheard.iter().map(|unheard| unheard.call));
        calls.extend(worker.permits.iter().map(|permit| permit.call));
        calls.extend(wire.clone().map(|request| request.permit.call));
        calls.sort_unstable();
        calls.dedup();
        named.extend(calls.iter().map(|call| (worker.incarnation, *call)));
        let name = |call: u64| calls.iter().position(|other| *other == call).unwrap() as u64;
        let mut seen = vec![u64::from(worker.jobs), calls.len() as u64];
        for call in &calls {
            let left = |lease: &Lease| [self.lease_us(lease), [lease.permits, 0]].concat();
            seen.extend(lease(*call).map_or_else(|| vec![0; 4], left));
        }
        seen.push(worker.unheard.as_ref().map_or(0, |unheard| unheard.granted.len() as u64));
        if let Some(unheard) = &worker.unheard {
            seen.push(name(unheard.call));
            for (wait_us, origins) in &unheard.granted {
                let use_before_us = unheard.departed_us + wait_us + SEND_BUDGET_US;
                seen.extend([*wait_us, self.use_before_us(use_before_us), self.origins(origins)]);
            }
        }
        let unsent = worker.permits.iter().map(|permit| {
            let start_us = self.left_us(permit.start_us);
            [name(permit.call), start_us, self.use_before_us(permit.use_before_us), self.origins(&permit.origins)]
        });
        let on_wire = wire.map(|request| {
            let counts_us = self.left_us(request.counts_until_us + self.laws.window_us);
            let answer_us = self.until_us(request.permit.answer_before_us);
            [name(request.permit.call), counts_us, answer_us, self.origins(&request.permit.origins)]
        });
        for mut items in [unsent.collect::<Vec<_>>(), on_wire.collect()] {
            items.sort_unstable();
            seen.push(items.len() as u64);
            seen.extend(items.concat());
        }
        seen.extend(releases.iter().flat_map(|(call, fate)| match fate {
            Fate::Answered(at_us) => [name(*call), 0, self.counts_for_us(at_us.div_ceil(1_000).max(tail_ms))],
            Fate::NotSent(origins) => [name(*call), 1, self.counts_for_us(origins[0])],
        }));
        seen
    }
}

/// Half of a SHA-256 digest; a collision among all these worlds is unlikely.
fn hash(seen: &[u8]) -> u128 {
    let digest = Sha256::digest(seen);
    digest[..16].iter().fold(0, |number, byte| number << 8 | u128::from(*byte))
}
