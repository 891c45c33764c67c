//! The limiter's state machine in a small world, explored exhaustively: every interleaving of two workers with two jobs
//! each, a store and a provider. At every step a worker may crash, or stay frozen for any time.
//!
//! A step is one of: a call, the arrival of its reply, the start or release of a permit, an answer, a crash, time
//! passing. No step is compulsory, so frozen workers, lost answers and expired holds are included. The provider counts
//! a request at some instant from its start to its answer or timeout. A breach is found if any choice of these instants
//! yields one. `WHOLE_MODEL=1` explores more crashes and finer time. No step is left to chance.

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

/// The protocol's rules, or one of them broken: then a breach must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rules {
    Kept,
    /// The slot is released at the start of the request, not at its answer.
    ReleasedAtBegin,
    /// The hold is zero, shorter than a request.
    NoHold,
    /// A permit is used after its send budget.
    StartedLate,
    /// A request that timed out, and may have been sent, is released as unused.
    TimeoutIsNotSent,
    /// A restarted process keeps its incarnation, and numbers its calls from 1.
    SameAfterCrash,
}

/// The size of a world: jobs of each worker, crashes, and permits that are released unused in time.
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
    /// Most requests counted within one window.
    most: usize,
    breach: Option<World>,
}

impl Explorer {
    /// Searches depth first and visits each world once, to the end or to the first breach.
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
    // An explorer without steps, and a limiter without grants, would find no breach either.
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

/// The explorer finds each broken rule. Otherwise finding no breach would prove nothing.
#[test]
fn every_broken_rule_is_found() {
    let broken =
        [Rules::ReleasedAtBegin, Rules::NoHold, Rules::StartedLate, Rules::TimeoutIsNotSent, Rules::SameAfterCrash];
    for rules in broken {
        for limit in [1, 2] {
            let explorer = Explorer::explored(Laws::new(limit, rules), TWO_JOBS_AND_A_CRASH, identity::reduced);
            assert!(explorer.breach.is_some(), "{rules:?} was not found at a limit of {limit}");
        }
        let small = Size { jobs: 1, crashes: 1, returns: 1 };
        let explorer = Explorer::explored(Laws::new(1, rules), small, identity::plain);
        assert!(explorer.breach.is_some(), "{rules:?} was not found among unmerged worlds");
    }
}

/// Merged worlds are equivalent: two worlds with the same `reduced` identity have steps to the same set of identities.
/// All worlds are visited that `plain` distinguishes. So each result that one of them can reach, the other can reach
/// too.
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
        // A step to the same identity is no step.
        let ends = next.iter().map(|next| (identity::reduced(laws, next), next.most > laws.limit));
        let ends: HashSet<(u128, bool)> = ends.filter(|(id, _)| *id != same).collect();
        let first = known.entry(same).or_insert_with(|| ends.clone());
        assert!(
            *first == ends,
            "{:?} {size:?}: a world with the same identity has other steps than {world:#?}",
            laws.rules
        );
        // After a breach, exploration stops.
        open.extend(next.into_iter().filter(|next| next.most <= laws.limit));
    }
    println!("limit {}, {:?}, {size:?}: {} worlds, {} distinct", laws.limit, laws.rules, seen.len(), known.len());
    assert!(known.len() < seen.len() / 10, "no worlds were merged");
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

/// If a restarted process keeps its incarnation, stored replies to repeats matter too. So worlds with the rule
/// `SameAfterCrash` are not compared.
#[test]
fn merged_states_are_equivalent_with_broken_rules() {
    // Permits that are never late yield the most worlds.
    let started_late = is_whole().then_some(Rules::StartedLate);
    for rules in [Rules::ReleasedAtBegin, Rules::NoHold, Rules::TimeoutIsNotSent].into_iter().chain(started_late) {
        worlds_taken_for_the_same_do_the_same(&Laws::new(1, rules), Size { jobs: 1, crashes: 0, returns: 0 });
    }
}
