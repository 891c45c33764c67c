//! Every interleaving of a small world: two workers with two jobs each, a store, a provider, and at every step a crash, or
//! a worker that does nothing for as long as it likes. Explored to the end, on the state machine itself.
//!
//! A step is one of: a call is made, its reply is heard, a permit begins or is given back, an answer is read, a worker
//! crashes, time goes on. None has to happen, so a worker that is frozen, an answer that never comes and a lease that runs
//! out are all among them. A provider counts a request at an instant of its own, from the start to the answer or the
//! timeout; a breach is found where any such instants make one. `WHOLE_MODEL=1` explores more crashes and finer time.
//! Nothing is left to chance.

use std::collections::{HashMap, HashSet};

use super::*;

mod identity;
mod steps;
mod store;
mod world;

use steps::Laws;
use world::World;

const START_US: u64 = 1_800_000_000_000_000;
const TICK_US: u64 = 200_000;
const WINDOW_MS: u64 = 200;
const SEND_BUDGET_US: u64 = 200_000;
const TIMEOUT_US: u64 = 200_000;

/// The rules as they are, or with one of them broken: then a breach must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rules {
    Kept,
    /// The slot is freed by the start, not by the answer.
    SettledAtBegin,
    /// The lease does not last as long as the request may.
    NoHold,
    /// A permit is used after its send budget.
    BegunLate,
    /// What may have been sent is given back.
    TimeoutIsNotSent,
    /// A process that starts again says that it is the one before, and numbers its calls from the first.
    SameAfterCrash,
}

/// What there is in a world: jobs of each worker, crashes, permits that are given back.
#[derive(Clone, Copy, Debug)]
struct Size {
    jobs: u32,
    crashes: u32,
    returns: u32,
}

type Identity = fn(&Laws, &World) -> u128;

struct Explorer {
    laws: Laws,
    identity: Identity,
    seen: HashSet<u128>,
    /// Most counted within one window.
    most: usize,
    breach: Option<World>,
}

impl Explorer {
    /// Depth first, each world once; to the end, or to the first breach.
    fn explored(laws: Laws, size: Size, identity: Identity) -> Self {
        let mut open = vec![World::new(&laws.spec, size)];
        let mut explorer = Self { laws, identity, seen: HashSet::new(), most: 0, breach: None };
        while let Some(world) = open.pop() {
            explorer.most = explorer.most.max(world.most);
            if world.most > explorer.laws.limit {
                explorer.breach = Some(world);
                break;
            }
            if explorer.seen.insert((explorer.identity)(&explorer.laws, &world)) {
                open.extend(explorer.laws.steps(&world));
            }
        }
        explorer
    }
}

fn is_whole() -> bool {
    std::env::var_os("WHOLE_MODEL").is_some()
}

fn no_interleaving_breaches(laws: &Laws, size: Size, least: usize) {
    let explorer = Explorer::explored(laws.clone(), size, identity::reduced);
    assert!(explorer.breach.is_none(), "{:#?}", explorer.breach);
    // An explorer that went nowhere, and a limiter that grants nothing, would find nothing either.
    assert_eq!(explorer.most, laws.limit);
    let worlds = explorer.seen.len();
    assert!(worlds > least, "only {worlds} worlds");
    println!("limit {}, {size:?}, ticks of {} us: {worlds} worlds", laws.limit, laws.tick_us);
}

const TWO_JOBS_AND_A_CRASH: Size = Size { jobs: 2, crashes: 1, returns: 0 };

#[test]
fn crash_interleavings_never_breach_limit_one() {
    let laws = Laws::new(1, Rules::Kept);
    no_interleaving_breaches(&laws, TWO_JOBS_AND_A_CRASH, 2_000);
    no_interleaving_breaches(&laws, Size { crashes: 2, ..TWO_JOBS_AND_A_CRASH }, 3_000);
    no_interleaving_breaches(&laws.in_half_ticks(), TWO_JOBS_AND_A_CRASH, 5_000);
}

#[test]
fn crash_interleavings_never_breach_limit_two() {
    let laws = Laws::new(2, Rules::Kept);
    no_interleaving_breaches(&laws, TWO_JOBS_AND_A_CRASH, 15_000);
    if is_whole() {
        no_interleaving_breaches(&laws, Size { crashes: 2, ..TWO_JOBS_AND_A_CRASH }, 15_000);
        no_interleaving_breaches(&laws.in_half_ticks(), TWO_JOBS_AND_A_CRASH, 50_000);
    }
}

#[test]
fn crash_and_release_interleavings_never_breach_limit_one() {
    let laws = Laws::new(1, Rules::Kept);
    no_interleaving_breaches(&laws, Size { returns: 1, ..TWO_JOBS_AND_A_CRASH }, 4_000);
    if is_whole() {
        no_interleaving_breaches(&laws, Size { jobs: 2, crashes: 2, returns: 2 }, 10_000);
    }
}

#[test]
fn crash_and_release_interleavings_never_breach_limit_two() {
    let laws = Laws::new(2, Rules::Kept);
    no_interleaving_breaches(&laws, Size { jobs: 1, crashes: 1, returns: 1 }, 3_000);
    if is_whole() {
        no_interleaving_breaches(&laws, Size { returns: 1, ..TWO_JOBS_AND_A_CRASH }, 50_000);
    }
}

/// The explorer sees a broken rule: otherwise that it finds nothing would say nothing.
#[test]
fn every_broken_rule_is_found() {
    let broken =
        [Rules::SettledAtBegin, Rules::NoHold, Rules::BegunLate, Rules::TimeoutIsNotSent, Rules::SameAfterCrash];
    for rules in broken {
        for limit in [1, 2] {
            let explorer = Explorer::explored(Laws::new(limit, rules), TWO_JOBS_AND_A_CRASH, identity::reduced);
            assert!(explorer.breach.is_some(), "{rules:?} was not found at a limit of {limit}");
        }
        let small = Size { jobs: 1, crashes: 1, returns: 1 };
        let explorer = Explorer::explored(Laws::new(1, rules), small, identity::plain);
        assert!(explorer.breach.is_some(), "{rules:?} was not found among all worlds");
    }
}

/// From worlds taken for the same, steps lead to worlds taken for the same: of every world there is, told apart by all that
/// it has. So whatever can be reached from one of them can be reached from the other.
fn worlds_taken_for_the_same_do_the_same(laws: &Laws, size: Size) {
    let mut known: HashMap<u128, HashSet<(u128, bool)>> = HashMap::new();
    let mut seen = HashSet::new();
    let mut open = vec![World::new(&laws.spec, size)];
    while let Some(world) = open.pop() {
        if !seen.insert(identity::plain(laws, &world)) {
            continue;
        }
        let next = laws.steps(&world);
        let same = identity::reduced(laws, &world);
        // A step to the same is none.
        let ends = next.iter().map(|next| (identity::reduced(laws, next), next.most > laws.limit));
        let ends: HashSet<(u128, bool)> = ends.filter(|(id, _)| *id != same).collect();
        let first = known.entry(same).or_insert_with(|| ends.clone());
        assert!(*first == ends, "{:?} {size:?}: another one does not do the same as {world:#?}", laws.rules);
        // After a breach no more is asked.
        open.extend(next.into_iter().filter(|next| next.most <= laws.limit));
    }
    println!("limit {}, {:?}, {size:?}: {} worlds, {} taken apart", laws.limit, laws.rules, seen.len(), known.len());
    assert!(known.len() < seen.len() / 10, "nothing was taken for the same");
}

#[test]
fn merged_states_are_equivalent_with_correct_rules() {
    let (crash, give_back) = (Size { jobs: 1, crashes: 1, returns: 0 }, Size { jobs: 1, crashes: 0, returns: 1 });
    let laws = |limit| Laws::new(limit, Rules::Kept);
    worlds_taken_for_the_same_do_the_same(&laws(1), crash);
    worlds_taken_for_the_same_do_the_same(&laws(1), give_back);
    worlds_taken_for_the_same_do_the_same(&laws(2), Size { crashes: 0, ..crash });
    if is_whole() {
        worlds_taken_for_the_same_do_the_same(&laws(2), crash);
        worlds_taken_for_the_same_do_the_same(&laws(1), Size { jobs: 2, crashes: 0, returns: 0 });
    }
}

/// Where a process keeps its name, what the store would say to a repeat counts, too: those worlds are not compared.
#[test]
fn merged_states_are_equivalent_with_broken_rules() {
    // Permits that are never too late make the most worlds.
    let begun_late = is_whole().then_some(Rules::BegunLate);
    for rules in [Rules::SettledAtBegin, Rules::NoHold, Rules::TimeoutIsNotSent].into_iter().chain(begun_late) {
        worlds_taken_for_the_same_do_the_same(&Laws::new(1, rules), Size { jobs: 1, crashes: 0, returns: 0 });
    }
}
